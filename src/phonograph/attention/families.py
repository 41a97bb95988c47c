"""What the kernel families of others, and our own to come, can do: declared before their kernels are here.

So `explain` can compare them for any device today, and asking to run one says what is missing. Every number is a fact
of those libraries' documents and code; what was not tried here says that it is provisional.
"""

from __future__ import annotations

from importlib.util import find_spec

from phonograph.attention.backend import UNBOUNDED, AttentionKind, AttentionSpec, Capabilities
from phonograph.attention.declaration import Declaration
from phonograph.attention.flashinfer.capabilities import FlashInferCapabilities as FlashInferCapabilities
from phonograph.device import DeviceSpec
from phonograph.graphs.modes import GraphSupport, Support

_NO_ADAPTER = "its adapter is not in this version of Phonograph; it is declared, so that explain knows it"


class TritonCapabilities(Capabilities):
    """Our own kernels."""

    name = "triton"
    _declared = Declaration(
        min_capability=(8, 0),
        kv_dtypes=("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        head_size_multiple=8,
        max_head_size=256,
        block_size_multiple=16,
        kinds=(AttentionKind.DECODER, AttentionKind.ENCODER_ONLY),
        alibi=True,
        sinks=True,
    )

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        found = self._declared.refusals(spec, device)
        # Older devices have no conversion from e4m3, and e5m2 is half a float16.
        if spec.kv_cache_dtype == "float8_e4m3fn" and device.kind == "cuda" and device.capability < (8, 9):
            found.append(f"KV cache dtype float8_e4m3fn on {device.name}; it needs compute capability 8.9 or more")
        return found

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        return Support(
            GraphSupport.ALWAYS,
            "a kernel inside the graph reads query_start_loc and seq_lens and makes the work list that the attention "
            "kernels take from, so no plan, grid or number of splits is frozen",
        )

    def missing(self) -> str | None:
        return None if find_spec("triton") else "the package triton is not installed; it comes with torch for CUDA"


class FlashAttention2Capabilities(Capabilities):
    name = "flash_attn"
    version = "2"
    _declared = Declaration(
        min_capability=(8, 0),
        head_size_multiple=8,
        max_head_size=256,
        block_size_multiple=16,
        kinds=tuple(AttentionKind),
        alibi=True,
    )

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        return self._declared.refusals(spec, device)

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        # Its host code folds where all of these hold; dropout, the last of its conditions, never happens here.
        unfolded = [
            why
            for why, holds in (
                ("as many KV heads as query heads", spec.num_query_heads == spec.num_kv_heads),
                ("a window in every layer", all(_is_window(window) for window in spec.windows)),
                ("ALiBi", spec.alibi),
            )
            if holds
        ]
        if unfolded:
            return Support(
                GraphSupport.UNIFORM_BATCH,
                f"provisional: with {' and '.join(unfolded)} its host code never folds query heads into the query, so "
                "one routine that reads query_start_loc serves every batch and mixed graphs should be right too; more "
                "is not declared before its adapter exists and phonograph verify has replayed them",
            )
        return Support(
            GraphSupport.UNIFORM_BATCH,
            f"at query length 1 its host code folds the {spec.num_query_heads // spec.num_kv_heads} query heads of a "
            "KV head into the query dimension (more query heads than KV heads, no window, no dropout, no ALiBi, head "
            "size a multiple of 8) and sets query_start_loc to null: a graph captured so ignores query_start_loc and "
            "is wrong for a mixed batch. A graph captured at a longer query length takes the other branch, which "
            "serves uniform and mixed batches alike; provisional until its adapter captures those",
        )

    def missing(self) -> str:
        return _NO_ADAPTER


class FlashAttention3Capabilities(Capabilities):
    name = "flash_attn"
    version = "3"
    _declared = Declaration(
        capabilities=(9,),
        kv_dtypes=("float16", "bfloat16", "float8_e4m3fn"),
        head_size_multiple=8,
        max_head_size=256,
        block_size_multiple=16,
        kinds=tuple(AttentionKind),
        sinks=True,
    )

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        found = self._declared.refusals(spec, device)
        if spec.kv_cache_dtype.startswith("float8") and spec.kind in (
            AttentionKind.ENCODER,
            AttentionKind.ENCODER_ONLY,
        ):
            found.append(f"KV cache dtype {spec.kv_cache_dtype} in {spec.kind.value} attention, which has no cache")
        return found

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        routine = "one routine reads query_start_loc and seq_lens for decode and prefill alike"
        if len(spec.windows) > 1:
            return Support(
                GraphSupport.ALWAYS,
                f"{routine}; its ahead-of-time schedule is off, as it needs one window for all layers and these have "
                f"{len(spec.windows)}, so it runs with one split: without the schedule a bound on splits would be "
                "taken as their number",
            )
        return Support(
            GraphSupport.ALWAYS,
            f"{routine}; its ahead-of-time schedule is refreshed in a persistent buffer with a zeroed tail, and a "
            "bound on splits, the same at capture and replay, keeps them within the captured scratch",
        )

    def missing(self) -> str:
        return _NO_ADAPTER


class FlashAttention4Capabilities(Capabilities):
    name = "flash_attn"
    version = "4"
    _declared = Declaration(
        capabilities=(9, 10), head_sizes=(64, 96, 128), block_size_multiple=16, kinds=tuple(AttentionKind), sinks=True
    )

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        return self._declared.refusals(spec, device)

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        return Support(
            GraphSupport.ALWAYS,
            "one routine reads query_start_loc and seq_lens for decode and prefill alike; it has no ahead-of-time "
            "schedule, so the number of splits is held at one. Provisional until its adapter exists and phonograph "
            "verify has replayed it",
        )

    def missing(self) -> str:
        return _NO_ADAPTER


def _is_window(window: tuple[int, int]) -> bool:
    """Whether a causal query sees less than all keys before it, or looks ahead."""
    return window[0] != UNBOUNDED or window[1] > 0
