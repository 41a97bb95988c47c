"""Sizes that depend on each other: graphs, KV cache, context, and sequences of a step.

Graphs take memory, and the KV cache takes the rest. The cache bounds the context, the sequences and the tokens of a
step, and these bound the graphs. So memory is planned for the graphs within the configured limits, and the graphs that
are captured are those within the limits that the cache leaves. These are never more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import Capabilities
from phonograph.attention.composite.context_parallel import context_spec, step_cache_bytes
from phonograph.config.engine_config import EngineConfig
from phonograph.core.blocks import blocks_for, group_blocks, most_step_tokens
from phonograph.core.device import DeviceSpec
from phonograph.core.limits import Limits
from phonograph.engine.groups.draft_plan import DraftPlan
from phonograph.engine.groups.kv_groups import KVGroups
from phonograph.engine.memory import MemoryPlan, gib, plan_memory
from phonograph.errors import ConfigError, MemoryLimitError
from phonograph.graphs.capture_list import CaptureList, make_capture_list
from phonograph.graphs.modes import GraphMode, GraphSupport
from phonograph.graphs.resolve import Resolution
from phonograph.models.quantization.cpu_weights import CpuProducts
from phonograph.models.spec import ModelSpec

SHORTEST = 2
"""Tokens of the shortest context: one of the prompt and one of the output."""
_DEFAULT_CAPTURE_TOKENS = {"cpu": 8, "cuda": 2048}
_CPU_GRAPHS = (
    f"graphs of up to {_DEFAULT_CAPTURE_TOKENS['cpu']} tokens: on a CPU padding costs more than larger graphs gain; "
    "max_cudagraph_capture_size captures more"
)


class GraphsAndCache(NamedTuple):
    """Sizes that fit the memory together, and notes on limits that differ from the configured ones."""

    limits: Limits
    captures: CaptureList
    memory: MemoryPlan
    notes: tuple[str, ...]


def size_graphs_and_cache(
    config: EngineConfig,
    model: ModelSpec,
    device: DeviceSpec,
    limits: Limits,
    kv: KVGroups,
    capabilities: Mapping[AttentionSpec, Capabilities],
    resolution: Resolution,
    cpu_products: CpuProducts | None,
    draft: DraftPlan | None = None,
) -> GraphsAndCache:
    """Size graphs, KV cache and limits.

    Args:
        config: settings of graphs and memory.
        model: sizes of the model.
        device: memory of the device.
        limits: the configured limits; the longest context if none is configured.
        kv: KV groups, with their attention and block sizes.
        capabilities: those of the selected backend of each attention, for its buffers.
        resolution: the mode that runs, and the support of the backends.
        cpu_products: form of quantized weights on a CPU.
        draft: draft model of speculation, or None.

    Raises:
        ConfigError: no graph of a configured size can run.
        MemoryLimitError: weights and one request do not fit the available memory.
    """
    graph_tokens, mode = _largest_graph(config, limits, device), resolution.mode
    ragged = resolution.support.level is GraphSupport.ALWAYS
    ragged = ragged and all(one.takes_ragged_decodes for one in capabilities.values())

    sharing = {one.sharing_graphs(spec, device, limits) for spec, one in capabilities.items()} - {0}

    def captures_within(limits: Limits, most_step_tokens: int | None = None) -> CaptureList:
        return make_capture_list(
            mode,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_capture_tokens=graph_tokens,
            most_step_tokens=most_step_tokens,
            sizes=config.cudagraph_capture_sizes,
            speculative_tokens=limits.draft_tokens,
            most_logits=limits.max_num_logits,
            pads_decodes=device.kind != "cpu",
            ragged=ragged,
            draft_passes=draft is not None and device.kind != "cpu",
            decodes=not limits.pools,
            sharing_from=min(sharing, default=0),
        )

    graphs, dtype = captures_within(limits).largest_first(), kv.specs[0].dtype
    # Once, because a search may plan many contexts.
    weights = model.weight_bytes(dtype) if cpu_products is None else cpu_products.weight_bytes(model, dtype)
    weights += 0 if draft is None else draft.weight_bytes

    def plan_context(max_model_len: int, max_num_seqs: int) -> tuple[Limits, MemoryPlan]:
        within = replace(limits, max_model_len=max_model_len, max_num_seqs=max_num_seqs)
        attention_bytes = _more_table_bytes(kv, within)
        for spec, groups in kv.members.items():
            one = capabilities[spec]
            plans = 1 if one.plans_by_lengths else len(groups)
            attention_bytes += plans * one.buffer_bytes(spec, device, within, graphs)
            if config.decode_context_parallel_size > 1:
                of_context = context_spec(spec, config.decode_context_parallel_size)
                attention_bytes += one.buffer_bytes(of_context, device, within, graphs) + step_cache_bytes(spec, within)
        if draft is not None:
            # The first pass and the others have a plan each.
            spec, one = draft.attention, draft.selection.capabilities
            attention_bytes += 2 * one.buffer_bytes(spec, device, within, graphs)
        return within, plan_memory(
            config,
            model,
            device,
            within,
            kv=kv,
            attention_bytes=attention_bytes,
            graph_tokens=graphs[0].num_tokens if graphs else 0,
            num_graphs=len(graphs),
            weights=weights,
            draft=draft,
        )

    def plan_seqs(max_num_seqs: int) -> tuple[Limits, MemoryPlan]:
        if config.max_model_len is not None:
            return plan_context(limits.max_model_len, max_num_seqs)
        plan = partial(plan_context, max_num_seqs=max_num_seqs)
        return _largest_context(plan, limits.max_model_len, kv.block_sizes[0])

    within, memory = _with_states(plan_seqs, limits) if model.states else plan_seqs(limits.max_num_seqs)
    notes: list[str] = []
    if within.max_num_seqs < limits.max_num_seqs:
        each = gib(memory.states // within.max_num_seqs)
        notes.append(
            f"max_num_seqs {limits.max_num_seqs} -> {within.max_num_seqs}: the states of a sequence take {each}, and "
            "the KV cache needs the rest of the memory"
        )
    # A sequence has a block in each group, and those of all positions of an encoder, if these are as many in each.
    least = sum(group_blocks(group, 1) for group in kv.groups)
    most_seqs = memory.num_blocks // least
    if most_seqs < within.max_num_seqs:
        why = "the KV cache has no more blocks than that"
        if len(kv.groups) > 1:
            each = "one of each KV group" if least == len(kv.groups) else f"{least} or more"
            why = f"the KV cache has {memory.num_blocks} blocks, and a sequence takes {each}"
        notes.append(f"max_num_seqs {within.max_num_seqs} -> {most_seqs}: {why}")
        memory = replace(memory, states=memory.states // within.max_num_seqs * most_seqs)
        within = replace(within, max_num_seqs=most_seqs)
    configured = (config.cudagraph_capture_sizes or config.max_cudagraph_capture_size) is not None
    if device.kind == "cpu" and mode is not GraphMode.NONE and not configured:
        notes.append(_CPU_GRAPHS)
    # The cache and the longest requests bound the tokens of a step.
    most = most_step_tokens(
        num_blocks=memory.num_blocks,
        groups=kv.groups,
        max_model_len=within.max_model_len,
        max_num_seqs=within.max_num_seqs,
    )
    return GraphsAndCache(within, captures_within(within, most), memory, tuple(notes))


def _more_table_bytes(kv: KVGroups, limits: Limits) -> int:
    """Return the bytes of the block tables of all KV groups but the first: by slot and by row, and slot mappings."""
    blocks = blocks_for(limits.max_model_len, min(kv.block_sizes))
    return (len(kv.groups) - 1) * (2 * 4 * limits.max_num_seqs * blocks + 8 * limits.max_num_batched_tokens)


def _largest_graph(config: EngineConfig, limits: Limits, device: DeviceSpec) -> int:
    largest = config.max_cudagraph_capture_size
    if largest is None:
        # On a GPU each step of prompts alone is a graph.
        most = limits.max_num_batched_tokens
        return most if limits.pools and device.kind != "cpu" else min(_DEFAULT_CAPTURE_TOKENS[device.kind], most)
    if largest > limits.max_num_batched_tokens:
        raise ConfigError(
            "max_cudagraph_capture_size",
            largest,
            f"a step has at most max_num_batched_tokens={limits.max_num_batched_tokens} tokens; lower the one or raise "
            "the other",
        )
    return largest


def _with_states(plan: Callable[[int], tuple[Limits, MemoryPlan]], limits: Limits) -> tuple[Limits, MemoryPlan]:
    """Return the plan for the most sequences, halved until their states leave room for the KV cache.

    Room is short where a request is shorter than the limits say and states take more than the KV cache.

    Args:
        plan: returns the plan for a number of sequences.
        limits: the configured limits.

    Raises:
        MemoryLimitError: not even one sequence fits.
    """
    fitting: tuple[Limits, MemoryPlan] | None = None
    count = limits.max_num_seqs
    while count:
        try:
            fitting = within, memory = plan(count)
            if within.max_model_len == limits.max_model_len or memory.states <= memory.kv_cache:
                break
        except MemoryLimitError:
            if count == 1 and fitting is None:
                raise
        count //= 2
    assert fitting is not None
    return fitting


def _largest_context(
    plan: Callable[[int], tuple[Limits, MemoryPlan]], longest: int, block_size: int
) -> tuple[Limits, MemoryPlan]:
    """Return the plan for the largest context of whole blocks that one sequence has room for.

    Buffers of attention backends grow with the context, so the size of the KV cache does not give the answer at once: a
    binary search over the number of blocks does.

    Raises:
        MemoryLimitError: not even the shortest context fits.
    """
    try:
        return plan(longest)
    except MemoryLimitError:
        pass
    fitting, refused = blocks_for(min(SHORTEST, longest), block_size), blocks_for(longest, block_size)
    best = plan(min(fitting * block_size, longest))
    while refused - fitting > 1:
        middle = (fitting + refused) // 2
        try:
            best, fitting = plan(middle * block_size), middle
        except MemoryLimitError:
            refused = middle
    return best
