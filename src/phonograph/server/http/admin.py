"""Verbs of the engine over HTTP, with vLLM's paths: only with `--enable-admin`, and with keys of their own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from phonograph.config.server_config import ServerConfig
from phonograph.engine.process.messages import PauseMode
from phonograph.errors import ConfigError
from phonograph.server.chat.fields import Body, Texts
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_keys import has_key, key_error
from phonograph.server.http.json_route import JsonRoute

PATHS = frozenset({"/pause", "/resume", "/is_paused", "/abort_requests", "/reset_prefix_cache"})
"""Paths of this module, which admit the keys of `admin_api_key` and no others."""


def check_admin(config: ServerConfig) -> None:
    """Check that the endpoints have a key.

    Raises:
        ConfigError: there is none, or they are not enabled.
    """
    if config.enable_admin and not config.admin_api_key:
        raise ConfigError("enable_admin", True, "needs admin_api_key, a key apart from api_key")
    if config.admin_api_key and not config.enable_admin:
        raise ConfigError("admin_api_key", "...", "needs enable_admin")


class AdminRoute(JsonRoute):
    """Route that checks the key before the body is parsed.

    The middleware knows paths only, and a path has several spellings behind a proxy.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_key(request: Request) -> Response:
            keys = request.app.state.serving.config.admin_api_key
            if not has_key(request.scope, [key.encode() for key in keys]):
                raise key_error("admin key (admin_api_key)")
            return await handle(request)

        return handle_with_key


router = APIRouter(route_class=AdminRoute)


class AbortBody(Body):
    """POST /abort_requests."""

    request_ids: Texts


@router.post("/pause")
async def pause(
    request: Request,
    mode: Annotated[PauseMode, Query(description="Requests in progress: abort them, wait for them, or keep them.")] = (
        "abort"
    ),
    clear_cache: Annotated[bool, Query(description="Forget the cached prefixes.")] = True,
) -> dict[str, str]:
    """Stop the engine's steps, and return when none is in flight. Requests that come meanwhile wait."""
    serving: Serving = request.app.state.serving
    await serving.engine.pause_generation(mode=mode, clear_cache=clear_cache)
    return {"status": "paused"}


@router.post("/resume")
async def resume(request: Request) -> dict[str, str]:
    """Continue after a pause."""
    serving: Serving = request.app.state.serving
    await serving.engine.resume_generation()
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(request: Request) -> dict[str, bool]:
    """Return True between a pause and the resume."""
    serving: Serving = request.app.state.serving
    return {"is_paused": await serving.engine.is_paused()}


@router.post("/abort_requests")
async def abort_requests(body: AbortBody, request: Request) -> dict[str, Any]:
    """End requests by the ids of their answers, or by their field request_id. Unknown ids have no effect."""
    serving: Serving = request.app.state.serving
    serving.check(body)
    prefixes = ("", "cmpl-", "chatcmpl-")
    aborted = await serving.engine.abort([prefix + one for one in body.request_ids for prefix in prefixes])
    return {"status": "aborted", "num_aborted": aborted}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> dict[str, bool]:
    """Forget all cached prefixes. Requests in progress continue."""
    serving: Serving = request.app.state.serving
    return {"success": await serving.engine.reset_prefix_cache()}
