"""Names and capabilities of split backends, which run decodes and prefills of one batch by different backends."""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import Capabilities
from phonograph.core.device import DeviceSpec
from phonograph.core.limits import Limits
from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphKey, GraphSet, GraphSupport, Support

PARTS = ("prefill", "decode")


def parse_parts(name: str) -> dict[str, str] | None:
    """Parse "prefill=flash_attn,decode=triton" into a backend for each part. Returns None for a single backend.

    Raises:
        ConfigError: `name` has parts, but not each of the two once.
    """
    if "=" not in name:
        return None
    pairs = [part.partition("=") for part in name.split(",")]
    names = sorted(part.strip().lower() for part, _, _ in pairs)
    if names != sorted(PARTS) or not all(backend.strip() for _, _, backend in pairs):
        raise ConfigError("attention_backend", name, "name a backend for each part: prefill=flash_attn,decode=triton")
    return {part.strip().lower(): backend.strip() for part, _, backend in pairs}


def decode_part(num_tokens: int, num_slots: int, query_len: int) -> GraphKey:
    """Return the graph key of the decodes of a mixed batch, with no more slots than its tokens can fill."""
    slots = max(1, min(num_slots, num_tokens // query_len))
    return GraphKey(GraphSet.DECODE, slots * query_len, slots, query_len)


class SplitCapabilities(Capabilities):
    """Capabilities of two backends together."""

    varies = (
        "what stands before a query of one token in the batch decides which part it goes to, and each part has kernels "
        "of its own"
    )

    # The host divides a batch behind the last decode of full length.
    takes_ragged_decodes = False

    def __init__(self, decode: Capabilities, prefill: Capabilities) -> None:
        self.decode = decode
        self.prefill = prefill
        self.takes_length_bounds = decode.takes_length_bounds and prefill.takes_length_bounds
        self.skips_freed_blocks = decode.skips_freed_blocks and prefill.skips_freed_blocks
        self.name = f"prefill={prefill.label.replace(' ', '')},decode={decode.label.replace(' ', '')}"

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        parts = (("decode", self.decode), ("prefill", self.prefill))
        found = [f"{part}: {reason}" for part, one in parts for reason in one.refusals(spec, device)]
        if device.kind != "cuda":
            found.append(f"device {device.name}; the batch is cut by a kernel for NVIDIA GPUs")
        return found

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        decode, prefill = self.decode.graph_support(spec, device), self.prefill.ragged_support(spec, device)
        needed = GraphSupport.UNIFORM_BATCH if spec.speculative_tokens else GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
        parts = f"decodes by {self.decode.label} ({decode.reason}), prefills by {self.prefill.label} ({prefill.reason})"
        if prefill.level is not GraphSupport.ALWAYS:
            return Support(min(decode.level, GraphSupport.UNIFORM_BATCH), parts)
        if decode.level < needed:
            return Support(decode.level, parts)
        return Support(GraphSupport.ALWAYS, f"decodes and prefills are two launches in one graph: {parts}")

    def prefix_sharing(self, spec: AttentionSpec, device: DeviceSpec) -> tuple[bool, str]:
        return self.decode.prefix_sharing(spec, device)

    def buffer_bytes(self, spec: AttentionSpec, device: DeviceSpec, limits: Limits, graphs: Sequence[GraphKey]) -> int:
        query_len = 1 + spec.speculative_tokens
        decodes = [
            key if key.graphs is not GraphSet.MIXED else decode_part(key.num_tokens, key.num_reqs, query_len)
            for key in graphs
        ]
        prefills = [key for key in graphs if key.graphs is not GraphSet.DECODE]
        parts = (self.decode, decodes), (self.prefill, prefills)
        return sum(one.buffer_bytes(spec, device, limits, keys) for one, keys in parts)

    def missing(self) -> str | None:
        absent = (f"{one.label}: {why}" for one in (self.decode, self.prefill) if (why := one.missing()) is not None)
        return "; ".join(dict.fromkeys(absent)) or None
