"""API keys, checked before the request is read. Plain ASGI, so that streams pass unchanged."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from phonograph.server.http.api_errors import ApiError
from phonograph.server.http.page import PATHS

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", *PATHS})
"""Paths without a key: health checks have none, and the page shows no data until it has asked for one."""


class ApiKeys:
    """Lets requests pass that have one of the keys as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "a valid API key is needed, sent as `Authorization: Bearer KEY`", code="invalid_api_key")
        await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        # All keys are compared in constant time.
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return an error as an HTTP response."""
    return JSONResponse(error.body(), error.status, {**(error.headers or {}), **(headers or {})})
