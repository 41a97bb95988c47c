"""One engine of the demo model in its process, shared by all tests, and servers on it with the settings they want."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from openai import OpenAI
from servers import EngineThread, Server, serving

from phonograph.config.server_config import ServerConfig


@pytest.fixture(scope="session")
def engine_thread() -> Iterator[EngineThread]:
    with EngineThread() as thread:
        yield thread


@pytest.fixture(scope="session")
def shared_server(engine_thread: EngineThread) -> Iterator[Server]:
    with serving(engine_thread, ServerConfig()) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """Run the server with default settings; each test must leave no open call and no used block."""
    yield shared_server
    shared_server.wait_until_idle()


@pytest.fixture
def serve_with(engine_thread: EngineThread) -> Iterator[Callable[..., Server]]:
    """Make a server with other settings and other sampling defaults."""
    with ExitStack() as stack:

        def make(defaults: dict[str, Any] | None = None, **settings: Any) -> Server:
            return stack.enter_context(serving(engine_thread, ServerConfig(**settings), defaults=defaults))

        yield make


@pytest.fixture(scope="session")
def client(shared_server: Server) -> OpenAI:
    return shared_server.client()
