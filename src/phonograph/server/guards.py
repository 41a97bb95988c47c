"""What stands before the endpoints: keys, and the size of bodies. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phonograph.server.errors import ApiError
from phonograph.server.page import PATHS

OPEN_PATHS = frozenset({"/health", *PATHS})
"""Paths that need no key: whoever watches over the process has none, and the page, which shows nothing by itself, has
to ask for one."""
BODY_SECONDS = 300.0
"""Time that a client has to send its body."""


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


class BodyLimit:
    """Takes a whole body, or refuses it for its size, before the application sees the request."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(scope, receive)
        except TimeoutError:
            body = ApiError(408, f"the body did not come within {BODY_SECONDS:g} s", code="timeout")
        if isinstance(body, ApiError):
            await error_response(body, {"connection": "close"})(scope, receive, send)
        elif body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | ApiError | None:
        """The body, the reason against it, or None where the client went away."""
        too_large = ApiError(413, f"the body has more than {self._max_bytes} bytes", code="body_too_large")
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdecimal() or int(length) > self._max_bytes:
            return too_large
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                return too_large
            if not message.get("more_body", False):
                return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, and then what comes after it."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    """The error as clients read it."""
    return JSONResponse(error.body(), error.status, {**(error.headers or {}), **(headers or {})})
