"""The server's process: starts the engine, serves requests, and ends at a signal or the engine's death."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import FrameType

import uvicorn

from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.engine.async_llm import AsyncLLM
from phonograph.engine.process.client import StartProgress
from phonograph.engine.process.process_client import start_processes
from phonograph.errors import ConfigError, ModelError, RequestError
from phonograph.server.chat.harmony import load_harmony
from phonograph.server.chat.serving import Serving
from phonograph.server.http.admin import check_admin
from phonograph.server.http.application import make_app
from phonograph.server.http.http_protocol import http_protocol
from phonograph.server.http.listen import bound, shown_address, tls_context
from phonograph.server.http.starting import Starting
from phonograph.server.observe.logs import engine_logging, server_logging
from phonograph.server.observe.traces import Traces, span_exporter
from phonograph.server.openai.defaults import chat_template, sampling_defaults
from phonograph.text.formats.find_formats import check_formats
from phonograph.text.tokenizer import has_tokenizer

log = logging.getLogger(__name__)

DEATH_SECONDS = 1.0
"""Time that the server runs after the engine's death, so that open requests get their error and /health returns 503."""
FLUSH_SECONDS = 5
"""Time for clients to read the end of their answers before connections are closed."""
KEEP_ALIVE_SECONDS = 60
"""Time that idle connections stay open: longer than clients keep them in their pools."""
BACKLOG = 4096
MAX_CONNECTIONS = 65_536


def serve(engine: EngineConfig, server: ServerConfig, progress: StartProgress, ready: Callable[[str], None]) -> int:
    """Serve until SIGINT, SIGTERM or the engine's death; return the exit code, 1 after a death.

    `ready` is called with one line that names the address and the model.

    Raises:
        PhonographError: the server could not start.
    """
    _allow_many_connections()
    config = uvicorn.Config("", loop="auto")
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_serve(engine, server, progress, ready))


async def _serve(
    engine_config: EngineConfig, config: ServerConfig, progress: StartProgress, ready: Callable[[str], None]
) -> int:
    template = checked_template(engine_config, config)
    tls = tls_context(config)
    exporter = span_exporter(config)
    starting = Starting(BACKLOG, tls)

    def report(phase: str, done: int, total: int) -> None:
        starting.progress(phase, done, total)
        progress(phase, done, total)

    with bound(config) as listener:
        async with AsyncExitStack() as running:
            async with starting.answering(listener):
                serving = await running.enter_async_context(started_server(engine_config, config, template, report))
                if exporter is not None:
                    serving.traces = Traces(exporter, serving.engine.steps, serving.names[0])
                    running.callback(serving.traces.close)
                http = _Server(serving, tls)
            # Clients may connect when the line appears; the backlog holds them until uvicorn accepts.
            address = shown_address(config, listener)
            ready(f"serving {serving.names[0]} at {address}, {serving.engine.facts.resolution.label}")
            return await http.run_until_done(listener)


def checked_template(engine: EngineConfig, server: ServerConfig) -> str | None:
    """Check what a server needs before its engine starts; return the chat template of the settings.

    Raises:
        PhonographError: the model has no tokenizer, or a setting is wrong.
    """
    if not has_tokenizer(engine):
        if engine.skip_tokenizer_init:
            raise ConfigError("skip_tokenizer_init", True, "a server needs the tokenizer; AsyncLLM works without")
        raise ModelError(f"{engine.model} has no tokenizer, which a server needs; give one with --tokenizer")
    check_admin(server)
    check_formats(server)
    return chat_template(server)


@asynccontextmanager
async def started_server(
    engine_config: EngineConfig, config: ServerConfig, template: str | None, progress: StartProgress
) -> AsyncGenerator[Serving]:
    """Start an engine in a process of its own, or several, and yield what answers requests with it."""
    defaults = await asyncio.to_thread(sampling_defaults, engine_config, config)
    client = partial(start_processes, log_settings=engine_logging(config))
    async with AsyncLLM(config=engine_config, client=client, progress=progress) as engine:
        harmony = None
        if config.chat_format == "harmony":
            harmony = await asyncio.to_thread(load_harmony, engine.facts.vocab_size)
        serving = Serving(engine, config, engine_config.model, defaults, template, harmony)
        for note in serving.formats.notes:
            log.info("%s", note)
        await asyncio.to_thread(try_chat, serving)
        # All present objects stay. Without them, collections are too short for clients to notice.
        gc.collect()
        gc.freeze()
        yield serving


def try_chat(serving: Serving) -> None:
    """Log a warning if the chat template fails.

    It is not an error: the template may accept other messages, and completions need none.
    """
    if serving.harmony is not None or serving.engine.facts.pooler is not None:
        return
    if serving.chat_template is None and not serving.tokenizer.has_chat_template:
        return
    try:
        serving.tokenizer.encode_chat([{"role": "user", "content": "Hello"}], template=serving.chat_template)
    except RequestError as error:
        log.warning("chats may fail: %s", error)


class _Server(uvicorn.Server):
    """uvicorn server that drains at the first signal, ends at once at the second, and ends after the engine's death."""

    def __init__(self, serving: Serving, tls: ssl.SSLContext | None) -> None:
        config = serving.config
        super().__init__(
            uvicorn.Config(
                make_app(serving),
                lifespan="off",
                ws="none",
                http=http_protocol(config),
                log_config=server_logging(config),
                log_level=config.uvicorn_log_level,
                access_log=not config.disable_uvicorn_access_log,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=FLUSH_SECONDS,
                ssl_context_factory=None if tls is None else lambda _config, _default: tls,
            )
        )
        self._engine = serving.engine
        self._drain_seconds = config.shutdown_timeout
        self._signalled = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def run_until_done(self, listener: socket.socket) -> int:
        """Serve on the socket; return the exit code."""
        watchers = [asyncio.create_task(self._end_by_signal()), asyncio.create_task(self._end_by_death())]
        try:
            await self.serve(sockets=[listener])
        finally:
            for watcher in watchers:
                watcher.cancel()
        return 0 if self._engine.death is None else 1

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._signalled.is_set():
            self.should_exit = self.force_exit = True
        else:
            log.info(
                "%s: waiting at most %g s for the answers in progress", signal.Signals(sig).name, self._drain_seconds
            )
            # A signal handler runs between any two instructions, so the event loop sets the event.
            self._loop.call_soon_threadsafe(self._signalled.set)

    async def _end_by_signal(self) -> None:
        await self._signalled.wait()
        await self._engine.drain(self._drain_seconds)
        self.should_exit = True

    async def _end_by_death(self) -> None:
        await self._engine.died.wait()
        await asyncio.sleep(DEATH_SECONDS)
        self.should_exit = True


def _allow_many_connections() -> None:
    """Raise the limit of file descriptors, which is lower by default than the number of connections."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS if most == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
