"""`phonograph serve`: an OpenAI-compatible server."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack

from phonograph.cli.options import takes_serve_config
from phonograph.cli.progress import progress_bar
from phonograph.cli.show import check_installed, note
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.errors import UNSET, ConfigError

PACKAGES = ("fastapi", "prometheus_client", "uvicorn", "zmq")


@takes_serve_config
def serve(configs: tuple[EngineConfig, ServerConfig]) -> int:
    """Serve a model to OpenAI's clients over HTTP, until Ctrl-C or SIGTERM."""
    check_installed("serve", PACKAGES, extra="server")
    from phonograph.server.http.run import serve as run

    if os.environ.get("VLLM_API_KEY") and not configs[1].api_key:
        problem = "is needed: VLLM_API_KEY is set, which is not read; set PHONOGRAPH_API_KEY, or unset VLLM_API_KEY"
        raise ConfigError("api_key", UNSET, problem)
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
