"""The engine's process: starts the engine, then runs the loop until the server says stop, or is gone."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

import zmq

from phonograph.config.engine_config import EngineConfig
from phonograph.engine.process.messages import Begin, Command, EngineFacts, Message, Progress, StartFailed
from phonograph.engine.startup.early_start import start_early
from phonograph.errors import PhonographError

if TYPE_CHECKING:
    from phonograph.engine.build import Engine

FAREWELL_MILLISECONDS = 2000
"""How long the last messages may take to be sent when the process ends."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the two sockets are: commands come to the engine, messages go to the server."""

    commands: str
    messages: str


class _Channel:
    """This process's ends of the sockets. ZeroMQ's own thread moves the bytes, so a slow server never delays a step."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], addresses: Addresses) -> None:
        self._commands = context.socket(zmq.PULL)
        self._messages = context.socket(zmq.PUSH)
        for socket in (self._commands, self._messages):
            socket.set_hwm(0)
            socket.linger = FAREWELL_MILLISECONDS
        self._commands.connect(addresses.commands)
        self._messages.connect(addresses.messages)

    def send(self, message: Message) -> None:
        self._messages.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), copy=False)

    def receive_begin(self) -> Begin | None:
        """Wait for the first message. Return None if the server stops instead of sending it."""
        message = pickle.loads(self._commands.recv())
        return message if isinstance(message, Begin) else None

    def receive(self, *, wait: bool) -> Command | None:
        try:
            return pickle.loads(self._commands.recv(0 if wait else zmq.NOBLOCK))
        except zmq.Again:
            return None


def run_core(config: EngineConfig, addresses: Addresses) -> None:
    """The process from its first line to its last. It ends with an exit code other than 0 only where a step failed."""
    # The server decides when this process ends, on Ctrl-C too, which reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_the_server()
    if config.device != "cpu":
        start_early()
    # Here, because the server's process has this module too and needs nothing of what the engine is made of.
    from phonograph.engine.process.core_loop import CoreLoop
    from phonograph.engine.session import Session, grammar_compiler
    from phonograph.engine.startup.start import start_engine
    from phonograph.text.tokenizer import load_tokenizer

    began = time.perf_counter()
    with zmq.Context() as context:
        channel = _Channel(context, addresses)
        try:
            engine = start_engine(config, lambda phase, done, total: channel.send(Progress(phase, done, total)))
        except PhonographError as error:
            channel.send(StartFailed(error))
            return
        # What exists now stays: the garbage collector need not look at it again, which takes as long as several steps.
        gc.collect()
        gc.freeze()
        channel.send(_facts(engine, time.perf_counter() - began))
        begin = channel.receive_begin()
        if begin is None:
            return
        model = engine.plan.model.with_tokenizer_end(begin.eos_token_id)
        grammars = grammar_compiler(lambda: load_tokenizer(config), model, config)
        grammars.warm()
        session = Session(engine.core, model, None, config.seed, grammars)
        CoreLoop(session, channel, channel.send).run()


def _end_with_the_server() -> None:
    server = multiprocessing.parent_process()
    assert server is not None, "this is a process that the server starts"

    def watch() -> None:
        wait([server.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-the-server", daemon=True).start()


def _facts(engine: Engine, seconds: float) -> EngineFacts:
    plan = engine.plan
    return EngineFacts(
        context_len=engine.core.scheduler.limits.context_len,
        vocab_size=plan.model.vocab_size,
        max_num_seqs=plan.limits.max_num_seqs,
        scheduling_policy=plan.config.scheduling_policy,
        device=plan.device.name,
        attention_backend=plan.selection.capabilities.label,
        resolution=plan.resolution,
        captures=plan.captures,
        graph_memory_bytes=engine.captured.memory_bytes,
        capture_seconds=engine.captured.seconds,
        capture_retries=engine.captured.retries,
        block_size=plan.limits.block_size,
        notes=(*plan.notes, *map(str, engine.captured.retries)),
        start_seconds=seconds,
        stats=engine.core.scheduler.stats,
    )
