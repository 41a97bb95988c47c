"""Makes a running core from a plan: weights, KV cache, attention, graphs. Here and in `wiring*.py` parts meet."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from phonograph.attention.backend import AnyBackend, AttentionLayer
from phonograph.attention.selection import load
from phonograph.core.device import DeviceSpec, known_device
from phonograph.engine.core import EngineCore
from phonograph.engine.plan import EnginePlan
from phonograph.engine.wiring import Parts, make_cpu_runner
from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphKey
from phonograph.models.transformer import Transformer
from phonograph.models.weights.kv_scales import KVScales
from phonograph.models.weights.loading import begin_loading
from phonograph.runner.captures import CaptureReport
from phonograph.runner.kv_pool import allocate_kv_caches
from phonograph.runner.verify_subject import RunnerSubject
from phonograph.scheduling.limits import SchedulerLimits
from phonograph.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

BuildProgress = Callable[[str, int, int], None]
"""Called with the phase ("weights", on a GPU "kernels", "graphs"), how much of it is done, and of how much."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """A core ready to run, and what start-up did. `make_subject` is for `verify`; it overwrites the KV cache."""

    core: EngineCore
    plan: EnginePlan
    captured: CaptureReport
    make_subject: Callable[[], RunnerSubject]


def this_device(kind: str) -> DeviceSpec:
    """The device an engine runs on here: for "auto" the current GPU where there is one.

    Raises:
        ConfigError: a GPU was asked for and there is none.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return known_device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device", kind, "torch sees no CUDA device here; cpu or auto works")
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    free, _ = torch.cuda.mem_get_info()
    # What torch keeps of engines that this process had before is free too.
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return DeviceSpec(
        name=facts.name,
        kind="cuda",
        capability=(facts.major, facts.minor),
        num_sms=facts.multi_processor_count,
        memory=facts.total_memory,
        free=free + cached,
    )


def _unseen(phase: str, done: int, total: int) -> None:
    """Progress nobody watches."""


def build_engine(plan: EnginePlan, progress: BuildProgress | None = None) -> Engine:
    """Loads the model and captures all graphs. All libraries are imported before memory is allocated.

    Raises:
        ConfigError, BackendError, WeightError, MemoryLimitError: as the parts do.
    """
    report = progress or _unseen
    on_gpu = plan.device.kind == "cuda"
    report("weights", 0, 1)
    make_runner, compiling = make_cpu_runner, nullcontext
    if on_gpu:
        if find_spec("triton") is None:
            problem = (
                "needs the package triton: pip install triton, or torch for CUDA, which brings it; cpu works without"
            )
            raise ConfigError("device", plan.device.kind, problem)
        # Imports Triton, which a CPU installation need not have.
        from phonograph.engine.wiring_cuda import compiling, make_cuda_runner

        make_runner = make_cuda_runner

    def captured_one(done: int, total: int, key: GraphKey) -> None:
        if done == 0 and on_gpu:
            report("kernels", 1, 1)
        report("graphs", done, total)

    device = torch.device(plan.device.kind)
    with compiling():
        # Ahead of the weights, as a library may turn out not to take what this model needs.
        backend = load(plan.selection)(plan.attention, device, plan.limits.of_batches)
        with begin_loading(
            plan.model,
            plan.config.model,
            dtype=getattr(torch, plan.dtype),
            device=device,
            load_format=plan.config.load_format,
            seed=plan.config.seed or 0,
            progress=lambda done, total: report("weights", done, total),
            revision=plan.config.revision,
        ) as loading:
            if plan.config.load_format == "dummy":
                report("weights", 1, 1)
            parts = _make_parts(plan, backend, loading.model)
            runner = make_runner(plan, parts)
            if on_gpu:
                report("kernels", 0, 1)
            runner.load_kernels()
            # Captures come behind the weights: they are all Python, whose lock the threads that bring them need too.
            loading.finish()
            plan = replace(plan, notes=(*plan.notes, *loading.notes))
            captured = runner.capture(captured_one)
    for retry in captured.retries:
        log.warning("%s", retry)
    if on_gpu and not captured.num_graphs:
        report("kernels", 1, 1)
    limits = plan.limits
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
        return RunnerSubject(runner, parts.kv_caches)

    return Engine(core=EngineCore(scheduler, runner), plan=plan, captured=captured, make_subject=make_subject)


def _make_parts(plan: EnginePlan, backend: AnyBackend, model: Transformer) -> Parts:
    kv_caches = allocate_kv_caches(
        plan.attention, num_layers=plan.model.num_layers, num_blocks=plan.memory.num_blocks, device=model.device
    )
    scale = plan.model.head_size**-0.5
    # A cache in another format takes keys and values as they are.
    fp8 = plan.attention.kv_cache_dtype.startswith("float8")
    scales = model.kv_scales if fp8 else KVScales()
    layers = [
        AttentionLayer(
            index=index,
            scale=scale,
            window=window,
            k_scale=scales.keys.get(index),
            v_scale=scales.values.get(index),
            q_scale=scales.queries.get(index),
        )
        for index, window in enumerate(plan.model.windows)
    ]
    return Parts(model=model, backend=backend, layers=layers, kv_caches=kv_caches)
