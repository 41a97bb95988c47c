"""POST /invocations: one path for all requests, which SageMaker needs. The body's fields choose the endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from phonograph.core.pooling_params import PoolingTask
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import invalid
from phonograph.server.http.json_route import parsed_body

router = APIRouter()

_GENERATES = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
_PAIRS = {"query": "/rerank", "texts": "/v2/embed", **dict.fromkeys(("data_1", "text_1", "queries"), "/score")}
_ROWS: Mapping[PoolingTask, str] = {"embed": "/v1/embeddings", "classify": "/classify"}
"""Endpoints of models that generate nothing, by their first task; the others have /pooling."""


@router.post("/invocations", response_model=dict[str, Any])
async def invoke(request: Request) -> Response:
    """Answer as the endpoint of the body's fields: messages, prompt, input, texts, query and documents, or a pair."""
    serving: Serving = request.app.state.serving
    body = await request.body()
    pooler = serving.engine.facts.pooler
    return _Forwarded(body, endpoint_of(parsed_body(body), None if pooler is None else pooler.tasks))


def endpoint_of(body: object, tasks: tuple[PoolingTask, ...] | None) -> str:
    """Return the path of the endpoint that answers a body.

    Args:
        body: parsed body.
        tasks: tasks of a model that generates nothing; None if it generates.

    Raises:
        ApiError: no endpoint of the model has its fields.
    """
    fields = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    paths = _GENERATES
    if tasks is not None:
        rows = "/pooling" if "task" in fields else _ROWS.get(tasks[0], "/pooling")
        paths = {**_PAIRS, "input": rows}
    found = next((path for name, path in paths.items() if name in fields), None)
    if found is None:
        raise invalid(None, f"the body must be a JSON object with one of the fields {', '.join(paths)}")
    return found


class _Forwarded(Response):
    """The response of another endpoint to the same body."""

    def __init__(self, data: bytes, path: str) -> None:
        super().__init__()
        self._data = data
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        data, self._data = self._data, b""

        async def replayed() -> Message:
            nonlocal data
            if not data:
                return await receive()
            message = {"type": "http.request", "body": data, "more_body": False}
            data = b""
            return message

        path = scope.get("root_path", "") + self._path
        await scope["app"].router({**scope, "path": path, "raw_path": path.encode()}, replayed, send)
