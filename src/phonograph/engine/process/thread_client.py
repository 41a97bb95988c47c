"""`ThreadClient`: an engine on a thread of this process, without sockets and copies of messages."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from phonograph.config.engine_config import EngineConfig
from phonograph.engine.process.client import REPORTS_AT_ONCE, STOP_SECONDS, StartProgress, started
from phonograph.engine.process.messages import Command, EngineFacts, Message, Report, StartFailed, Stop
from phonograph.errors import ConfigError, PhonographError, cause_text

log = logging.getLogger(__name__)


class _Closed(BaseException):
    """Ends the engine's thread at its next message. It is not an `Exception`, so that no handler stops it."""


class _QueueChannel:
    """The engine's ends of the two queues.

    closed: set by the event loop; the thread then ends at its next message
    """

    def __init__(self, put: Callable[[Message], None]) -> None:
        self.commands: SimpleQueue[Command] = SimpleQueue()
        self.closed = False
        self.has_started = False
        self._loop = asyncio.get_running_loop()
        self._put = put

    def call(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the event loop.

        Raises:
            _Closed: the client or the event loop is closed, so that the thread has no work left.
        """
        if self.closed:
            raise _Closed
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the event loop is closed
            raise _Closed from None

    def send(self, message: Message) -> None:
        self.has_started |= isinstance(message, EngineFacts)
        self.call(lambda: self._put(message))

    def receive(self, *, wait: bool) -> Command | None:
        try:
            return self.commands.get(wait)
        except Empty:
            return None


class ThreadClient:
    """Connection to an engine on a thread of this process. See `EngineClient`.

    Raises:
        ConfigError: the configuration is that of several engines.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.data_parallel_size > 1:
            problem = "a thread runs one engine; AsyncLLM takes client=start_processes, which runs each in a process"
            raise ConfigError("data_parallel_size", config.data_parallel_size, problem)
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._channel = _QueueChannel(self._messages.put_nowait)
        self._cause: str | None = None
        self._dead = False
        self._callback: Callable[[], None] | None = None
        # A daemon, so that a program can end without closing the client.
        self._thread = threading.Thread(target=self._run, args=(config,), name="phonograph-engine", daemon=True)
        self._thread.start()

    async def ready(self, progress: StartProgress) -> EngineFacts:
        facts = None
        while facts is None:
            facts = started(await self._messages.get(), progress)
        return facts

    def send(self, command: Command) -> None:
        self._channel.commands.put(command)

    async def receive(self) -> list[Report]:
        messages = [await self._messages.get()]
        while len(messages) < REPORTS_AT_ONCE and not self._messages.empty():
            messages.append(self._messages.get_nowait())
        return [message for message in messages if isinstance(message, Report)]

    def on_death(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        if self._dead:
            asyncio.get_running_loop().call_soon(callback)

    def end(self) -> str:
        return "the engine's thread ended" + ("" if self._cause is None else f" by {self._cause}")

    async def close(self) -> None:
        self._stop()
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)

    def close_now(self) -> None:
        self._stop()
        self._thread.join(STOP_SECONDS)

    def _run(self, config: EngineConfig) -> None:
        """Run the engine until it is closed or fails."""
        with suppress(_Closed):
            try:
                # Imports torch, which takes seconds; the event loop must not wait for it.
                from phonograph.engine.process.run_engine import run_engine

                run_engine(config, self._channel, owns_process=False, on_rank_failure=self._fail)
            except Exception as error:
                log.exception("the engine's thread failed")
                self._cause = self._cause or cause_text(error)
                if not self._channel.has_started:
                    self._channel.send(StartFailed(PhonographError(f"{self.end()} while it started")))
            self._channel.call(self._end)
        # The engine is garbage now. Imports torch, as above.
        from phonograph.engine.startup.release import release_memory

        release_memory()

    def _fail(self, reason: str) -> None:
        """End the engine, of which another rank has ended."""
        self._cause = f"a failure of its ranks: {reason}"
        self._channel.commands.put(Stop())

    def _stop(self) -> None:
        self._callback = None
        self._channel.closed = True
        self._channel.commands.put(Stop())

    def _end(self) -> None:
        self._dead = True
        if self._callback is not None:
            self._callback()
