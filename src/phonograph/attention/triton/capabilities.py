"""Capabilities of our Triton kernels. They need neither triton nor a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from phonograph.attention.attention_spec import UNBOUNDED, AttentionKind, AttentionSpec
from phonograph.attention.capabilities import Declaration, DeclaredCapabilities
from phonograph.core.device import DeviceSpec
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSupport, Support
from phonograph.kernels.attention_scratch import (
    LONGEST_WINDOW,
    MIN_SHARED,
    PREFIX_TILES_FROM,
    decode_partials,
    holds_all_programs,
    prefill_partials,
    prefix_tile_rows,
)


def why_not_shared(spec: AttentionSpec, window: tuple[int, int], capability: tuple[int, int]) -> str:
    """Return the reason why decodes do not attend a shared prefix once, in layers of a window; "" if they do.

    Args:
        spec: attention of the layers.
        window: their window.
        capability: compute capability of the GPU; (0, 0) is a CPU.
    """
    if not spec.shared_prefixes:
        return "cascade_attention is off"
    if not holds_all_programs(capability):
        return (
            f"programs wait for each other, and a GPU of compute capability {'.'.join(map(str, capability))} may not "
            "run all at once; those of 9 and 10 do"
        )
    if spec.batch_invariant:
        return "batch_invariant: results would depend on the other sequences"
    if spec.alibi:
        return "ALiBi: the bias on the prefix is another one for each query"
    left = window[0]
    if left == UNBOUNDED or MIN_SHARED <= left < LONGEST_WINDOW:
        return ""
    return f"a window of {left + 1} keys: prefixes are shared in windows of {MIN_SHARED + 1} to {LONGEST_WINDOW} keys"


def shared_tokens(spec: AttentionSpec, limits: Limits, window: tuple[int, int], capability: tuple[int, int]) -> int:
    """Return the leading tokens of a batch whose sequences may share prefixes: its decodes, at most; 0 for none."""
    most = min(limits.max_num_seqs * (1 + spec.speculative_tokens), limits.max_num_batched_tokens)
    return 0 if why_not_shared(spec, window, capability) else most


def has_prefix_tiles(spec: AttentionSpec, limits: Limits, capability: tuple[int, int]) -> bool:
    """Return True if graphs of many decodes attend shared prefixes in tiles of the kernel for prefills on Hopper."""
    return (
        capability[0] == 9
        and limits.max_num_seqs >= PREFIX_TILES_FROM
        and spec.head_size in (64, 128)
        and spec.dtype == spec.kv_cache_dtype in ("float16", "bfloat16")
        and not spec.softcap
        and (spec.block_size == 64 or spec.block_size % 128 == 0)
    )


class TritonCapabilities(DeclaredCapabilities):
    """Capabilities of the kernels for short and for long queries.

    Long queries with heads of 64 and 128 have a kernel of their own on Hopper. Its ring has three stages of 128 keys
    and values, 768 KiB with heads of 512, and a multiprocessor has 227 KiB: the other kernel, in tiles of 64 rows and
    32 keys, takes these.
    """

    name = "triton"
    varies = ""
    plans_by_lengths = True
    skips_freed_blocks = True
    takes_length_bounds = True
    declared = Declaration(
        min_capability=(8, 0),
        kv_dtypes=("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        head_size_multiple=8,
        max_head_size=512,
        block_size_multiple=16,
        kinds=(AttentionKind.DECODER, AttentionKind.ENCODER_ONLY, AttentionKind.ENCODER_DECODER),
        windows=True,
        softcap=True,
        lse=True,
        non_causal=True,
        alibi=True,
        sinks=True,
    )

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        found = super().refusals(spec, device)
        # Older devices have no conversion from e4m3, and e5m2 is half a float16.
        if spec.kv_cache_dtype == "float8_e4m3fn" and device.kind == "cuda" and device.capability < (8, 9):
            found.append(f"KV cache dtype float8_e4m3fn on {device.name}; it needs compute capability 8.9 or more")
        return found

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        if spec.batch_invariant:
            reason = (
                "one kernel takes queries of every length and cuts no keys, and a kernel inside the graph makes the "
                "work list that it takes from"
            )
        else:
            reason = (
                "a kernel inside the graph reads query_start_loc and seq_lens and makes the work list that the "
                "attention kernels take from, so no plan, grid or number of splits is frozen"
            )
        return Support(GraphSupport.ALWAYS, reason)

    def buffer_bytes(self, spec: AttentionSpec, device: DeviceSpec, limits: Limits, graphs: Sequence[GraphKey]) -> int:
        """Return the bytes of partial results, with their LSE, for each window."""
        heads, kv_heads, size, sms = spec.num_query_heads, spec.num_kv_heads, spec.head_size, device.num_sms
        count = 0
        for window in spec.windows:
            tokens = shared_tokens(spec, limits, window, device.capability)
            tiles = tokens > 0 and has_prefix_tiles(spec, limits, device.capability)
            tile_rows = prefix_tile_rows(kv_heads, sms) if tiles else 0
            shapes = (
                decode_partials(heads // kv_heads, size, sms, shared_rows=tokens * heads, tile_rows=tile_rows),
                prefill_partials(kv_heads, size, sms, cuts=not spec.batch_invariant),
            )
            count += 4 * sum(slots * rows * (width + 1) for slots, rows, width in shapes)
        return count

    def sharing_graphs(self, spec: AttentionSpec, device: DeviceSpec, limits: Limits) -> int:
        tokens = max(shared_tokens(spec, limits, window, device.capability) for window in spec.windows)
        return PREFIX_TILES_FROM if tokens and has_prefix_tiles(spec, limits, device.capability) else 0

    def prefix_sharing(self, spec: AttentionSpec, device: DeviceSpec) -> tuple[bool, str]:
        why = {window: why_not_shared(spec, window, device.capability) for window in spec.windows}
        if all(why.values()):
            return False, f"each decode reads a shared prefix: {why[spec.windows[0]]}"
        where = " and in the windows of all" if any(left >= 0 for left, _ in why) else ""
        return True, (
            f"decodes that share {MIN_SHARED} keys or more in equal blocks{where} attend them once, if that is faster"
        )

    def missing(self) -> str | None:
        if find_spec("triton") is None:
            return "the package triton is not installed; it comes with torch for CUDA, or pip install triton"
        return None
