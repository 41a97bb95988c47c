"""Backend of our Triton kernels: one launch for short queries and one for long ones.

Kernels at the head of the step make the schedules of both. The first launch attends a prefix that several sequences
share once (`kernels/triton/attention/shared_runs.py`). A decode graph holds the first launch only. Every other
graph holds both, each with its own tiles, so that a prefill does not slow down the decodes beside it. Where the GPU
lets a launch begin before the previous one has ended, the two overlap. The launch for long queries then takes as many
multiprocessors as its share of the work, except in steps of so many tokens that it fills the GPU. A graph freezes the
longest query of the first launch and the presence of the second; lengths are read on the device.

With batch invariance (`AttentionSpec.batch_invariant`) the second launch serves queries of every length and cuts no
keys. A token's attention is then the same bit for bit in any batch, as a decode and in any chunk of a prefill. The
first launch only zeroes padding rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AttentionCall
from phonograph.attention.kv_write import GpuBackend
from phonograph.attention.metadata import AttentionMetadata, CommonMetadata, MetadataBuilder
from phonograph.attention.triton.capabilities import TritonCapabilities, has_prefix_tiles, shared_tokens
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.kernels.attention_scratch import MAX_SHORT_QUERY
from phonograph.kernels.triton.attention.decode import decode_attention
from phonograph.kernels.triton.attention.decode_plan import DecodePlan, make_decode_plan, plan_decode
from phonograph.kernels.triton.attention.prefill import merge_prefill, prefill_attention, prefill_overlaps
from phonograph.kernels.triton.attention.prefill_plan import (
    PrefillPlan,
    make_prefill_plan,
    multiprocessors_of,
    plan_prefill,
)

Window = tuple[int, int]
_NO_GPU = (0, 0), 2
"""Capability and multiprocessors without a GPU, in the interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonMetadata(AttentionMetadata):
    """Batch with the plans of each window.

    Attributes:
        short_query_len: longest query of the launch for short ones; 0 if it serves none.
        has_long: True if there may be longer queries.
        divide: True if the two launches divide the multiprocessors.
        in_tiles: True if shared prefixes have tiles of a launch of their own.
    """

    plans: dict[Window, tuple[DecodePlan, PrefillPlan]]
    short_query_len: int
    has_long: bool
    divide: bool
    in_tiles: bool


class TritonMetadataBuilder(MetadataBuilder[TritonMetadata]):
    """Builder with one plan for each window, shared by all graphs. Each step computes them for its layers."""

    depends_on_key = True

    def __init__(self, spec: AttentionSpec, device: torch.device, limits: Limits) -> None:
        capability, num_sms = _NO_GPU
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._batch_invariant = spec.batch_invariant
        self._plans = {
            window: _make_plans(spec, device, limits, capability, num_sms, window) for window in spec.windows
        }
        prefixes = (short.prefixes for short, _ in self._plans.values() if short.prefixes is not None)
        self.units = next((one.units for one in prefixes), None)

    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> TritonMetadata:
        # Between pieces attention runs eagerly, but its schedule is in the first piece: both must have these values.
        short_query_len, has_long = MAX_SHORT_QUERY, True
        if key is None:
            has_long = common.max_query_len > MAX_SHORT_QUERY
            # Two values only, as a kernel is compiled for each.
            short_query_len = 1 if common.max_query_len <= 1 else MAX_SHORT_QUERY
        elif key.graphs is GraphSet.DECODE and key.query_len <= MAX_SHORT_QUERY:
            short_query_len, has_long = key.query_len, False
        elif key.num_tokens <= MAX_SHORT_QUERY:
            has_long = False
        if self._batch_invariant:
            short_query_len, has_long = 0, True
        return TritonMetadata(
            common=common,
            plans=self._plans,
            short_query_len=short_query_len,
            has_long=has_long,
            divide=has_long and prefill_overlaps(common.slot_mapping.shape[0]),
            in_tiles=key is not None and key.shares,
        )


class TritonBackend(GpuBackend[TritonMetadata]):
    capabilities = TritonCapabilities()
    only_triton = True
    # The kernel of `plan_decode` does not let the next one start.
    schedule_is_barrier = True

    def make_builder(self) -> TritonMetadataBuilder:
        return TritonMetadataBuilder(self.spec, self.device, self.limits)

    def schedule(self, metadata: TritonMetadata) -> None:
        common = metadata.common
        starts, lens = common.query_start_loc, common.seq_lens
        for window, (short, long) in metadata.plans.items():
            plan_decode(
                short,
                starts,
                lens,
                max_query_len=metadata.short_query_len,
                window=window,
                multiprocessors=multiprocessors_of(long),
                divide=metadata.divide,
                in_tiles=metadata.in_tiles,
                block_tables=common.plan_tables or (common.block_table,),
                block_size=self.spec.block_size,
            )
            if metadata.has_long:
                min_query_len = metadata.short_query_len + 1
                plan_prefill(long, starts, lens, min_query_len=min_query_len, causal=common.causal, window=window)

    def forward(
        self,
        query_THD: torch.Tensor,
        call: AttentionCall[TritonMetadata],
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None = None,
    ) -> None:
        layer, kv_cache, metadata = call
        common = metadata.common
        short, long = metadata.plans[layer.window]
        scoring: dict[str, Any] = {
            "scale": layer.scale,
            "window": layer.window,
            "softcap": layer.softcap,
            "alibi_slopes": layer.alibi_slopes,
            "sinks": layer.sinks,
            "k_scale": layer.k_scale,
            "v_scale": layer.v_scale,
            "causal": common.causal,
        }
        # Long queries first: few of their programs have work, and programs of short queries fill the rest of the GPU.
        if metadata.has_long:
            prefill_attention(long, query_THD, kv_cache, common.block_table, out_THD, lse_HT, **scoring)
        decode_attention(
            short,
            query_THD,
            kv_cache,
            common.block_table,
            common.query_start_loc,
            common.seq_lens,
            out_THD,
            lse_HT,
            max_query_len=metadata.short_query_len,
            in_tiles=metadata.in_tiles,
            overlaps_prefill=metadata.has_long and prefill_overlaps(query_THD.shape[0]),
            **scoring,
        )
        if metadata.has_long:
            merge_prefill(long, common.query_start_loc, out_THD, lse_HT, layer.sinks)


def _make_plans(
    spec: AttentionSpec,
    device: torch.device,
    limits: Limits,
    capability: tuple[int, int],
    num_sms: int,
    window: Window,
) -> tuple[DecodePlan, PrefillPlan]:
    sizes: dict[str, Any] = {
        "num_query_heads": spec.num_query_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "max_num_seqs": limits.max_num_seqs,
        "num_sms": num_sms,
        "device": device,
    }
    cuts = not spec.batch_invariant
    tokens = shared_tokens(spec, limits, window, capability)
    tiles = tokens > 0 and has_prefix_tiles(spec, limits, capability)
    short = make_decode_plan(**sizes, shared_tokens=tokens, prefix_tiles=tiles)
    return short, make_prefill_plan(**sizes, max_num_tokens=limits.max_num_batched_tokens, cuts=cuts)
