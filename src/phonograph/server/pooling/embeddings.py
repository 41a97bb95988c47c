"""POST /v1/embeddings, /pooling and /classify: a row of numbers for each input, or for each of its tokens."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from phonograph.core.pooling_params import PoolingTask
from phonograph.server.http.json_route import JsonRoute
from phonograph.server.pooling.pooled_body import ClassifyBody, EmbeddingBody, PoolingBody
from phonograph.server.pooling.pooled_call import admitted_call

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/embeddings", response_model=dict[str, Any])
async def create_embeddings(body: EmbeddingBody, request: Request) -> Response:
    """Return the embedding of each input."""

    def item(row: np.ndarray) -> dict[str, Any]:
        return {"object": "embedding", "embedding": _encoded(row, body)}

    return await _answer(body, request, "embed", item, ("embd", "list"))


@router.post("/pooling", response_model=dict[str, Any])
async def create_pooling(body: PoolingBody, request: Request) -> Response:
    """Return the result of any task for each input: a row, or one for each of its tokens."""

    def item(rows: np.ndarray) -> dict[str, Any]:
        return {"object": "pooling", "data": _encoded(rows, body)}

    return await _answer(body, request, body.task, item, ("pool", "list"))


@router.post("/classify", response_model=dict[str, Any])
async def create_classes(body: ClassifyBody, request: Request) -> Response:
    """Return the probabilities of the classes of each input, and the most probable one."""
    pooler = request.app.state.serving.engine.facts.pooler
    labels: tuple[str, ...] = () if pooler is None else pooler.labels

    def item(row: np.ndarray) -> dict[str, Any]:
        best = int(row.argmax())
        label = labels[best] if best < len(labels) else None
        return {"label": label, "probs": row.tolist(), "num_classes": row.size}

    return await _answer(body, request, "classify", item, ("classify", "list"))


async def _answer(
    body: ClassifyBody,
    request: Request,
    task: PoolingTask | None,
    item: Callable[[np.ndarray], Mapping[str, Any]],
    head: tuple[str, str],
) -> Response:
    """Return the answer with an item for each input."""
    num_prompts = len(body.input)
    call = admitted_call(body, request, task, field="input", num_prompts=num_prompts)

    def written(rows: list[np.ndarray]) -> dict[str, Any]:
        return {"data": [{"index": index, **item(row)} for index, row in enumerate(rows)]}

    inputs, special = call.serving.engine.pooled_inputs, body.add_special_tokens is not False

    def tokens() -> Iterator[list[int]]:
        return call.admitted((inputs.text(one, None) for one in body.input), special=special)

    return await call.answer(tokens, written, head=head, num_prompts=num_prompts)


def _encoded(rows: np.ndarray, body: EmbeddingBody) -> list[Any] | str:
    """Return numbers as lists, or as base64."""
    if body.encoding_format == "base64":
        return base64_of(rows)
    return rows.tolist()


def base64_of(rows: np.ndarray) -> str:
    """Return base64 of the bytes of numbers in float32, little endian."""
    return base64.b64encode(rows.astype("<f4").tobytes()).decode()
