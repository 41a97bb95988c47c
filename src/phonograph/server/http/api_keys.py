"""API keys, checked before the request is read. Plain ASGI, so that streams pass unchanged."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from phonograph.server.http.api_errors import ApiError, error_body
from phonograph.server.http.page import PATHS
from phonograph.server.observe.logs import route_path

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", *PATHS})
"""Paths without a key: health checks have none, and the page shows no data until it has asked for one."""


class ApiKeys:
    """Lets requests pass that have one of the keys as `Authorization: Bearer KEY`, or as Anthropic's `x-api-key`.

    keys:       valid keys
    open_paths: paths that pass without one of them, as they check keys of their own
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str] = ()) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = OPEN_PATHS.union(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope["path"], scope.get("root_path", ""))
        if scope["type"] != "http" or path in self._open_paths or has_key(scope, self._keys):
            await self._app(scope, receive, send)
            return
        await error_response(key_error("API key"), path=scope["path"])(scope, receive, send)


def has_key(scope: Scope, keys: Sequence[bytes]) -> bool:
    """Return True if a request has one of the keys as `Authorization: Bearer KEY` or `x-api-key: KEY`."""
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    found = [headers.get(b"x-api-key", b"")]
    if scheme.lower() == b"bearer":
        found.append(token.strip())
    # All keys are compared in constant time.
    return any([hmac.compare_digest(one, key) for one in found for key in keys])


def key_error(name: str) -> ApiError:
    """Return the error of a request without a valid key (401)."""
    problem = f"a valid {name} is needed, sent as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    return ApiError(401, problem, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def error_response(error: ApiError, headers: dict[str, str] | None = None, *, path: str) -> JSONResponse:
    """Return an error as an HTTP response, in the form that clients of a path expect."""
    return JSONResponse(error_body(error, path), error.status, {**(error.headers or {}), **(headers or {})})
