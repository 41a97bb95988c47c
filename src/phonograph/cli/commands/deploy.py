"""`phonograph deploy`: replicas of a server on a Ray cluster."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

from cyclopts import Parameter

from phonograph.cli.commands.serve import PACKAGES
from phonograph.cli.options import takes_serve_config
from phonograph.cli.show import check_installed, note
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.errors import ConfigError


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
    listener = {"host": server.host, "port": server.port}
    # They are the proxies', and not the replicas'.
    application = make_application(engine, server.model_copy(update=_DEFAULTS), replicas)
    ray: Any = import_module("ray")
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError as error:
        problem = "needs a running Ray cluster; `ray start --head` starts one, RAY_ADDRESS selects another"
        raise ConfigError("deploy", engine.model, problem) from error
    serve.start(http_options=listener)
    serve.run(application, name=name, route_prefix="/")
    note(f"{name} serves {engine.model} at http://{server.host}:{server.port}; `serve status` shows it")
    return 0


_DEFAULTS = {name: ServerConfig.model_fields[name].default for name in ("host", "port")}
