"""Decisions of the engine before anything runs, as values with their reasons.

The engine starts from an `EnginePlan`, and `explain` prints one. Making a plan needs neither weights nor the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.selection import Selection
from phonograph.config.engine_config import EngineConfig
from phonograph.core.blocks import pages_for_request
from phonograph.core.device import DeviceSpec
from phonograph.core.limits import Limits
from phonograph.engine.graphs_and_cache import SHORTEST, size_graphs_and_cache
from phonograph.engine.groups.context_ranks import divide_context
from phonograph.engine.groups.draft_plan import DraftPlan, check_speculation, plan_draft, read_draft_spec, wait_reason
from phonograph.engine.groups.encoder_notes import encoder_notes, max_audios
from phonograph.engine.groups.kv_groups import KVGroups, make_kv_groups, make_step_groups
from phonograph.engine.groups.layer_specs import layer_specs
from phonograph.engine.groups.module_limits import check_module, limit_graphs
from phonograph.engine.groups.rank_notes import plan_sums, rank_notes
from phonograph.engine.groups.select_backends import select_backends, weakest_support
from phonograph.engine.groups.state_slots import check_interval, check_states, prefix_cache_note, weakest_of
from phonograph.engine.memory import MemoryPlan, gib
from phonograph.engine.startup.cpu_products import plan_cpu_products
from phonograph.engine.startup.threads import Threads, plan_threads
from phonograph.errors import ConfigError, UnsupportedModelError
from phonograph.graphs.capture_list import CaptureList
from phonograph.graphs.dispatch import Dispatcher
from phonograph.graphs.modes import GraphMode
from phonograph.graphs.resolve import Pieces, Resolution, resolve_mode
from phonograph.kernels.torch.grouped import MAX_GROUPED_ROWS
from phonograph.kernels.triton.experts.expert_plan import why_not
from phonograph.kernels.triton.gemm.choose import MAX_16_BIT_ROWS, has_fp8_products, takes_fp8_rows
from phonograph.kernels.triton.gemm.product_plan import GemmDevice
from phonograph.kernels.triton.ranks.choose_sum import SumChoice
from phonograph.models.heads.encoder_specs import TextEncoder
from phonograph.models.layers.workspace import quantized_sizes
from phonograph.models.modules.module_spec import ModuleSpec
from phonograph.models.quantization.cpu_weights import CpuProducts
from phonograph.models.spec import ModelSpec
from phonograph.models.weights.tensor_parallel import cut_model

PIECES = Pieces(True, "the capture can be broken at each attention call")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Decisions of an engine.

    threads: threads of the operators on a CPU; None on a GPU
    prefix_caching: blocks of known prefixes are found again
    sums:    kernels that sum over ranks, by rows; empty for one rank
    cpu_products: products of quantized weights on a CPU; None on a GPU, and without such weights
    draft: draft model of speculation, or None
    notes:   limits, memory and threads that the configuration left open, or that differ from it
    model:   the model of a rank, which has all of it if there is one rank
    whole:   the model of all ranks together
    kv:      KV groups of the model
    selections: backend of each KV group
    """

    config: EngineConfig
    device: DeviceSpec
    model: ModelSpec
    whole: ModelSpec
    dtype: str
    limits: Limits
    kv: KVGroups
    selections: tuple[Selection, ...]
    resolution: Resolution
    captures: CaptureList
    memory: MemoryPlan
    prefix_caching: bool
    threads: Threads | None
    sums: tuple[SumChoice, ...] = ()
    cpu_products: CpuProducts | None
    draft: DraftPlan | None
    notes: tuple[str, ...]

    @property
    def attention(self) -> AttentionSpec:
        """Attention of the first KV group. Data types and settings are the same in all groups."""
        return self.kv.specs[0]

    @property
    def selection(self) -> Selection:
        """Backend of the first KV group."""
        return self.selections[0]

    @property
    def waits(self) -> bool:
        """True if steps with drafts wait for the tokens of the one before, because of speculation on a GPU."""
        return wait_reason(self.config, self.selections, self.device) is not None

    @property
    def backends(self) -> str:
        """Labels of the backends of all KV groups."""
        return ", ".join(dict.fromkeys(one.capabilities.label for one in self.selections))

    def shares_prefixes(self, attention: AttentionSpec) -> bool:
        """Return True if decodes attend a prefix that they share once, in the KV groups of a specification."""
        selection = self.selections[self.kv.members[attention][0]]
        return selection.capabilities.prefix_sharing(attention, self.device)[0]

    def make_dispatcher(self) -> Dispatcher:
        return Dispatcher(self.resolution, self.captures, max_num_tokens=self.limits.max_num_batched_tokens)


# Default sizes of a step. On a CPU a step of 512 tokens already uses all cores.
_DEFAULT_SEQS = {"cpu": 64, "cuda": 256}
_DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


def make_plan(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> EnginePlan:
    """Resolve a configuration for a model on a device.

    Raises:
        ConfigError: a setting does not fit the model or the device.
        BackendError: no attention backend supports the configuration, or the selected one does not.
        MemoryLimitError: weights and one request do not fit the available memory.
    """
    check_module(config, model)
    dtype = _dtype(config, model, device)
    limits = _limits(config, model, device)
    cpu_products = plan_cpu_products(config.cpu_products, model, dtype) if device.kind == "cpu" else None
    if cpu_products is not None and config.tensor_parallel_size == 1:
        model = cpu_products.with_head(model)
    notes = encoder_notes(config, model, limits, device)
    whole, model = model, cut_model(model, config.tensor_parallel_size)
    sums = plan_sums(config, model, dtype, limits, device)
    notes += [*rank_notes(config, whole, model, dtype, sums), *_product_notes(model, dtype, device)]
    if cpu_products is not None:
        notes.append(f"cpu_products: {cpu_products.reason}")
    kv = resolve_attention(config, whole, device)
    for attention in kv.members:
        _check_block_size(attention)
    if config.batch_invariant and device.kind == "cpu":
        raise ConfigError(
            "batch_invariant",
            True,
            "products are torch's on a CPU, which sums in an order that goes by the number of rows; it works on a GPU",
        )
    if config.batch_invariant and model.quantization is not None:
        raise ConfigError("batch_invariant", True, f"weights in {model.quantization.name} have no such products")
    check_states(config, model, dtype, device)
    _check_experts(config, model, dtype, device)
    _check_lm_head(config, model, dtype, device)
    kv, selected, sized = select_backends(config, kv, device)
    kv, divided = divide_context(config, whole, kv, device)
    check_interval(config, model, kv.block_sizes)
    notes += [*sized, *divided, *kv.notes, *_pooling_notes(config, model)]
    if config.speculation is not None:
        check_speculation(config, selected.values(), device)
    requested = GraphMode.NONE if config.enforce_eager else config.cudagraph_mode
    support, pieces = weakest_of(weakest_support(kv, selected, device), model), PIECES
    if isinstance(model, ModuleSpec) and model.uncapturable is not None:
        support, pieces = limit_graphs(model, model.uncapturable, requested)
    draft = None
    if limits.lookahead_tokens:
        drafting = read_draft_spec(config, whole)
        specs = layer_specs(config, drafting.model, dtype, device)
        notes += drafting.notes
        if limits.max_model_len > drafting.model.context_length:
            trained = drafting.model.context_length
            notes.append(
                f"the head was trained for {trained} positions, and max_model_len is {limits.max_model_len}: fewer "
                "drafts are right behind these"
            )
        draft = plan_draft(config, drafting, whole, dtype, specs, kv, limits, device)
        check_speculation(config, [draft.selection], device, in_passes=True)
        notes.append(draft.note)
    resolution = resolve_mode(requested, support, pieces, speculative_tokens=config.draft_tokens)
    limits, captures, memory, sizing = size_graphs_and_cache(
        config,
        model,
        device,
        limits,
        kv,
        {spec: selection.capabilities for spec, selection in selected.items()},
        resolution,
        cpu_products,
        draft,
    )
    notes += sizing
    of_prefixes = prefix_cache_note(config, model, memory.num_checkpoints)
    notes += [] if of_prefixes is None else [of_prefixes]
    if config.speculation is not None:
        notes.append(config.speculation.note)
        waits = wait_reason(config, selected.values(), device)
        if waits:
            while_drafting = "while requests have drafts, each step waits for the tokens of the one before"
            notes.append(f"speculation: {while_drafting}, because {waits}")
    if config.max_model_len is None:
        notes.insert(0, _context_note(limits, kv, memory, model))
    processes = config.data_parallel_size * config.tensor_parallel_size
    threads = plan_threads(model, dtype, processes) if device.kind == "cpu" else None
    if threads is not None:
        notes.append(f"threads {threads.count}: {threads.reason}")
    return EnginePlan(
        config=config,
        device=device,
        model=model,
        whole=whole,
        dtype=dtype,
        limits=limits,
        kv=kv,
        selections=tuple(selected[spec] for spec in kv.specs),
        resolution=resolution,
        captures=captures,
        memory=memory,
        prefix_caching=config.enable_prefix_caching
        and not limits.whole_prompts
        and (not model.states or memory.num_checkpoints > 0),
        threads=threads,
        sums=sums,
        cpu_products=cpu_products,
        draft=draft,
        notes=(*model.notes, *notes, memory.note, *captures.notes),
    )


def _context_note(limits: Limits, kv: KVGroups, memory: MemoryPlan, model: ModelSpec) -> str:
    context, source = limits.max_model_len, model.context_source
    if context == model.context_length:
        return f"max_model_len {context}: {source}"
    whole = pages_for_request(kv.groups, model.context_length, limits.max_num_batched_tokens) * memory.block
    return (
        f"max_model_len {context}: the largest that fits the memory; the model's {model.context_length} ({source}) "
        f"needs a KV cache of {gib(whole)} (kv_cache_memory_bytes={whole})"
    )


def _check_experts(config: EngineConfig, model: ModelSpec, dtype: str, device: DeviceSpec) -> None:
    """Check that experts have products on the device, and that there are experts to count.

    Raises:
        ConfigError: batch_invariant, for which they have none; or expert_load_metrics without experts.
        UnsupportedModelError: they have none in their weight format.
    """
    experts = [matrix for layer in model.kinds for matrix in layer.matrices if matrix.num_experts is not None]
    if experts and config.batch_invariant:
        problem = (
            "mixtures of experts have no such products, as their tiles depend on the number of tokens; leave it out"
        )
        raise ConfigError("batch_invariant", True, problem)
    if config.expert_load_metrics and not experts:
        raise ConfigError("expert_load_metrics", True, f"{model.architecture} has no experts; leave it out")
    for matrix in experts if device.kind == "cuda" else ():
        reason = why_not(matrix.weight_format(dtype))
        if reason is not None:
            raise UnsupportedModelError(f"{config.model}: {reason}")


def _check_lm_head(config: EngineConfig, model: ModelSpec, dtype: str, device: DeviceSpec) -> None:
    """Check that a head in FP8 has a product on the device.

    Raises:
        ConfigError: it has none; the message says what would work.
    """
    if config.quantize_lm_head is None:
        return
    if config.batch_invariant:
        raise ConfigError("quantize_lm_head", "fp8", "batch_invariant has no such product; leave one of them out")
    if device.kind == "cpu":
        return
    gemm_device, weights = GemmDevice.of(device), model.head.weight_format(dtype)
    if not has_fp8_products(gemm_device, dtype):
        raise ConfigError(
            "quantize_lm_head",
            "fp8",
            f"{device.name} has no product of FP8 in {dtype}; it works with dtype bfloat16 and compute capability 8.9 "
            "or above",
        )
    if not takes_fp8_rows(model.head.shape, weights, MAX_GROUPED_ROWS, gemm_device):
        raise ConfigError(
            "quantize_lm_head",
            "fp8",
            f"products of FP8 take multiples of 16; the head is {model.vocab_size} by {model.hidden_size}",
        )


def _product_notes(model: ModelSpec, dtype: str, device: DeviceSpec) -> list[str]:
    """Describe the products of FP8 weights with FP8 activations, if the device has these."""
    if device.kind == "cpu":
        return []
    _, fp8_inputs = quantized_sizes(model, dtype, GemmDevice.of(device))
    if not fp8_inputs:
        return []
    return [
        "products of FP8 weights: activations are rounded to FP8 activations with one scale a token; without the "
        f"kernel for Hopper, those of up to {MAX_16_BIT_ROWS} tokens stay in {dtype} (torch._scaled_mm)"
    ]


def _dtype(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> str:
    if config.dtype != "auto":
        return config.dtype
    # CPUs multiply 16-bit numbers slower than 32-bit numbers, or in software.
    return "float32" if device.kind == "cpu" else ("bfloat16" if model.dtype == "float32" else model.dtype)


def _limits(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> Limits:
    longest = model.context_length
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ConfigError(
            "max_model_len",
            max_model_len,
            f"exceeds the model's context length of {longest} ({model.context_source}); rope_scaling in hf_overrides "
            "lengthens it",
        )
    if max_model_len < SHORTEST:
        raise ConfigError("max_model_len", max_model_len, "must hold a prompt token and an output token: 2 or more")
    tokens = config.max_num_batched_tokens
    has_model = config.speculation is not None and config.speculation.model is not None
    seqs = config.max_num_seqs or min(_DEFAULT_SEQS[device.kind], tokens or _DEFAULT_SEQS[device.kind])
    return Limits(
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens
        or max(_DEFAULT_BATCHED_TOKENS[device.kind], seqs, max_model_len if whole_prompts(model) else 0),
        draft_tokens=config.draft_tokens,
        lookahead_tokens=config.draft_tokens if has_model else 0,
        pools=model.pooler is not None,
        whole_prompts=whole_prompts(model),
        max_audios=max_audios(model, seqs, device),
    )


def whole_prompts(model: ModelSpec) -> bool:
    """Return True if a prompt is computed in one step: its tokens look ahead, or all of them have a result."""
    return model.pooler is not None and (not model.causal or model.pooler.pooling in ("mean", "all"))


def _pooling_notes(config: EngineConfig, model: ModelSpec) -> list[str]:
    """Return notes on a model that generates nothing.

    Raises:
        ConfigError: a setting is for models that generate.
    """
    if model.pooler is None:
        return []
    for name in ("speculative_config", "num_speculative_tokens", "quantize_lm_head"):
        if value := getattr(config, name):
            raise ConfigError(name, value, f"{model.architecture} generates nothing here; leave it out")
    if model.quantization is not None and not any(one.quantizable for layer in model.kinds for one in layer.matrices):
        works = "encoders have weights in 16 or 32 bits only; leave it out"
        raise ConfigError("quantization", config.quantization or model.quantization.name, works)
    tasks = ", ".join(model.pooler.tasks)
    notes = [f"tasks {tasks}: {model.pooler.origin}"]
    if not whole_prompts(model):
        return notes
    for name in ("num_kv_blocks", "kv_cache_memory_bytes"):
        if value := getattr(config, name):
            raise ConfigError(name, value, "keys of this model live for one step, which sizes the cache; leave it out")
    reason = "tokens look ahead" if not model.causal else f"{model.pooler.pooling} pooling reads all tokens"
    return [*notes, f"each prompt is computed in one step, without prefix cache and chunks, because {reason}"]


def _check_block_size(attention: AttentionSpec) -> None:
    """Check that 32-bit offsets, which kernels use within a block, reach all of its elements.

    Raises:
        ConfigError: the block is too large.
    """
    slot = attention.num_kv_heads * attention.head_size
    most = ((1 << 31) - 1) // slot // 16 * 16
    if attention.block_size > most:
        problem = f"a block would have {attention.block_size * slot} elements of a layer's keys; {most} or less works"
        raise ConfigError("block_size", attention.block_size, problem)


def resolve_attention(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> KVGroups:
    """Return the KV groups of a rank of a model, with the specification of the attention of each.

    Raises:
        ConfigError: as `make_kv_groups`, or limits that do not fit the model.
        UnsupportedModelError: as `make_kv_groups`.
    """
    dtype = _dtype(config, model, device)
    specs = layer_specs(config, cut_model(model, config.tensor_parallel_size), dtype, device)
    context = _limits(config, model, device).max_model_len
    attentions = model.attentions
    sources = [attention.kv_layer for attention in attentions.values()]
    if whole_prompts(model) and not any(source is not None for source in sources):
        return make_step_groups(specs, block_size=config.block_size)
    return make_kv_groups(
        specs,
        max_model_len=context,
        block_size=config.block_size,
        sources=sources,
        indices=[*attentions],
        encoder_len=0 if model.encoder is None else model.encoder.num_positions,
        ragged_encoder=isinstance(model.encoder, TextEncoder),
    )
