"""Configurations for a backend: a plain one that it accepts, and variations of it with one change each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from phonograph.attention.attention_spec import UNBOUNDED, AttentionKind, AttentionSpec, KVLayout
from phonograph.attention.backend import Capabilities
from phonograph.core.device import DeviceSpec

PLAIN = AttentionSpec(
    num_query_heads=4, num_kv_heads=2, head_size=64, dtype="float16", kv_cache_dtype="float16", block_size=16
)
SPECULATIVE_TOKENS = 3
_FULL = (UNBOUNDED, UNBOUNDED)
# Features that a model may have together, in the order in which `everything` adds them.
_FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1.5},
    "windows that differ by layer": {"windows": (_FULL, (6, 0))},
    "attention sinks": {"sinks": True},
    "ALiBi": {"alibi": True},
    "LSE": {"lse": True},
    "batches without a causal mask": {"non_causal": True},
    "KV layout HND": {"layout": KVLayout.HND},
}
_SINGLE: dict[str, dict[str, Any]] = {
    "a window that looks back": {"windows": ((6, 0),)},
    "a window of one key": {"windows": ((0, 0),)},
    "a window that looks ahead": {"windows": ((5, 4),)},
    **{f"dtype {name}": {"dtype": name, "kv_cache_dtype": name} for name in ("float32", "float16", "bfloat16")},
    **{f"KV cache dtype {name}": {"kv_cache_dtype": name} for name in ("float8_e4m3fn", "float8_e5m2")},
    **{f"head size {size}": {"head_size": size} for size in (32, 40, 64, 72, 80, 96, 128, 192, 256)},
    **{f"block size {size}": {"block_size": size} for size in (8, 16, 24, 32, 64, 128, 256)},
    **{f"{kind.value} attention": {"kind": kind} for kind in AttentionKind if kind is not AttentionKind.DECODER},
    **{
        f"{heads} query heads on {kv_heads} KV heads": {"num_query_heads": heads, "num_kv_heads": kv_heads}
        for heads, kv_heads in ((3, 3), (6, 2), (7, 1), (8, 2), (16, 1))
    },
    "speculation": {"speculative_tokens": SPECULATIVE_TOKENS},
    # As ranks that share a context attend.
    "queries without keys": {"lse": True, "non_causal": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """A base configuration with one change, and the backend's refusals of it (empty: it accepts)."""

    name: str
    spec: AttentionSpec
    refusals: tuple[str, ...]


def base_specs(capabilities: Capabilities, device: DeviceSpec) -> list[AttentionSpec]:
    """Return the first plain configuration that the backend accepts, in a list, or an empty list."""
    dtypes = ("float32", "float16", "bfloat16") if device.kind == "cpu" else ("bfloat16", "float16", "float32")
    # Small sizes on the CPU, where they show as much; on a GPU the usual sizes of models first.
    head_sizes = (32, 64, 128, 96, 256) if device.kind == "cpu" else (128, 64, 96, 256, 32)
    for kind, dtype, head_size, block_size in itertools.product(
        AttentionKind, dtypes, head_sizes, (16, 32, 64, 128, 256, 8)
    ):
        spec = replace(PLAIN, head_size=head_size, dtype=dtype, kv_cache_dtype=dtype, block_size=block_size, kind=kind)
        if not capabilities.refusals(spec, device):
            return [spec]
    return []


def variations(base: AttentionSpec, capabilities: Capabilities, device: DeviceSpec) -> list[Variation]:
    """Return `base` with each change alone, leaving out changes without effect."""
    changed = {name: replace(base, **changes) for name, changes in (_FEATURES | _SINGLE).items()}
    return [
        Variation(name=name, spec=spec, refusals=tuple(capabilities.refusals(spec, device)))
        for name, spec in changed.items()
        if spec != base
    ]


def everything(base: AttentionSpec, capabilities: Capabilities, device: DeviceSpec) -> Variation:
    """Return `base` with each feature that the backend accepts together with the earlier ones."""
    names: list[str] = []
    spec = base
    for name, changes in _FEATURES.items():
        more = replace(spec, **changes)
        if more != spec and not capabilities.refusals(more, device):
            names.append(name)
            spec = more
    return Variation(name=" with ".join(names) or "nothing", spec=spec, refusals=())


def spec_text(spec: AttentionSpec) -> str:
    """Describe a configuration in a few words."""
    cache = "" if spec.kv_cache_dtype == spec.dtype else f" over {spec.kv_cache_dtype}"
    return (
        f"{spec.dtype}{cache}, heads {spec.num_query_heads}/{spec.num_kv_heads}, head size {spec.head_size}, "
        f"blocks of {spec.block_size}"
    )
