"""Start and service of an engine behind a channel, in a separate process or on a thread."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from phonograph.config.engine_config import EngineConfig
from phonograph.engine.build import Engine
from phonograph.engine.groups.group_facts import group_facts
from phonograph.engine.metrics.profiler import Profiler
from phonograph.engine.process.core_loop import CoreLoop
from phonograph.engine.process.messages import Begin, Channel, EngineFacts, ModelFacts, Progress, StartFailed
from phonograph.engine.process.ranks.rank_processes import RankProcesses
from phonograph.engine.session import Session, grammar_compiler
from phonograph.engine.startup.start import start_engine
from phonograph.errors import ConfigError, PhonographError
from phonograph.models.heads.encoder_specs import AudioEncoder, TextEncoder
from phonograph.runner.runner import Runner
from phonograph.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from phonograph.engine.process.kv_publisher import KVPublisher


def run_engine(
    config: EngineConfig,
    channel: Channel,
    *,
    owns_process: bool,
    rank: int = 0,
    on_rank_failure: Callable[[str], None] | None = None,
    rank_processes: RankProcesses | None = None,
) -> None:
    """Start an engine, report its progress, and execute commands until `Stop`.

    Args:
        config: configuration of the engine.
        channel: connection to the client.
        owns_process: True if only the engine runs in this process.
        rank: number of the engine among `data_parallel_size`.
        on_rank_failure: called on another thread with the reason when a rank of `tensor_parallel_size` that is started
            here has ended, so that no step can run.
        rank_processes: processes of the other ranks, if they have started.
    """
    began = time.perf_counter()

    def report(phase: str, done: int, total: int) -> None:
        channel.send(Progress(phase, done, total))

    publisher = None
    try:
        publisher = _publisher(config, rank)
        engine = start_engine(config, report, on_rank_failure=on_rank_failure, rank_processes=rank_processes)
    except PhonographError as error:
        if publisher is not None:
            publisher.close()
        channel.send(StartFailed(error))
        return
    try:
        if owns_process:
            # All present objects stay. Without them a collection is much shorter than a step.
            gc.collect()
            gc.freeze()
        channel.send(_facts(engine, time.perf_counter() - began))
        _serve(engine, config, channel, publisher, rank)
    finally:
        engine.close()


def _serve(engine: Engine, config: EngineConfig, channel: Channel, publisher: KVPublisher | None, rank: int) -> None:
    begin = channel.receive(wait=True)
    if not isinstance(begin, Begin):
        return
    model = engine.plan.model.with_tokenizer_end(begin.eos_token_id)
    grammars = grammar_compiler(lambda: load_tokenizer(config), model, config)
    grammars.warm()
    # Engines with one seed would give equal samples to equal prompts.
    session = Session(engine.core, model, None, config.seed + rank, grammars)
    profiler = Profiler(config.profile_dir)
    reports_cache = config.data_parallel_size > 1
    keys = engine.core.runner.encoder_keys if isinstance(engine.core.runner, Runner) else None
    CoreLoop(
        session, channel, engine.sleeper, profiler, publisher, reports_cache=reports_cache, encoder_keys=keys
    ).run()
    profiler.close()
    if publisher is not None:
        publisher.close()
    session.close("the engine ended before the output was complete")


def _publisher(config: EngineConfig, rank: int) -> KVPublisher | None:
    """Return the publisher of the prefix cache's events, if they are enabled.

    Raises:
        ConfigError: an address cannot be used, or a package is missing.
    """
    if config.kv_events is None:
        return None
    if find_spec("zmq") is None:
        problem = "needs the package zmq: pip install 'phonograph[kv-events]'"
        raise ConfigError("kv_events_config", config.kv_events_config, problem)
    from phonograph.engine.process.kv_publisher import KVPublisher

    return KVPublisher(config.kv_events.of_engine(rank), rank)


def _facts(engine: Engine, seconds: float) -> EngineFacts:
    plan, model = engine.plan, engine.plan.whole
    # Values of layers import torch, which the client's process does without.
    encoder = None if model.encoder is None else replace(model.encoder, layers=())
    return EngineFacts(
        model=ModelFacts(
            architecture=model.architecture,
            num_parameters=model.num_parameters,
            weight_bytes=model.weight_bytes(plan.dtype),
            weight_format=plan.dtype if model.quantization is None else model.quantization.name,
        ),
        context_len=engine.core.scheduler.context_len - plan.limits.pools,
        vocab_size=plan.model.vocab_size,
        eos_token_ids=plan.model.eos_token_ids,
        pooler=model.pooler,
        encoder=encoder if isinstance(encoder, AudioEncoder) else None,
        text_encoder=encoder if isinstance(encoder, TextEncoder) else None,
        row_size=model.num_outputs,
        has_token_types=model.has_token_types,
        max_num_seqs=plan.limits.max_num_seqs,
        scheduling_policy=plan.config.scheduling_policy,
        device=plan.device.name,
        attention_backend=plan.backends,
        resolution=plan.resolution,
        captures=plan.captures,
        graph_memory_bytes=engine.captured.memory_bytes,
        capture_seconds=engine.captured.seconds,
        capture_retries=engine.captured.retries,
        block_size=plan.attention.block_size,
        kv_groups=group_facts(plan),
        sums=() if engine.group is None else engine.group.ranks.sums,
        notes=(*plan.notes, *_event_notes(plan.config), *map(str, engine.captured.retries)),
        start_seconds=seconds,
        stats=engine.core.scheduler.stats,
    )


def _event_notes(config: EngineConfig) -> list[str]:
    if config.kv_events is None:
        return []
    notes = [f"KV events: published at {config.kv_events.endpoint}"]
    if "max_queue_size" in (config.kv_events_config or ()):
        notes.append("KV events: max_queue_size has no effect, batches are handed to ZeroMQ at once")
    return notes
