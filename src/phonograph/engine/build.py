"""Builds a running engine from a plan: weights, KV cache, attention, graphs.

A platform makes the parts that depend on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

import torch

from phonograph.attention.backend import AnyBackend, AttentionLayer
from phonograph.attention.selection import load
from phonograph.core.device import DeviceSpec, known_device
from phonograph.engine.core import EngineCore
from phonograph.engine.groups.module_limits import capture_graphs
from phonograph.engine.groups.select_backends import make_backends
from phonograph.engine.plan import EnginePlan
from phonograph.engine.process.client import StartProgress, no_progress
from phonograph.engine.startup.cpu_platform import CpuPlatform
from phonograph.engine.startup.platform import DraftModelParts, ModelParts, Platform, gather_draft_weights
from phonograph.engine.startup.sleeper import Load, Sleeper, make_sleeper
from phonograph.engine.startup.subject import make_subject, skip_freed_blocks
from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphKey
from phonograph.kernels.ranks import Ranks
from phonograph.kv_cache.block_events import BlockEvents
from phonograph.models.layer_spec import LayerAttention
from phonograph.models.modules.module_spec import ModuleSpec
from phonograph.models.modules.step_model import StepModel
from phonograph.models.transformer import Transformer
from phonograph.models.weights.kv_scales import KVScales
from phonograph.models.weights.loading import begin_loading
from phonograph.runner.group_builder import GroupBuilder
from phonograph.runner.pools.encoder_keys import EncoderKeys
from phonograph.runner.pools.kv_pool import allocate_kv_caches, allocate_kv_pool
from phonograph.runner.pools.state_pool import allocate_state_pool
from phonograph.runner.runner import CaptureReport, Runner
from phonograph.runner.sequences import Sequences
from phonograph.runner.synthetic_batches import SyntheticBatches
from phonograph.runner.verify_subject import RunnerSubject
from phonograph.sampling.logprobs import ScoreKind
from phonograph.sampling.sampler import Sampler
from phonograph.scheduling.draft_depths import DraftDepths
from phonograph.scheduling.request_blocks import Checkpoints
from phonograph.scheduling.scheduler import Scheduler
from phonograph.speculation.device_drafts import DeviceDrafts

if TYPE_CHECKING:
    from phonograph.engine.process.ranks.rank_group import RankGroup

log = logging.getLogger(__name__)

AnyRunner = TypeVar("AnyRunner", bound=Runner)


@dataclass(slots=True, kw_only=True)
class Engine:
    """A core that is ready to run, with its plan and captures.

    make_subject: returns the subject of `verify`, which overwrites the KV cache
    sleeper: gives memory back for a while; None without `enable_sleep_mode`
    group: the other ranks; None for one rank
    """

    core: EngineCore
    plan: EnginePlan
    captured: CaptureReport
    make_subject: Callable[[], RunnerSubject]
    sleeper: Sleeper | None = None
    group: RankGroup | None = None

    def close(self) -> None:
        """End the processes of the other ranks, if there are any."""
        if self.group is not None:
            self.group.close()


def this_device(kind: str) -> DeviceSpec:
    """Return the device that an engine runs on; for "auto" the current GPU if there is one.

    Raises:
        ConfigError: `kind` is "cuda" and there is no GPU.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return known_device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device", kind, "torch sees no CUDA device here; cpu or auto works")
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    free, _ = torch.cuda.mem_get_info()
    # Memory that torch caches from earlier engines of this process is free too.
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return DeviceSpec(
        name=facts.name,
        kind="cuda",
        capability=(facts.major, facts.minor),
        num_sms=facts.multi_processor_count,
        memory=facts.total_memory,
        free=free + cached,
    )


def make_platform(kind: str, ranks: Ranks | None = None) -> Platform:
    """Return the platform of a kind of device ("cpu", "cuda"), for a whole model or for one rank.

    Raises:
        ConfigError: `kind` is "cuda" and Triton is not installed.
    """
    if kind == "cpu":
        return CpuPlatform(ranks)
    if find_spec("triton") is None:
        problem = "needs the package triton: pip install triton, or torch for CUDA, which brings it; cpu works without"
        raise ConfigError("device", kind, problem)
    # Imports Triton, which CPU installations may lack.
    from phonograph.engine.startup.cuda_platform import CudaPlatform

    # Rank 0 has the current device.
    return CudaPlatform(
        torch.device(kind, ranks.rank) if ranks is not None and ranks.rank else torch.device(kind), ranks=ranks
    )


def build_engine(
    plan: EnginePlan,
    report: StartProgress = no_progress,
    *,
    platform: Platform | None = None,
    group: RankGroup | None = None,
) -> Engine:
    """Load the model and capture all graphs. All libraries are imported before memory is allocated.

    Args:
        plan: decisions of the engine.
        report: called with the progress of the start.
        platform: replaces the platform of the plan's device.
        group: the other ranks; None for one rank.

    Raises:
        ConfigError: a library does not support the configuration.
        BackendError: the attention backend cannot be loaded.
        WeightError: the weights cannot be read.
        MemoryLimitError: the device has too little memory.
        RankError: another rank cannot start.
    """
    report("weights", 0, 1)
    platform = platform or make_platform(plan.device.kind, None if group is None else group.ranks)

    def captured_one(done: int, total: int, key: GraphKey) -> None:
        if done == 0 and platform.compiles:
            report("kernels", 1, 1)
        report("graphs", done, total)

    with platform.starting():
        # Before the weights, because a library may turn out not to support this model.
        backends = make_backends_of(plan, platform.device, None if group is None else group.ranks)
        load_weights = weights_load(plan, platform.device)
        load_draft = _draft_load(plan, platform.device)
        loads = [load_weights] if load_draft is None else [load_weights, load_draft]
        kind = Sleeper if group is None else group.make_sleeper
        sleeper, empty_weights, empty_cache = make_sleeper(plan, platform, loads, kind)
        with (
            load_weights(progress=partial(report, "weights"), make_empty=empty_weights) as loading,
            nullcontext() if load_draft is None else load_draft(make_empty=empty_weights) as draft,
        ):
            if sleeper is not None:
                sleeper.prepare()
            if plan.config.load_format == "dummy":
                report("weights", 1, 1)
            if plan.config.expert_load_metrics:
                assert isinstance(loading.model, Transformer)
                loading.model.count_expert_load()
            draft_model = None if draft is None else draft.model
            assert draft_model is None or isinstance(draft_model, Transformer)
            parts = make_model_parts(plan, backends, loading.model, draft_model, make_empty=empty_cache)
            runner = make_runner(plan, parts, platform, Runner if group is None else group.make_runner)
            if platform.compiles:
                report("kernels", 0, 1)
            platform.compile(runner.launch_kernels)
            # Captures come after the weights: both need Python's lock.
            loading.finish()
            if draft is not None:
                draft.finish()
            of_ranks = () if group is None else group.ranks.notes
            plan = replace(plan, notes=(*plan.notes, *of_ranks, *loading.notes))
            with nullcontext() if group is None else group.capturing():
                if group is not None:
                    gather_draft_weights(plan, parts, group.ranks)
                plan, captured = capture_graphs(plan, runner, captured_one)
            drafts = runner.drafts
            if isinstance(drafts, DeviceDrafts) and drafts.caches is not None and drafts.budget.adaptive:
                runner.time_drafting(drafts.budget.costs.learn)
    for load_X in parts.model.expert_load.values():
        # Captures and the steps before them counted synthetic batches.
        load_X.zero_()
    for retry in captured.retries:
        log.warning("%s", retry)
    if platform.compiles and not captured.num_graphs:
        report("kernels", 1, 1)
    scheduler = make_scheduler(plan, runner.drafts)
    core = EngineCore(scheduler, runner, parts.model.expert_load)
    if sleeper is not None:
        sleeper.start(parts, core, zeroes=zeroes_cache(plan))
    return Engine(
        core=core,
        plan=plan,
        captured=captured,
        make_subject=partial(make_subject, plan, parts, runner),
        sleeper=sleeper,
        group=group,
    )


def weights_load(plan: EnginePlan, device: torch.device, rank: int = 0) -> Load:
    """Return a function that begins to load the weights of a rank."""
    if isinstance(plan.whole, ModuleSpec):
        from phonograph.models.modules.module_model import begin_loading_module  # It imports transformers.

        begin: Load = partial(begin_loading_module, plan.whole)
    else:
        ranks = rank, plan.config.tensor_parallel_size
        begin = partial(begin_loading, plan.whole, cpu_products=plan.cpu_products, rank=ranks)
    return partial(
        begin,
        path=plan.config.model,
        dtype=getattr(torch, plan.dtype),
        device=device,
        load_format=plan.config.load_format,
        seed=plan.config.seed,
        revision=plan.config.revision,
        download_dir=plan.config.download_dir,
    )


def make_scheduler(plan: EnginePlan, drafts: DraftDepths | None = None) -> Scheduler:
    """Make the scheduler of a plan. `drafts` are those of its runner."""
    num_checkpoints = plan.memory.num_checkpoints
    records = plan.config.kv_events is not None or plan.config.data_parallel_size > 1
    return Scheduler(
        plan.limits,
        groups=plan.kv.groups,
        num_blocks=plan.memory.num_blocks,
        enable_prefix_caching=plan.prefix_caching,
        policy=plan.config.scheduling_policy,
        drafts=drafts,
        checkpoints=Checkpoints(num_checkpoints, plan.config.state_checkpoint_interval) if num_checkpoints else None,
        events=BlockEvents() if records else None,
    )


def _draft_load(plan: EnginePlan, device: torch.device) -> Load | None:
    """Return a function that begins to load the draft model; None without one."""
    speculation = plan.config.speculation
    if plan.draft is None or speculation is None or speculation.model is None:
        return None
    return partial(
        begin_loading,
        plan.draft.model,
        speculation.model,
        dtype=getattr(torch, plan.draft.dtype),
        device=device,
        load_format=plan.config.load_format,
        seed=plan.config.seed,
        revision=speculation.revision,
        download_dir=plan.config.download_dir,
    )


def make_runner(
    plan: EnginePlan, parts: ModelParts, platform: Platform, make: Callable[..., AnyRunner] = Runner
) -> AnyRunner:
    """Make a runner over the plan's limits, with kernels not yet loaded and graphs not yet captured."""
    limits = plan.limits
    sampler = None
    if plan.model.pooler is None:
        sampler = Sampler(
            max_num_seqs=limits.max_num_seqs,
            vocab_size=plan.model.vocab_size,
            device=platform.device,
            seed=plan.config.seed,
            batch_invariant=plan.attention.batch_invariant,
            scores=ScoreKind.named(plan.config.logprobs_mode),
        )
    builder = GroupBuilder(parts.backends)
    device_parts = platform.make_parts(plan, replace(parts, units=builder.units), sampler)
    return make(
        program=device_parts.program,
        builder=builder,
        inputs=device_parts.inputs,
        sampling=device_parts.sampling,
        sequences=Sequences(sampler, max_num_seqs=limits.max_num_seqs),
        dispatcher=plan.make_dispatcher(),
        runtime=device_parts.runtime,
        encoder_keys=EncoderKeys.of(parts.model, device_parts.program.attention, limits.max_audios),
        synthetic=SyntheticBatches(
            device_parts.inputs.load,
            max_model_len=limits.max_model_len,
            groups=plan.kv.groups,
            num_blocks=plan.memory.num_blocks,
            vocab_size=plan.model.vocab_size,
            draft_tokens=limits.draft_tokens,
            ragged_decodes=plan.captures.ragged,
            num_slots=limits.max_num_seqs if parts.states else 0,
            num_checkpoints=plan.memory.num_checkpoints,
            ends_in_blocks=plan.draft is not None,
        ),
    )


def make_backends_of(plan: EnginePlan, device: torch.device, ranks: Ranks | None = None) -> list[AnyBackend]:
    """Make the attention backends of a plan; `ranks` connects with the other ranks."""
    divided = plan.config.decode_context_parallel_size
    return make_backends(plan.kv, plan.selections, device, plan.limits, ranks=ranks, context_ranks=divided)


def make_model_parts(
    plan: EnginePlan,
    backends: Sequence[AnyBackend],
    model: StepModel,
    draft: Transformer | None = None,
    *,
    make_empty: Callable[..., torch.Tensor] = torch.empty,
) -> ModelParts:
    """Allocate the KV cache by `make_empty`, and collect the parts that all devices share."""
    caches = allocate_kv_pool(
        plan.kv.groups,
        plan.kv.specs,
        num_pages=plan.memory.num_blocks,
        device=model.device,
        make_empty=make_empty,
    )
    # Only FP8 caches scale keys and values.
    scales = model.kv_scales if plan.attention.has_fp8_cache else KVScales()
    layers = _attention_layers(model, scales)
    sources = [index if one.kv_layer is None else one.kv_layer for index, one in model.spec.attentions.items()]
    kv_caches = [caches[source] for source in sources]
    drafting = None
    if draft is not None and plan.draft is not None:
        drafting = DraftModelParts(
            model=draft,
            backend=load(plan.draft.selection)(plan.draft.attention, model.device, plan.limits),
            layers=_attention_layers(draft, KVScales()),
            kv_caches=allocate_kv_caches(
                plan.draft.attention,
                num_layers=draft.spec.num_layers,
                num_blocks=plan.memory.num_blocks,
                device=model.device,
                make_empty=make_empty,
            ),
        )
    if zeroes_cache(plan):
        for cache in (*kv_caches, *(() if drafting is None else drafting.kv_caches)):
            cache.zero_()
    states = allocate_state_pool(
        model.spec.states,
        num_slots=plan.limits.max_num_seqs + plan.memory.num_checkpoints,
        dtype=model.dtype,
        device=model.device,
        make_empty=make_empty,
    )
    return ModelParts(model=model, backends=backends, layers=layers, kv_caches=kv_caches, states=states, draft=drafting)


def _attention_layers(model: StepModel, scales: KVScales) -> list[AttentionLayer]:
    """Return the parameters of the attention of each layer that has it."""

    def made(index: int, layer: LayerAttention) -> AttentionLayer:
        source = index if layer.kv_layer is None else layer.kv_layer
        return AttentionLayer(
            index=index,
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            sinks=model.sinks(index),
            k_scale=scales.keys.get(source),
            v_scale=scales.values.get(source),
            q_scale=scales.queries.get(index),
        )

    return [made(index, attention) for index, attention in model.spec.attentions.items()]


def zeroes_cache(plan: EnginePlan) -> bool:
    """Return True if kernels may use what no request has written, which must not be NaN then."""
    # Drafts at the end of a sequence reach behind its blocks (prepare.py).
    reach_behind = plan.config.speculation is not None and plan.device.kind != "cpu"
    return reach_behind or not skip_freed_blocks(plan)
