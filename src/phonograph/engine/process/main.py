"""Entry point of the engine's process, which runs until `Stop` or until the server's process ends."""

from __future__ import annotations

import logging.config
import multiprocessing
import os
import pickle
import signal
import threading
from multiprocessing.connection import Connection, wait
from typing import Any

import zmq

from phonograph.config.engine_config import EngineConfig
from phonograph.engine.process.messages import Command, Message, StartFailed
from phonograph.engine.startup.early_start import select_devices, start_early
from phonograph.errors import PhonographError

FAREWELL_MILLISECONDS = 2000
"""Time for the last messages to be sent when the process ends."""


class _SocketChannel:
    """The engine's ends of the sockets. ZeroMQ's thread moves the bytes, so a slow server does not delay a step."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], commands: str, messages: str) -> None:
        self._commands = context.socket(zmq.PULL)
        self._messages = context.socket(zmq.PUSH)
        for socket in (self._commands, self._messages):
            socket.set_hwm(0)
            socket.linger = FAREWELL_MILLISECONDS
        self._commands.connect(commands)
        self._messages.connect(messages)

    def send(self, message: Message) -> None:
        self._messages.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), copy=False)

    def receive(self, *, wait: bool) -> Command | None:
        try:
            return pickle.loads(self._commands.recv(0 if wait else zmq.NOBLOCK))
        except zmq.Again:
            return None


def run_core(
    config: EngineConfig,
    commands: str,
    messages: str,
    log_settings: dict[str, Any] | None,
    last_words: Connection,
    rank: int = 0,
) -> None:
    """Run the engine's process between the sockets at two addresses. The exit code is not 0 only if a step failed.

    `last_words` takes the reason of an end that no message can tell. `rank` is the number of the engine among
    `data_parallel_size`.
    """
    if log_settings is not None:
        logging.config.dictConfig(log_settings)
    # Ctrl-C reaches both processes; the server ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_the_server()

    def end(reason: str) -> None:
        last_words.send(reason)
        os._exit(1)

    with zmq.Context() as context:
        channel = _SocketChannel(context, commands, messages)
        if config.device != "cpu":
            try:
                select_devices(rank, config.data_parallel_size, config.tensor_parallel_size)
            except PhonographError as error:
                channel.send(StartFailed(error))
                return
            start_early()
        # A late import: the server's process imports this module too, and must not import torch.
        from phonograph.engine.process.run_engine import run_engine

        run_engine(config, channel, owns_process=True, rank=rank, on_rank_failure=end, last_words=last_words)


def _end_with_the_server() -> None:
    server = multiprocessing.parent_process()
    assert server is not None, "this is a process that the server starts"

    def watch() -> None:
        wait([server.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-the-server", daemon=True).start()
