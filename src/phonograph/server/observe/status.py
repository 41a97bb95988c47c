"""Status of the server: whether it lives and is ready, its load, its model, its settings."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from phonograph import __version__
from phonograph.errors import quoted
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import ApiError, api_error

router = APIRouter()

SECRETS = ("api_key", "admin_api_key", "otlp_traces_endpoint")
"""Settings that hold a key, or may."""


@router.get("/health", response_class=Response)
@router.get("/ping", response_class=Response)
@router.post("/ping", response_class=Response)
async def health(request: Request) -> Response:
    """Return 200 while the engine lives, also while it shuts down, and 503 after its death: a probe for liveness."""
    engine = request.app.state.serving.engine
    if engine.death is not None:
        raise api_error(engine.problem)
    return Response()


@router.get("/ready", response_class=Response)
async def ready(request: Request) -> Response:
    """Return 200 while requests are accepted, 503 after the engine's death or during shutdown."""
    serving: Serving = request.app.state.serving
    if serving.engine.problem is not None:
        raise api_error(serving.engine.problem)
    return Response()


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Return the number of samples in progress or queued."""
    serving: Serving = request.app.state.serving
    return {"server_load": serving.engine.num_open}


@router.get("/kv_event_sources")
async def kv_event_sources(request: Request) -> list[dict[str, Any]]:
    """Return where the events of the prefix cache are published, for routers: a list of vLLM's form, empty without.

    An address that is bound to every interface is answered with the name by which the client has reached the server.
    """
    serving: Serving = request.app.state.serving
    config = serving.engine.config
    if config.kv_events is None:
        return []
    host = request.url.hostname or "127.0.0.1"
    sources = [config.kv_events.of_engine(rank) for rank in range(config.data_parallel_size)]
    return [
        {
            "data_parallel_rank": rank,
            "endpoint": one.endpoint.replace("*", host),
            "replay_endpoint": one.replay_endpoint and one.replay_endpoint.replace("*", host),
            "topic": one.topic,
        }
        for rank, one in enumerate(sources)
    ]


@router.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """Return the settings of engine and server without keys, and the decisions of the start."""
    serving: Serving = request.app.state.serving
    engine, server = serving.engine, serving.config
    return {
        "version": __version__,
        "model": serving.root,
        "engine": engine.config.model_dump(mode="json"),
        "server": server.model_dump(mode="json", exclude={name for name in SECRETS if getattr(server, name)}),
        "sampling_defaults": dict(serving.defaults),
        "max_model_len": engine.facts.context_len,
        "device": engine.facts.device,
        "attention_backend": engine.facts.attention_backend,
        "cudagraph_mode": engine.facts.resolution.mode.value,
        "notes": engine.facts.notes,
    }


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """Return the special tokens and the chat template.

    The endpoint must be asked for: lm-evaluation-harness takes a server that has it for one whose tokenizer it shall
    use, also where it was given a tokenizer, and then fails.
    """
    serving: Serving = request.app.state.serving
    if not serving.config.enable_tokenizer_info_endpoint:
        raise ApiError(404, "/tokenizer_info is served with --enable-tokenizer-info-endpoint")
    tokenizer = serving.tokenizer
    special = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    return {
        **{name: None if token_id is None else tokenizer.piece(token_id) for name, token_id in special.items()},
        **{f"{name}_id": token_id for name, token_id in special.items()},
        "tokenizer_class": type(tokenizer.hugging_face).__name__,
        "vocab_size": tokenizer.vocab_size,
        "chat_template": serving.chat_template or tokenizer.chat_template,
    }


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
    pooler = serving.engine.facts.pooler
    return {
        "id": name,
        "object": "model",
        "created": serving.started,
        "owned_by": "phonograph",
        "root": serving.root,
        "parent": None,
        "max_model_len": serving.engine.facts.context_len,
        "tasks": ["generate"] if pooler is None else list(pooler.tasks),
    }
