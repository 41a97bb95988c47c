"""`ProcessClient`: an engine in a separate process, over ZeroMQ. Needs the package zmq (extra `server`)."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from phonograph.config.engine_config import EngineConfig
from phonograph.engine.process.client import REPORTS_AT_ONCE, STOP_SECONDS, EngineClient, StartProgress, started
from phonograph.engine.process.engine_pool import EnginePool
from phonograph.engine.process.main import run_core
from phonograph.engine.process.messages import Command, EngineFacts, Report, Stop
from phonograph.errors import PhonographError

POLL_MILLISECONDS = 200
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
        # Messages are pickles, which can run code: the folder of the sockets is private to this user.
        self._folder = tempfile.TemporaryDirectory(prefix="phonograph-")
        addresses = [f"ipc://{Path(self._folder.name) / name}" for name in ("commands", "messages")]
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._messages = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
        for socket, address in zip((self._commands, self._messages), addresses, strict=True):
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(address)
        context = multiprocessing.get_context("spawn")
        self._last_words, last_words = context.Pipe(duplex=False)
        self._process = context.Process(
            target=run_core,
            args=(config, *addresses, log_settings, last_words, rank),
            name=f"phonograph-engine-{rank}",
        )
        self._process.start()
        last_words.close()
        self._started = False

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def ready(self, progress: StartProgress) -> EngineFacts:
        while True:
            alive = self._process.is_alive()
            if not await self._messages.poll(POLL_MILLISECONDS):
                if not alive:
                    raise PhonographError(f"{self.end()} while it started")
                continue
            facts = started(pickle.loads(await self._messages.recv()), progress)
            if facts is not None:
                self._started = True
                return facts

    def send(self, command: Command) -> None:
        with suppress(zmq.Again):  # the process has ended
            self._commands.send(pickle.dumps(command, pickle.HIGHEST_PROTOCOL), zmq.NOBLOCK, copy=False)

    async def receive(self) -> list[Report]:
        reports: list[Report] = [pickle.loads(await self._messages.recv())]
        with suppress(zmq.Again):  # no further report has arrived
            while len(reports) < REPORTS_AT_ONCE:
                reports.append(pickle.loads(await self._messages.recv(zmq.NOBLOCK)))
        return reports

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
        """End the process: with `Stop` if it accepts commands, else by killing it."""
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        if self._started and self._process.is_alive():
            self.send(Stop())
            self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._last_words.close()
        self._messages.close(linger=0)
        self._commands.close(linger=0)
        self._context.term()
        self._folder.cleanup()


def start_processes(config: EngineConfig, log_settings: dict[str, Any] | None = None) -> EngineClient:
    """Return the client of `data_parallel_size` engines, each in a process of its own."""
    if config.data_parallel_size == 1:
        return ProcessClient(config, log_settings)
    return EnginePool(config.data_parallel_size, lambda rank: ProcessClient(config, log_settings, rank))
