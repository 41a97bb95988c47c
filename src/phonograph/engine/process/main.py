"""The engine's process: starts the engine, then runs the loop until the server says stop, or is gone."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from multiprocessing.connection import wait

import zmq

from phonograph.config.engine_config import EngineConfig
from phonograph.engine.process.messages import Command, Message
from phonograph.engine.startup.early_start import start_early

FAREWELL_MILLISECONDS = 2000
"""How long the last messages may take to be sent when the process ends."""


class _Channel:
    """This process's ends of the sockets. ZeroMQ's own thread moves the bytes, so a slow server never delays a step."""

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


def run_core(config: EngineConfig, commands: str, messages: str) -> None:
    """The process from its first line to its last. It ends with an exit code other than 0 only where a step failed.

    commands, messages: addresses of the sockets
    """
    # The server decides when this process ends, on Ctrl-C too, which reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_the_server()
    if config.device != "cpu":
        start_early()
    # Here, because the server's process has this module too and needs nothing of what the engine is made of.
    from phonograph.engine.process.run_engine import run_engine

    with zmq.Context() as context:
        run_engine(config, _Channel(context, commands, messages), owns_process=True)


def _end_with_the_server() -> None:
    server = multiprocessing.parent_process()
    assert server is not None, "this is a process that the server starts"

    def watch() -> None:
        wait([server.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-the-server", daemon=True).start()
