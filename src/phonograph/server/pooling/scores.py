"""POST /score and /rerank: scores of pairs of texts, by a classifier or by the cosine of two embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from phonograph.engine.offline.pooled_inputs import cosine, paired
from phonograph.errors import RequestError
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import api_error, invalid
from phonograph.server.http.json_route import JsonRoute
from phonograph.server.pooling.check_task import check_task
from phonograph.server.pooling.pooled_body import PairsBody, RerankBody, ScoreBody
from phonograph.server.pooling.pooled_call import admitted_call

router = APIRouter(route_class=JsonRoute)


@router.post("/score", response_model=dict[str, Any])
@router.post("/v1/score", response_model=dict[str, Any])
async def create_scores(body: ScoreBody, request: Request) -> Response:
    """Return the score of each pair of texts: one first text with each second one, or as many of both."""
    fields = body.pair_fields

    def written(scores: list[float]) -> dict[str, Any]:
        return {"data": [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]}

    return await _scored(body, request, fields, written, ("score", "list"))


@router.post("/rerank", response_model=dict[str, Any])
@router.post("/v1/rerank", response_model=dict[str, Any])
@router.post("/v2/rerank", response_model=dict[str, Any])
async def create_ranks(body: RerankBody, request: Request) -> Response:
    """Return documents in the order of their scores with a query, the best first."""

    def written(scores: list[float]) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        shown = body.return_documents is not False
        return {
            "results": [
                {
                    "index": index,
                    **({"document": {"text": body.documents[index]}} if shown else {}),
                    "relevance_score": scores[index],
                }
                for index in order[: body.top_n or None]
            ]
        }

    return await _scored(body, request, ("query", "documents"), written, ("rerank", "list"))


async def _scored(
    body: PairsBody,
    request: Request,
    fields: tuple[str, str],
    written: Callable[[list[float]], Mapping[str, Any]],
    head: tuple[str, str],
) -> Response:
    """Return the answer to a request with pairs of texts.

    Args:
        body: fields of the request.
        request: of the framework.
        fields: names of the fields with the first and the second texts.
        written: returns fields of the answer for the scores of the pairs.
        head: prefix of the answer's id, and its object.
    """
    serving: Serving = request.app.state.serving
    check_task(serving.engine.facts, pools=True)
    names = {"data_1": fields[0], "data_2": fields[1]}
    inputs = serving.engine.pooled_inputs
    try:
        pairs = paired(getattr(body, fields[0]), getattr(body, fields[1]))
        scores_pairs = inputs.scores_pairs
    except RequestError as error:
        raise api_error(error, names) from None
    firsts, seconds = (list(dict.fromkeys(texts)) for texts in zip(*pairs, strict=True))
    num_prompts = len(pairs) if scores_pairs else len(firsts) + len(seconds)
    if body.variables and not scores_pairs:
        raise invalid("chat_template_kwargs", "chat_template_kwargs and instruction are for rerankers with a template")
    call = admitted_call(body, request, "score" if scores_pairs else "embed", field=fields[1], num_prompts=num_prompts)

    def tokens() -> Iterator[list[int]]:
        cut = serving.tokenizer.beginning
        queries = {text: cut(text, body.max_tokens_per_query) if body.max_tokens_per_query else text for text in firsts}
        documents = {text: cut(text, body.max_tokens_per_doc) if body.max_tokens_per_doc else text for text in seconds}
        if not scores_pairs:
            return call.admitted(inputs.text(text, None) for text in (*queries.values(), *documents.values()))
        options: dict[str, Any] = {
            "keeps_last": body.keeps_last,
            "template": serving.chat_template,
            "variables": body.variables,
        }
        made = (inputs.pair(queries[one], documents[two], call.params, **options) for one, two in pairs)
        return call.admitted(made)

    def scored(rows: list[np.ndarray]) -> Mapping[str, Any]:
        if scores_pairs:
            return written([float(row.item()) for row in rows])
        left = dict(zip(firsts, rows[: len(firsts)], strict=True))
        right = dict(zip(seconds, rows[len(firsts) :], strict=True))
        return written([float(cosine(left[one], right[two]).item()) for one, two in pairs])

    return await call.answer(tokens, scored, head=head, num_prompts=num_prompts)
