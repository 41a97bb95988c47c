"""`phonograph serve`: an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import ExitStack

from phonograph.cli.options import takes_serve_config
from phonograph.cli.progress import progress_bar
from phonograph.cli.show import note
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.errors import ConfigError

PACKAGES = ("fastapi", "prometheus_client", "uvicorn", "zmq")


@takes_serve_config
def serve(configs: tuple[EngineConfig, ServerConfig]) -> int:
    """Serve a model to OpenAI's clients over HTTP, until Ctrl-C or SIGTERM."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError("serve", ", ".join(missing), "not installed; pip install 'phonograph[server]'")
    from phonograph.server.http.run import serve as run

    with ExitStack() as start:
        bars = start.enter_context(progress_bar())

        def ready(line: str) -> None:
            start.close()
            note(line)

        try:
            return run(*configs, bars if sys.stderr.isatty() else _phases(), ready)
        except KeyboardInterrupt:  # while it started: later it is a request to end
            return 130


def _phases() -> Callable[[str, int, int], None]:
    """A line for each phase of the start, for logs."""
    seen: set[str] = set()

    def report(phase: str, done: int, total: int) -> None:
        if phase not in seen:
            seen.add(phase)
            note(f"starting: {phase}")

    return report
