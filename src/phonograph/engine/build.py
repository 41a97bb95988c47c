"""Makes a running core from a plan: weights, KV cache, attention, graphs. The only place that wires the parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from phonograph.attention.backend import AttentionLayer, BatchLimits
from phonograph.attention.select import load
from phonograph.device import DeviceSpec, known_device
from phonograph.engine.core import EngineCore
from phonograph.engine.plan import EnginePlan
from phonograph.errors import ConfigError
from phonograph.graphs.buffers import StaticBuffers
from phonograph.graphs.modes import GraphKey
from phonograph.graphs.tape import TapeRuntime
from phonograph.models.load import load_model
from phonograph.runner.kv_pool import allocate_kv_caches
from phonograph.runner.model_runner import CaptureReport, ModelRunner
from phonograph.runner.program import StepProgram
from phonograph.runner.sampler import Sampler
from phonograph.runner.slots import SlotTable, blocks_for
from phonograph.runner.synthetic import SyntheticBatches, load_buffers
from phonograph.runner.verify_subject import RunnerSubject
from phonograph.scheduler import Scheduler, SchedulerLimits

BuildProgress = Callable[[str, int, int], None]
"""Called with the phase ("weights", "graphs"), how much of it is done, and of how much."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """A core ready to run, and what start-up did. `make_subject` is for `verify`; it overwrites the KV cache."""

    core: EngineCore
    plan: EnginePlan
    captured: CaptureReport
    make_subject: Callable[[], RunnerSubject]


def this_device(kind: str) -> DeviceSpec:
    """The device an engine runs on here.

    Raises:
        ConfigError: a GPU was asked for; the kernels and the runtime for it are not there yet.
    """
    if kind == "cuda":
        raise ConfigError("device", kind, "the CUDA runtime and kernels are not in this version yet; cpu works")
    return known_device("cpu")


def _unseen(phase: str, done: int, total: int) -> None:
    """Progress nobody watches."""


def build_engine(plan: EnginePlan, progress: BuildProgress | None = None) -> Engine:
    """Loads the model and captures all graphs.

    Raises:
        ConfigError, BackendError, WeightError, MemoryLimitError: as the parts do.
    """
    if plan.config.num_speculative_tokens:
        raise ConfigError(
            "num_speculative_tokens", plan.config.num_speculative_tokens, "speculation can be explained, not run yet; 0"
        )
    backend_class = load(plan.selection)
    device = torch.device(plan.device.kind)
    report = progress or _unseen
    model = load_model(
        plan.model,
        plan.config.model,
        dtype=getattr(torch, plan.dtype),
        device=device,
        load_format=plan.config.load_format,
        seed=plan.config.seed or 0,
        progress=lambda done, total: report("weights", done, total),
        revision=plan.config.revision,
        max_positions=plan.limits.max_model_len,
    )
    limits = plan.limits
    backend = backend_class(
        plan.attention,
        device,
        BatchLimits(
            max_num_seqs=limits.max_num_seqs,
            max_num_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
        ),
    )
    runtime = TapeRuntime()
    buffers = StaticBuffers(
        max_num_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_blocks_per_seq=blocks_for(limits.max_model_len, limits.block_size),
    )
    kv_caches = allocate_kv_caches(
        plan.attention, num_layers=plan.model.num_layers, num_blocks=plan.memory.num_blocks, device=device
    )
    scale = plan.model.head_size**-0.5
    program = StepProgram(
        model=model,
        backend=backend,
        layers=[
            AttentionLayer(index=index, scale=scale, window=window) for index, window in enumerate(plan.model.windows)
        ],
        kv_caches=kv_caches,
        buffers=buffers,
        runtime=runtime,
    )
    builder = backend.make_builder()
    synthetic = SyntheticBatches(
        functools.partial(load_buffers, buffers, block_size=limits.block_size),
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        num_blocks=plan.memory.num_blocks,
        vocab_size=plan.model.vocab_size,
    )
    runner = ModelRunner(
        program=program,
        builder=builder,
        buffers=buffers,
        slots=SlotTable(
            max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len, block_size=limits.block_size
        ),
        sampler=Sampler(
            max_num_seqs=limits.max_num_seqs, vocab_size=plan.model.vocab_size, device=device, seed=plan.config.seed
        ),
        dispatcher=plan.make_dispatcher(),
        runtime=runtime,
        synthetic=synthetic,
    )

    def captured_one(done: int, total: int, key: GraphKey) -> None:
        report("graphs", done, total)

    captured = runner.capture(captured_one)
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            num_blocks=plan.memory.num_blocks,
            enable_prefix_caching=plan.config.enable_prefix_caching,
            policy=plan.config.scheduling_policy,
        )
    )

    def make_subject() -> RunnerSubject:
        return RunnerSubject(
            runner=runner,
            program=program,
            builder=builder,
            buffers=buffers,
            synthetic=synthetic,
            kv_caches=kv_caches,
        )

    return Engine(
        core=EngineCore(scheduler, runner),
        plan=plan,
        captured=captured,
        make_subject=make_subject,
    )
