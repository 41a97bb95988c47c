"""Capabilities of FlashInfer, and the choice between its prefill routines. Nothing here imports it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.capabilities import Declaration, DeclaredCapabilities
from phonograph.attention.flashinfer.workspace_sizes import Sizes, splits_mixed
from phonograph.core.device import DeviceSpec
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSupport, Support


class FlashInferCapabilities(DeclaredCapabilities):
    """Capabilities of FlashInfer.

    Its kernels divide by the page size at run time, so any multiple of our block size works. Its wrappers take one
    scale for all heads of an FP8 cache. The spec has no scales, so the first run of a layer raises BackendError if they
    differ.
    """

    name = "flashinfer"
    varies = "its plans cut the keys of a sequence into parts by what else is in the batch"
    declared = Declaration(
        min_capability=(8, 0),
        kv_dtypes=("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        head_sizes=(64, 128, 256),
        block_size_multiple=16,
        windows=True,
        left_window_only=True,
        softcap=True,
        lse=True,
        non_causal=True,
    )

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        found = super().refusals(spec, device)
        if len(spec.windows) > 1:
            found.append(f"{len(spec.windows)} windows in one KV group; a plan of its wrappers holds one")
        return found

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        plans = (
            "each step is planned on the host into buffers that graphs read, and in its graph mode the sizes of a plan "
            "depend on tokens and slots alone"
        )
        if prefill_routine(spec, device.capability) == "fa3":
            mixed = (
                "a mixed graph has a launch of each"
                if splits_mixed(spec)
                else "a mixed graph has the latter alone, as decodes of several tokens have no wrapper of their own"
            )
            return Support(
                GraphSupport.ALWAYS,
                f"{plans}: a decode wrapper for each number of slots, and its FA3 prefill, whose blocks take their "
                f"work from a list in such a buffer, for each number of tokens; {mixed}",
            )
        return Support(
            GraphSupport.UNIFORM_BATCH,
            f"{plans}, so decode graphs of any query length are right; here its prefill is FA2, which in a graph "
            "splits the keys of every batch and needs float32 scratch for each padded tile of each query head (0.7 GB "
            "at 2048 tokens and 256 slots of 32 heads of 128), so no mixed graphs",
        )

    def buffer_bytes(self, spec: AttentionSpec, device: DeviceSpec, limits: Limits, graphs: Sequence[GraphKey]) -> int:
        routine = prefill_routine(spec, device.capability)
        return Sizes(spec=spec, limits=limits, routine=routine, num_sms=device.num_sms).total(graphs)

    def missing(self) -> str | None:
        if find_spec("flashinfer") is None:
            return "the package flashinfer is not installed: pip install flashinfer-python"
        return None


def prefill_routine(spec: AttentionSpec, capability: tuple[int, int]) -> str:
    """Return its implementation of prefill: FA3 on Hopper, but not for FP8 caches, which need FP8 queries there."""
    return "fa3" if capability[0] == 9 and not spec.has_fp8_cache else "fa2"
