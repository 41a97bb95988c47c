"""POST /v2/embed: embeddings for Cohere's clients, in the forms that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from phonograph.server.http.api_errors import invalid
from phonograph.server.http.json_route import JsonRoute
from phonograph.server.pooling.embeddings import base64_of
from phonograph.server.pooling.pooled_body import CohereEmbedBody
from phonograph.server.pooling.pooled_call import admitted_call

router = APIRouter(route_class=JsonRoute)


@router.post("/v2/embed", response_model=dict[str, Any])
async def create_cohere_embeddings(body: CohereEmbedBody, request: Request) -> Response:
    """Return the embedding of each text, in all forms of `embedding_types`."""
    texts = body.texts or []
    call = admitted_call(body, request, "embed", field="texts", num_prompts=len(texts))
    inputs, longest = call.serving.engine.pooled_inputs, body.max_tokens
    size = body.output_dimension or call.serving.engine.facts.row_size
    bits = [kind for kind in body.kinds if "binary" in kind]
    if bits and size % 8:
        raise invalid("embedding_types", f"{bits[0]} needs a multiple of 8 numbers, and an embedding has {size}")

    def tokens() -> Iterator[list[int]]:
        for token_ids in call.admitted(inputs.text(text, body.input_type) for text in texts):
            if longest is not None and len(token_ids) > longest:
                problem = (
                    f"a text has {len(token_ids)} tokens, and max_tokens is {longest}: set truncate to START or END"
                )
                raise invalid("texts", problem)
            yield token_ids

    def written(rows: list[np.ndarray]) -> dict[str, Any]:
        return {"embeddings": {kind: [_FORMS[kind](row) for row in rows] for kind in body.kinds}, "texts": texts}

    def whole(head: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        units = {"input_tokens": fields["usage"]["prompt_tokens"], "image_tokens": 0}
        meta = {"api_version": {"version": "2"}, "billed_units": units}
        answer = {"id": head["id"], "embeddings": fields["embeddings"], "texts": fields["texts"], "meta": meta}
        return {**answer, "response_type": "embeddings_by_type"}

    return await call.answer(tokens, written, head=("embd", "list"), num_prompts=len(texts), whole=whole)


def _bits(row: np.ndarray) -> list[int]:
    """Return bytes with a bit for each number, 1 if it is not negative; the first number is the highest bit."""
    return np.packbits(row >= 0).tolist()


def _signed_bits(row: np.ndarray) -> list[int]:
    return [byte - 128 for byte in _bits(row)]


_FORMS: Mapping[str, Callable[[np.ndarray], object]] = {
    "float": np.ndarray.tolist,
    "base64": base64_of,
    "binary": _signed_bits,
    "ubinary": _bits,
}
"""Forms of an embedding."""
