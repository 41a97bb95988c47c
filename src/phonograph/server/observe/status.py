"""Status of the server: /health, /version, /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from phonograph import __version__
from phonograph.errors import quoted
from phonograph.server.http.api_errors import ApiError, api_error
from phonograph.server.openai.serving import Serving

router = APIRouter()


@router.get("/health", response_class=Response)
async def health(request: Request) -> Response:
    """Return 200 while requests are accepted, 503 after the engine's death or during shutdown."""
    serving: Serving = request.app.state.serving
    if serving.engine.problem is not None:
        raise api_error(serving.engine.problem)
    return Response()


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """Return the model under each of its names."""
    serving: Serving = request.app.state.serving
    return {"object": "list", "data": [_model(serving, name) for name in serving.names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """Return the model under one of its names."""
    serving: Serving = request.app.state.serving
    if name not in serving.names:
        raise ApiError(404, f"the model {quoted(name)} does not exist", param="model", code="model_not_found")
    return _model(serving, name)


def _model(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.started,
        "owned_by": "phonograph",
        "root": serving.root,
        "parent": None,
        "max_model_len": serving.engine.facts.context_len,
    }
