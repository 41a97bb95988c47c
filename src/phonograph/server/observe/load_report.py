"""The load of the engine in the header of an answer, for balancers: ORCA's `endpoint-load-metrics`."""

from __future__ import annotations

import json
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phonograph.engine.async_llm import AsyncLLM

FORMAT = "endpoint-load-metrics-format"
HEADER = "endpoint-load-metrics"


class LoadReports:
    """Adds the load to the answers of requests whose header names a format, TEXT or JSON. Plain ASGI."""

    def __init__(self, app: ASGIApp, engine: AsyncLLM) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write = _FORMATS.get(Headers(scope=scope).get(FORMAT, "").upper()) if scope["type"] == "http" else None
        if write is None:
            await self._app(scope, receive, send)
            return

        async def send_reported(message: Message) -> None:
            if message["type"] == "http.response.start":
                value = write(load_of(self._engine)).encode()
                message = {**message, "headers": [*message["headers"], (HEADER.encode(), value)]}
            await send(message)

        await self._app(scope, receive, send_reported)


def load_of(engine: AsyncLLM) -> dict[str, float]:
    """Return the used fraction of the KV cache and the number of queued requests, of all engines together."""
    stats = engine.stats
    return {
        "kv_cache_usage_perc": stats.blocks_used / stats.num_blocks,
        "num_requests_waiting": float(stats.num_waiting + stats.num_deferred),
    }


def _text(load: dict[str, float]) -> str:
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())


def _json(load: dict[str, float]) -> str:
    return "JSON " + json.dumps({"named_metrics": load})


_FORMATS: dict[str, Callable[[dict[str, float]], str]] = {"TEXT": _text, "JSON": _json}
