"""Ollama's GET /api/tags, /api/ps and /api/version, POST /api/show, and the endpoints that are refused by name."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from phonograph import __version__
from phonograph.server.chat.fields import Body
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import OLLAMA_ERRORS, ApiError, invalid
from phonograph.server.http.json_route import JsonRoute
from phonograph.server.ollama.ollama_body import LATEST

router = APIRouter(route_class=JsonRoute, responses=OLLAMA_ERRORS)

_FOREVER = "2318-01-01T00:00:00Z"
"""End of the time that the model stays loaded."""
_ONE_MODEL = "this server has the model it was started with; start another one with `phonograph serve`"
_REFUSED = {
    **dict.fromkeys(("embed", "embeddings"), "/v1/embeddings makes embeddings, if the model does"),
    **dict.fromkeys(("copy", "create", "delete", "pull", "push"), _ONE_MODEL),
    **{"me": "this server knows no accounts", "blobs/{digest}": _ONE_MODEL},
}
"""Endpoints of Ollama without a meaning here, each with the reason."""


class ShowBody(Body):
    """POST /api/show."""

    no_effect: ClassVar[frozenset[str]] = frozenset({"verbose"})

    name: str | None = None

    def check(self) -> list[str]:
        if not self.model:
            raise invalid("model", "model is missing")
        return super().check()


def named_model(serving: Serving, body: Body) -> str:
    """Return the request's name of the model, and remove the tag that clients add to it."""
    name = body.model or ""
    if name not in serving.names and name.removesuffix(LATEST) in serving.names:
        body.model = name.removesuffix(LATEST)
    return name


@router.get("/api/version")
async def ollama_version() -> dict[str, str]:
    """Return the version of Phonograph."""
    return {"version": __version__}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """Return the model under each of its names."""
    serving: Serving = request.app.state.serving
    more = {"modified_at": _time(serving.started)}
    return {"models": [{**_model(serving, name), **more} for name in serving.names]}


@router.get("/api/ps")
async def running_models(request: Request) -> dict[str, Any]:
    """Return the model, which is always loaded."""
    serving: Serving = request.app.state.serving
    facts = serving.engine.facts
    in_memory = 0 if facts.device == "cpu" else facts.model.weight_bytes
    more = {"expires_at": _FOREVER, "size_vram": in_memory, "context_length": facts.context_len}
    return {"models": [{**_model(serving, name), **more} for name in serving.names]}


@router.post("/api/show", response_model=dict[str, Any])
async def show(body: ShowBody, request: Request) -> Response:
    """Return the properties of the model, its template and its sampling defaults."""
    serving: Serving = request.app.state.serving
    body.model = body.model or body.name
    named_model(serving, body)
    headers = serving.check(body)
    facts, family = serving.engine.facts, _family(serving)
    template = serving.chat_template or serving.tokenizer.template_text
    capabilities = ["completion"]
    if serving.harmony is not None or serving.formats.tools is not None:
        capabilities.append("tools")
    if serving.harmony is not None or serving.formats.reasoning is not None:
        capabilities.append("thinking")
    found = {
        "modelfile": f"FROM {serving.root}\n",
        "parameters": "\n".join(f"{name} {value}" for name, value in serving.defaults.items()),
        "template": template or "",
        "details": _details(serving),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": facts.model.num_parameters,
            f"{family}.context_length": facts.context_len,
            f"{family}.vocab_size": facts.vocab_size,
        },
        "capabilities": capabilities,
        "modified_at": _time(serving.started),
    }
    return JSONResponse(found, headers=headers)


def _add_refused(name: str, reason: str) -> None:
    async def refuse(request: Request) -> None:
        path = request.scope["path"]
        raise ApiError(404, f"{path} is not supported: {reason}", code="unsupported_endpoint")

    methods = ["GET", "HEAD", "POST", "DELETE"]
    router.add_api_route(f"/api/{name}", refuse, methods=methods, include_in_schema=False)


for _name, _reason in _REFUSED.items():
    _add_refused(_name, _reason)


def _model(serving: Serving, name: str) -> dict[str, Any]:
    tagged = name if ":" in name else name + LATEST
    # Clients print the beginning of a digest; this one is that of the name, not of the files.
    digest = hashlib.sha256(serving.root.encode("utf-8", "replace")).hexdigest()
    size = serving.engine.facts.model.weight_bytes
    return {"name": tagged, "model": tagged, "size": size, "digest": digest, "details": _details(serving)}


def _details(serving: Serving) -> dict[str, Any]:
    model, family = serving.engine.facts.model, _family(serving)
    return {
        "parent_model": "",
        "format": "gguf" if model.weight_format == "gguf" else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _size(model.num_parameters),
        "quantization_level": model.weight_format,
    }


def _family(serving: Serving) -> str:
    """Return the architecture as Ollama names it: "llama" for LlamaForCausalLM."""
    return serving.engine.facts.model.architecture.removesuffix("ForCausalLM").lower()


def _size(count: int) -> str:
    """Return a number of parameters as text, such as 8.0B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
