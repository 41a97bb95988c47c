"""Verbs of the engine over HTTP, with vLLM's paths: only with `--enable-admin`, and with keys of their own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from phonograph.config.server_config import ServerConfig
from phonograph.engine.process.messages import PauseMode
from phonograph.errors import ConfigError, MemoryLimitError, ModelError
from phonograph.server.chat.fields import Body, Texts
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import ApiError, invalid
from phonograph.server.http.api_keys import has_key, key_error
from phonograph.server.http.json_route import JsonRoute

PATHS = frozenset(
    {"/pause", "/resume", "/is_paused", "/abort_requests", "/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping"}
    | {"/start_profile", "/stop_profile"}
)
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
            try:
                return await handle(request)
            except ConfigError as error:
                raise invalid(error.setting, str(error)) from error
            except (MemoryLimitError, ModelError) as error:
                raise ApiError(503, str(error), kind="server_error", code="not_awake") from error

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


@router.post("/sleep")
async def sleep(
    request: Request,
    level: Annotated[int, Query(description="1 keeps the weights in host memory, 2 reads their files again.")] = 1,
    mode: Annotated[PauseMode, Query(description="Requests in progress, as of /pause.")] = "abort",
) -> dict[str, str]:
    """Give the memory of weights and KV cache back. Requests that come meanwhile wait."""
    serving: Serving = request.app.state.serving
    await serving.engine.sleep(level, mode)
    return {"status": "asleep"}


@router.post("/wake_up")
async def wake_up(
    request: Request,
    tags: Annotated[list[str] | None, Query(description="Parts of the memory: weights, kv_cache, or both.")] = None,
) -> dict[str, Any]:
    """Take the memory again. Requests continue when all of it is there."""
    serving: Serving = request.app.state.serving
    await serving.engine.wake_up(tags)
    return {"status": "asleep" if serving.engine.asleep else "awake", "asleep": sorted(serving.engine.asleep)}


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Return True while weights or KV cache sleep."""
    serving: Serving = request.app.state.serving
    return {"is_sleeping": await serving.engine.is_sleeping()}


@router.post("/start_profile")
async def start_profile(request: Request) -> dict[str, str]:
    """Start to record the engine's operators and kernels, for the folder profile_dir."""
    serving: Serving = request.app.state.serving
    await serving.engine.start_profile()
    return {"status": "started"}


@router.post("/stop_profile")
async def stop_profile(request: Request) -> dict[str, str]:
    """End the profile, and return the file of its trace on the server."""
    serving: Serving = request.app.state.serving
    return {"status": "stopped", "file": await serving.engine.stop_profile()}
