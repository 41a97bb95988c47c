"""Decodes and prefills of one batch by different backends: how they are asked for, and what they can do together."""

from __future__ import annotations

from phonograph.attention.backend import AttentionSpec, Capabilities
from phonograph.device import DeviceSpec
from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphSupport, Support

PARTS = ("prefill", "decode")


def parse_parts(asked: str) -> dict[str, str] | None:
    """{"prefill": ..., "decode": ...} of "prefill=flash_attn,decode=triton", or None where one backend is asked for.

    Raises:
        ConfigError: it names parts, but not each of the two once.
    """
    if "=" not in asked:
        return None
    pairs = [part.partition("=") for part in asked.split(",")]
    names = sorted(name.strip().lower() for name, _, _ in pairs)
    if names != sorted(PARTS) or not all(backend.strip() for _, _, backend in pairs):
        raise ConfigError("attention_backend", asked, "name a backend for each part: prefill=flash_attn,decode=triton")
    return {name.strip().lower(): backend.strip() for name, _, backend in pairs}


class SplitCapabilities(Capabilities):
    """What two backends can do together."""

    varies = (
        "what stands before a query of one token in the batch decides which part it goes to, and each part has kernels "
        "of its own"
    )

    def __init__(self, decode: Capabilities, prefill: Capabilities) -> None:
        self.decode = decode
        self.prefill = prefill
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

    def missing(self) -> str | None:
        absent = (f"{one.label}: {why}" for one in (self.decode, self.prefill) if (why := one.missing()) is not None)
        return "; ".join(dict.fromkeys(absent)) or None
