"""`phonograph serve` and `phonograph deploy`: an OpenAI-compatible server, and replicas of one on a Ray cluster."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from importlib import import_module
from typing import Annotated, Any

from cyclopts import Parameter

from phonograph.cli.options import takes_serve_config
from phonograph.cli.progress import progress_bar
from phonograph.cli.show import check_installed, note
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.errors import UNSET, ConfigError

PACKAGES = ("fastapi", "prometheus_client", "uvicorn")


@takes_serve_config
def serve(configs: tuple[EngineConfig, ServerConfig]) -> int:
    """Serve a model to OpenAI's clients over HTTP, until Ctrl-C or SIGTERM."""
    check_installed("serve", PACKAGES, extra="server")
    from phonograph.server.http.run import serve as run

    _check_key(configs[1])
    phases: set[str] = set()

    def print_phase(phase: str, done: int, total: int) -> None:
        if phase not in phases:
            phases.add(phase)
            note(f"starting: {phase}")

    with ExitStack() as start:
        bars = start.enter_context(progress_bar())

        def ready(line: str) -> None:
            start.close()
            note(line)

        try:
            return run(*configs, bars if sys.stderr.isatty() else print_phase, ready)
        except KeyboardInterrupt:  # while the server starts; later it ends the server
            return 130


@takes_serve_config
def deploy(
    configs: tuple[EngineConfig, ServerConfig],
    *,
    replicas: Annotated[str, Parameter(help="Replicas, or a range for autoscaling such as 1-4.")] = "1",
    name: Annotated[str, Parameter(help="Name of the application. One of that name is updated.")] = "phonograph",
) -> int:
    """Run a model on a Ray cluster, behind its proxies, and return when the replicas have started."""
    check_installed("deploy", PACKAGES, extra="ray")
    from phonograph.server.cluster.ray_deployment import make_application, ray_serve

    serve = ray_serve()
    engine, server = configs
    _check_key(server)
    # Host and port are the proxies', and not the replicas'.
    defaults = {name: ServerConfig.model_fields[name].default for name in ("host", "port")}
    application = make_application(engine, server.model_copy(update=defaults), replicas)
    ray: Any = import_module("ray")
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError as error:
        problem = "needs a running Ray cluster; `ray start --head` starts one, RAY_ADDRESS selects another"
        raise ConfigError("deploy", engine.model, problem) from error
    serve.start(http_options={"host": server.host, "port": server.port})
    serve.run(application, name=name, route_prefix="/")
    note(f"{name} serves {engine.model} at http://{server.host}:{server.port}; `serve status` shows it")
    return 0


def _check_key(server: ServerConfig) -> None:
    """Refuse a server without keys where vLLM's variable has one."""
    if os.environ.get("VLLM_API_KEY") and not server.api_key:
        problem = "is needed: VLLM_API_KEY is set, which is not read; set PHONOGRAPH_API_KEY, or unset VLLM_API_KEY"
        raise ConfigError("api_key", UNSET, problem)
