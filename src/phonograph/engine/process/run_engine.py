"""Start and service of an engine behind a channel: the same in a process of its own and on a thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from phonograph.config.engine_config import EngineConfig
from phonograph.engine.build import Engine
from phonograph.engine.process.core_loop import Commands, CoreLoop
from phonograph.engine.process.messages import Begin, EngineFacts, Message, Progress, StartFailed
from phonograph.engine.session import Session, grammar_compiler
from phonograph.engine.startup.start import start_engine
from phonograph.errors import PhonographError
from phonograph.text.tokenizer import load_tokenizer


class Channel(Commands, Protocol):
    """The engine's end of a connection."""

    def send(self, message: Message) -> None:
        """Send without waiting."""
        ...

    def receive_begin(self) -> Begin | None:
        """Wait for the first message. Return None if the client stops instead of sending it."""
        ...


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine and the time its start took."""

    engine: Engine
    seconds: float


def start_reporting(config: EngineConfig, channel: Channel) -> StartedEngine | None:
    """Start an engine and send its progress. Return None if it could not start, which the client is told."""
    began = time.perf_counter()
    try:
        engine = start_engine(config, lambda phase, done, total: channel.send(Progress(phase, done, total)))
    except PhonographError as error:
        channel.send(StartFailed(error))
        return None
    return StartedEngine(engine, time.perf_counter() - began)


def serve_engine(started: StartedEngine, channel: Channel) -> None:
    """Tell the client that the engine has started, and obey its commands until `Stop`."""
    engine = started.engine
    channel.send(_facts(engine, started.seconds))
    begin = channel.receive_begin()
    if begin is None:
        return
    config = engine.plan.config
    model = engine.plan.model.with_tokenizer_end(begin.eos_token_id)
    grammars = grammar_compiler(lambda: load_tokenizer(config), model, config)
    grammars.warm()
    session = Session(engine.core, model, None, config.seed, grammars)
    CoreLoop(session, channel, channel.send).run()


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
