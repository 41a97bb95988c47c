"""Capabilities of each version of FlashAttention through our adapter. Pure, without the libraries.

Limits are those of the libraries' code; a refusal says so if the limit is the adapter's or untested.
"""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.attention.attention_spec import UNBOUNDED, AttentionKind, AttentionSpec
from phonograph.attention.capabilities import Declaration, DeclaredCapabilities
from phonograph.attention.flash_attn.providers import missing, provider_of
from phonograph.attention.flash_attn.sizes import kept_bytes, partial_bytes
from phonograph.core.device import DeviceSpec
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSupport, Support

_MAX_HEADS_WITH_SINKS = 64
_FP8_HEAD_SIZE_MULTIPLE = 16
_WHOLE_TILE = 128
"""Keys in a tile of version 3, for causal 16-bit attention and this head size."""
_ONE_ROUTINE = "one routine reads query_start_loc and seq_lens for decode and prefill alike"
_OF_THE_CONTRACT = {
    AttentionKind.ENCODER: "encoder attention; its kernels would take queries, keys and values without a cache, which "
    "our backends do not get",
    AttentionKind.ENCODER_DECODER: "encoder_decoder attention; its kernels would take keys of another length than the "
    "queries' own sequence, which our batches do not have",
}


class _FlashAttentionCapabilities(DeclaredCapabilities):
    name = "flash_attn"

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        found = super().refusals(spec, device)
        provider = provider_of(self.version)
        if provider is not None and spec.block_size % provider.block_size_multiple and not spec.block_size % 16:
            found.append(
                f"block size {spec.block_size}; {provider.module}, which provides it here, takes multiples of "
                f"{provider.block_size_multiple}"
            )
        if spec.kind in _OF_THE_CONTRACT:
            found.append(_OF_THE_CONTRACT[spec.kind])
        if spec.sinks and self.declared.sinks and spec.num_query_heads > _MAX_HEADS_WITH_SINKS:
            found.append(
                f"attention sinks with {spec.num_query_heads} query heads; its kernels take sinks of "
                f"{_MAX_HEADS_WITH_SINKS} at most"
            )
        return found

    def buffer_bytes(self, spec: AttentionSpec, device: DeviceSpec, limits: Limits, graphs: Sequence[GraphKey]) -> int:
        """Return the bytes of the buffers; partial results of version 2, tens of MB, are in the plan's allowance."""
        return kept_bytes(spec, limits)

    def missing(self) -> str | None:
        return missing(self.version)


class FlashAttention2Capabilities(_FlashAttentionCapabilities):
    version = "2"
    varies = "it cuts the keys of decodes into as many parts as fill the device, and takes no number from outside"
    declared = Declaration(
        min_capability=(8, 0),
        head_size_multiple=8,
        max_head_size=256,
        block_size_multiple=16,
        kinds=tuple(AttentionKind),
        windows=True,
        softcap=True,
        lse=True,
        non_causal=True,
        alibi=True,
    )

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        found = super().refusals(spec, device)
        if spec.alibi and spec.kind is not AttentionKind.DECODER:
            found.append(f"ALiBi in {spec.kind.value} attention; its bias falls with the distance to both sides")
        if spec.alibi and spec.lse:
            found.append(
                "the LSE beside ALiBi; it leaves the query's own position out of the bias, and so out of the LSE"
            )
        if spec.alibi and spec.non_causal:
            found.append("ALiBi in batches without a causal mask; its bias falls with the distance to both sides")
        return found

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        # Its host code folds only without these; its last condition, no dropout, always holds here.
        unfolded = [
            why
            for why, holds in (
                ("as many KV heads as query heads", spec.num_query_heads == spec.num_kv_heads),
                ("a window in every layer", all(_is_window(window) for window in spec.windows)),
                ("ALiBi", spec.alibi),
            )
            if holds
        ]
        group = spec.num_query_heads // spec.num_kv_heads
        why = (
            f"with {' and '.join(unfolded)} its host code never folds query heads into the query, but one launch for "
            "both would be slow"
            if unfolded
            else f"at query length 1 its host code folds the {group} query heads of a KV head into the query dimension "
            "(more query heads than KV heads, no window, no dropout, no ALiBi, head size a multiple of 8) and sets "
            "query_start_loc to null, so that a graph captured so would be wrong for a mixed batch"
        )
        return Support(
            GraphSupport.ALWAYS,
            "a mixed graph has two launches, decodes and prefills, each with its own frozen bound on query lengths: "
            f"{why}",
        )

    def ragged_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        return Support(
            GraphSupport.ALWAYS,
            "captured at a query length above 1, one routine reads query_start_loc and seq_lens for every batch",
        )


class FlashAttention3Capabilities(_FlashAttentionCapabilities):
    version = "3"
    varies = ""
    plans_by_lengths = True
    takes_length_bounds = True
    declared = Declaration(
        capabilities=(9,),
        kv_dtypes=("float16", "bfloat16", "float8_e4m3fn"),
        head_size_multiple=8,
        max_head_size=256,
        block_size_multiple=16,
        kinds=tuple(AttentionKind),
        windows=True,
        softcap=True,
        lse=True,
        non_causal=True,
        sinks=True,
    )

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        found = super().refusals(spec, device)
        if spec.batch_invariant and spec.windowed:
            found.append(
                "batch_invariant with windows; where a window begins, a query's last bits change with the queries that "
                "share its tile"
            )
        if spec.kv_cache_dtype != "float8_e4m3fn":
            return found
        if spec.dtype == "float16":
            found.append("dtype float16 with an FP8 cache; its kernels write bfloat16 where queries are FP8")
        if spec.head_size % _FP8_HEAD_SIZE_MULTIPLE:
            found.append(
                f"head size {spec.head_size} with an FP8 cache; its kernels take multiples of {_FP8_HEAD_SIZE_MULTIPLE}"
            )
        return found

    def preferred_block_size(self, spec: AttentionSpec) -> tuple[int, str] | None:
        if spec.head_size != _WHOLE_TILE or spec.dtype != spec.kv_cache_dtype:
            return None
        return _WHOLE_TILE, (
            f"flash_attn 3 loads keys by the copy engine where a block holds a whole tile of {_WHOLE_TILE}; on an H200 "
            "prefills take 3 to 9% less time than with blocks of 16, decodes 1 to 3%"
        )

    def buffer_bytes(self, spec: AttentionSpec, device: DeviceSpec, limits: Limits, graphs: Sequence[GraphKey]) -> int:
        return kept_bytes(spec, limits) + partial_bytes(spec, limits, graphs)

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        if spec.batch_invariant:
            splits = (
                "batch_invariant: one split, no ahead-of-time schedule, and the same bounds on lengths for all graphs "
                "and eager steps, as kernels are chosen by them"
            )
        elif len(spec.windows) > 1:
            splits = (
                "its ahead-of-time schedule is off, as it needs one window for all layers and these have "
                f"{len(spec.windows)}, so it runs with one split: without the schedule a bound on splits would be "
                "taken as their number"
            )
        else:
            splits = (
                "its ahead-of-time schedule is made inside the graph in a persistent buffer with a zeroed tail, and a "
                "bound on splits, the same at capture and replay, keeps them within the captured scratch"
            )
        return Support(GraphSupport.ALWAYS, f"{_ONE_ROUTINE}; {splits}")


class FlashAttention4Capabilities(_FlashAttentionCapabilities):
    version = "4"
    varies = "no runs of it were ever compared bit by bit"
    plans_by_lengths = True
    takes_length_bounds = True
    declared = Declaration(
        capabilities=(9, 10),
        head_sizes=(64, 96, 128),
        block_size_multiple=16,
        kinds=tuple(AttentionKind),
        windows=True,
        softcap=True,
        sinks=True,
        lse=True,
        non_causal=True,
    )

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        return Support(
            GraphSupport.ALWAYS,
            f"{_ONE_ROUTINE}; it has no ahead-of-time schedule, so the number of splits is held at one",
        )


def _is_window(window: tuple[int, int]) -> bool:
    """Return True if a causal query does not see all earlier keys, or looks ahead."""
    return window[0] != UNBOUNDED or window[1] > 0
