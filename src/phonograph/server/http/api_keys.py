"""API keys, checked before anything of a request is read. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from phonograph.server.http.api_errors import ApiError
from phonograph.server.http.page import PATHS

OPEN_PATHS = frozenset({"/health", *PATHS})
"""Paths that need no key: whoever watches over the process has none, and the page, which shows nothing by itself, has
to ask for one."""


class ApiKeys:
    """Lets through who sends one of the keys, as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "a valid API key must be given as a bearer token", code="invalid_api_key")
        await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        # Every key is compared, in a time that does not depend on where they differ.
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    """The error as clients read it."""
    return JSONResponse(error.body(), error.status, {**(error.headers or {}), **(headers or {})})
