"""An engine in its process, its event loop in a thread, and servers on it with real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import httpx
import uvicorn
from openai import OpenAI

from phonograph.config.server_config import ServerConfig
from phonograph.engine.async_llm import AsyncLLM
from phonograph.engine.process.process_client import start_processes
from phonograph.server.chat.serving import Serving
from phonograph.server.http.application import make_app
from phonograph.server.http.http_protocol import http_protocol

QUESTION = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"
SMALL = {"max_model_len": 1024, "max_num_seqs": 4, "cudagraph_capture_sizes": "1,2,4,16"}


@dataclass
class Server:
    """A server on the shared engine."""

    url: str
    engine: AsyncLLM

    def client(self, **settings: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 30, **settings})

    def post(self, path: str, body: Any = None, **settings: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=30, **settings)

    def get(self, path: str, **settings: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30, **settings)

    def wait_until(self, holds: Callable[[AsyncLLM], bool], seconds: float = 30) -> None:
        """Wait for a condition of the engine, and report its last state if the condition does not come true."""
        until = time.monotonic() + seconds
        while not holds(self.engine):
            assert time.monotonic() < until, (self.engine.num_open, self.engine.stats)
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        """Until no request is open and no block is held: what every test must come back to."""
        self.wait_until(lambda engine: engine.num_open == 0)
        self.wait_until(lambda engine: engine.stats.blocks_used == engine.stats.num_running == 0)


class EngineThread:
    """An event loop in a thread, with the engine on it; a context that waits for the start and ends both.

    Args:
        settings: of the engine, besides those of all tests, or in their place.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings: dict[str, Any] = {"model": "demo", **SMALL, **settings}
        self.loop = asyncio.new_event_loop()
        self.engine: Future[AsyncLLM] = Future()
        self._done = asyncio.Event()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._run(),), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        try:
            self.engine.result(60)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._done.set)
        self._thread.join(20)

    async def _run(self) -> None:
        try:
            async with AsyncLLM(client=start_processes, **self._settings) as engine:
                self.engine.set_result(engine)
                await self._done.wait()
        except BaseException as error:
            if not self.engine.done():
                self.engine.set_exception(error)
            raise


@contextmanager
def serving(
    thread: EngineThread,
    config: ServerConfig,
    *,
    defaults: dict[str, Any] | None = None,
    change: Callable[[Serving], None] = lambda _: None,
) -> Iterator[Server]:
    """One more server on the engine, changed by a function."""
    engine = thread.engine.result()
    made = Serving(engine, config, "demo", defaults or {}, config.chat_template)
    change(made)
    app = make_app(made)
    http = uvicorn.Server(
        uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            http=http_protocol(config),
            log_level="error",
            timeout_graceful_shutdown=1,
        )
    )
    # With its protocol, asyncio turns Nagle's delay off, as it does for the sockets of `phonograph serve`.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    running = thread.submit(http.serve(sockets=[listener]))
    try:
        yield Server(f"http://127.0.0.1:{listener.getsockname()[1]}", engine)
    finally:
        http.should_exit = True
        running.result(20)
