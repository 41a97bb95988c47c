"""`ProcessClient`: an engine in a separate process, over a pair of sockets."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from phonograph.config.engine_config import EngineConfig
from phonograph.engine.process.client import REPORTS_AT_ONCE, STOP_SECONDS, EngineClient, StartProgress, started
from phonograph.engine.process.engine_pool import EnginePool
from phonograph.engine.process.framed_socket import ServerSocket
from phonograph.engine.process.main import run_core
from phonograph.engine.process.messages import Command, EngineFacts, Report
from phonograph.errors import PhonographError

POLL_SECONDS = 0.2
"""Interval at which the start checks that the process is alive."""


class ProcessClient:
    """Connection to an engine in a separate process. See `EngineClient`.

    The process is spawned: the program must guard its entry point by `if __name__ == "__main__"`.

    Args:
        config: configuration of the engine.
        log_settings: logging of the process, for `logging.config.dictConfig`.
        rank: number of the engine among `data_parallel_size`.
    """

    def __init__(self, config: EngineConfig, log_settings: dict[str, Any] | None = None, rank: int = 0) -> None:
        # Messages are pickles, which can run code: no other process has these sockets.
        self._end, end_of_engine = socket.socketpair()
        self._connection = ServerSocket()
        context = multiprocessing.get_context("spawn")
        self._last_words, last_words = context.Pipe(duplex=False)
        self._process = context.Process(
            target=run_core,
            args=(config, end_of_engine, log_settings, last_words, rank),
            name=f"phonograph-engine-{rank}",
        )
        self._process.start()
        last_words.close()
        end_of_engine.close()
        self._started = False

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def ready(self, progress: StartProgress) -> EngineFacts:
        await self._connection.connect(self._end)
        while True:
            alive = self._process.is_alive()
            try:
                (message,) = await asyncio.wait_for(self._connection.take(1), POLL_SECONDS)
            except TimeoutError:
                if not alive:
                    raise PhonographError(f"{self.end()} while it started") from None
                continue
            facts = started(message, progress)
            if facts is not None:
                self._started = True
                return facts

    def send(self, command: Command) -> None:
        self._connection.send(command)

    async def receive(self) -> list[Report]:
        return await self._connection.take(REPORTS_AT_ONCE)

    def on_death(self, callback: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        sentinel = self._process.sentinel

        def ended() -> None:
            loop.remove_reader(sentinel)
            callback()

        loop.add_reader(sentinel, ended)

    def end(self) -> str:
        self._process.join(STOP_SECONDS)
        code = self._process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        with suppress(EOFError, OSError):  # nothing was said
            if self._last_words.poll():
                how += f": {self._last_words.recv()}"
        return f"the engine's process ended {how}"

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        """End the process: by the end of its commands if it accepts some, else by killing it."""
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        if self._started and self._process.is_alive():
            # It comes behind the commands, whether or not the event loop has written all of them.
            with suppress(OSError):  # the process has ended
                self._end.shutdown(socket.SHUT_WR)
            self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._last_words.close()
        self._connection.close()
        self._end.close()


def start_processes(config: EngineConfig, log_settings: dict[str, Any] | None = None) -> EngineClient:
    """Return the client of `data_parallel_size` engines, each in a process of its own."""
    if config.data_parallel_size == 1:
        return ProcessClient(config, log_settings)
    return EnginePool(config.data_parallel_size, lambda rank: ProcessClient(config, log_settings, rank))
