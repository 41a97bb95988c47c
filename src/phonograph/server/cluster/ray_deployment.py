"""Replicas of a server on a Ray cluster. Each is an actor with an engine and its application.

Ray Serve starts, scales, updates and watches the replicas; its proxies take the requests. `build` is the application of
a file for `serve deploy`, `make_application` that of `phonograph deploy`.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from importlib import import_module
from math import ceil
from typing import Any

from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.errors import ConfigError, PhonographError

RAY = "2.60"
"""Version of Ray. Of its interfaces, those of `ALPHA` may change with each one."""
ALPHA = "RequestRouter, AutoscalingPolicy, AutoscalingContext, and the state of its proxies and replicas"
HERE = "phonograph.server.cluster"
PROXY_SETTINGS = ("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "root_path")
"""Settings of a listener, which is Ray's proxy."""
FULL = 0.8
"""Load of a replica from which another one is started."""
REQUESTS_PER_SLOT = 2
"""Requests of a replica for each of its slots. More wait in Ray's proxies, and go to a replica that comes later."""
DEFAULT_SLOTS = 256
STATS_SECONDS = 1.0
DRAIN_POLL_SECONDS = 0.5
DRAIN_MARGIN = 10.0
"""Seconds from the errors of streams that did not end in time until Ray kills the replica."""


def ray_serve() -> Any:
    """Return Ray Serve.

    Raises:
        ConfigError: it is not installed, or has another version.
    """
    install = "pip install 'phonograph[ray]'"
    try:
        ray, serve = import_module("ray"), import_module("ray.serve")
    except ModuleNotFoundError as error:
        raise ConfigError("deploy", f"ray ({error})", f"Ray Serve is not installed; {install}") from error
    if ray.__version__.rpartition(".")[0] != RAY:
        problem = f"is not Ray {RAY}, whose alpha interfaces are used ({ALPHA}); {install}"
        raise ConfigError("deploy", f"ray {ray.__version__}", problem)
    return serve


def this_actor() -> Any:
    """Return the object of Ray's actor in this process: of a proxy or of a replica; None in a driver."""
    worker: Any = import_module("ray._private.worker").global_worker
    return worker.actors.get(worker.actor_id)


def build(args: dict[str, Any]) -> Any:
    """Return the application of a file for `serve deploy`.

    Args:
        args: settings of engine and server by their names, and `replicas` such as "1-4".

    Raises:
        ConfigError: a setting is unknown or wrong, or Ray Serve is not installed.
    """
    settings = dict(args)
    replicas = str(settings.pop("replicas", "1"))
    server = {name: settings.pop(name) for name in list(settings) if name in ServerConfig.model_fields}
    return make_application(EngineConfig(**settings), ServerConfig(**server), replicas)


def make_application(engine: EngineConfig, server: ServerConfig, replicas: str) -> Any:
    """Return the application of a model for `ray.serve.run`.

    Args:
        engine: configuration of each replica's engine.
        server: configuration of each replica's server.
        replicas: number of replicas, or a range for autoscaling.

    Raises:
        ConfigError: a setting is for a server with a listener of its own, or Ray Serve is not installed.
    """
    serve = ray_serve()
    for name in PROXY_SETTINGS:
        value = getattr(server, name)
        if value != ServerConfig.model_fields[name].default:
            raise ConfigError(name, value, "is for a server without Ray; http_options of Ray Serve set up its proxies")
    low, high = replica_range(replicas)
    slots = engine.max_num_seqs or DEFAULT_SLOTS
    ranks = engine.tensor_parallel_size * engine.data_parallel_size
    policy = {"policy_function": f"{HERE}.ray_deployment:scale"}
    scaling = {"min_replicas": low, "max_replicas": high, "policy": policy}
    router = {
        "request_router_class": f"{HERE}.prefix_router:PrefixRouter",
        "request_routing_stats_period_s": STATS_SECONDS,
    }
    make = serve.deployment(
        name="phonograph",
        ray_actor_options={"num_cpus": ranks} if engine.device == "cpu" else {"num_gpus": ranks},
        max_ongoing_requests=REQUESTS_PER_SLOT * slots * engine.data_parallel_size,
        graceful_shutdown_timeout_s=server.shutdown_timeout + DRAIN_MARGIN,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_SECONDS,
        request_router_config=router,
        **({"num_replicas": low} if low == high else {"autoscaling_config": scaling}),
    )
    return make(serve.ingress()(Replica)).bind(engine, server)


def replica_range(text: str) -> tuple[int, int]:
    """Return the least and the most replicas of a number or a range such as "1-4".

    Raises:
        ConfigError: it is neither.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low, high = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if not 1 <= low <= high:
        raise ConfigError("replicas", text, "must be a number of replicas, or a range for autoscaling such as 1-4")
    return low, high


class Replica:
    """Actor with an engine and its application.

    Args:
        engine: configuration of the engine.
        server: configuration of the server.
    """

    async def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        # The driver and Ray's controller import this module too, and need no server.
        from phonograph.server.http.run import checked_template, started_server

        self._running = AsyncExitStack()
        template = checked_template(engine, server)
        started = started_server(engine, server, template, lambda phase, done, total: None)
        self._serving = await self._running.enter_async_context(started)
        self._ending = asyncio.create_task(self._end_streams(), name="end-streams")

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application, which Ray calls with the requests of its proxies."""
        from phonograph.server.http.application import make_app

        return make_app(self._serving)

    async def check_health(self) -> None:
        """Raise the reason of the engine's death. Ray then starts another replica."""
        if self._serving.engine.death is not None:
            raise PhonographError(self._serving.engine.death)

    async def record_routing_stats(self) -> dict[str, int]:
        """Return what the request routers use; see `EngineRouter.loaded`."""
        stats, facts = self._serving.engine.stats, self._serving.engine.facts
        return {
            "num_waiting": stats.num_waiting,
            "blocks_used": stats.blocks_used,
            "num_blocks": stats.num_blocks,
            "kv_tokens": stats.num_blocks * facts.block_size,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `scale` uses."""
        stats = self._serving.engine.stats
        return {"slots": self._serving.engine.facts.max_num_seqs, "kv_use": stats.blocks_used / stats.num_blocks}

    async def __del__(self) -> None:
        """End the engine. Ray calls this when all requests have ended."""
        self._ending.cancel()
        await self._running.aclose()

    async def _end_streams(self) -> None:
        """End streams with an error if they outlast the grace period of a stop. Ray would kill the actor later."""
        state = this_actor()._replica_impl
        while not state._shutting_down:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        # Requests still come from proxies that have not learned of the stop.
        await asyncio.sleep(self._serving.config.shutdown_timeout)
        await self._serving.engine.drain(0)


def scale(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the replicas at which neither slots nor KV caches are fuller than `FULL`.

    Ray applies its limits and delays.

    Args:
        context: Ray's `AutoscalingContext`: requests that run or wait, and the statistics of the replicas.
    """
    stats = context.aggregated_metrics or {}
    slots, kv_uses = stats.get("slots", {}).values(), stats.get("kv_use", {}).values()
    full_batches = context.total_num_requests / max(slots, default=DEFAULT_SLOTS)
    return ceil(max(full_batches, sum(kv_uses)) / FULL), {}
