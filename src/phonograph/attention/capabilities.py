"""Declaration of what a backend serves, and the refusals that follow from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phonograph.attention.attention_spec import AttentionKind, AttentionSpec, KVLayout
from phonograph.attention.backend import Capabilities
from phonograph.core.device import DeviceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Configurations that a backend serves. A feature that a declaration does not name is refused.

    Attributes:
        devices: device kinds.
        capabilities: major versions of compute capabilities; empty for any.
        min_capability: the smallest compute capability.
        dtypes, kv_dtypes: types of queries and of the KV cache, as torch writes them.
        head_sizes: the only head sizes; empty for any multiple of head_size_multiple up to max_head_size (0: no limit).
        head_size_multiple, max_head_size: limits where `head_sizes` is empty.
        block_size_multiple: blocks of the KV cache have a multiple of this many tokens.
        kinds, layouts: kinds of attention and memory orders of a block.
        windows: layers may have windows.
        left_window_only: these can look back, but not ahead.
        softcap, alibi, sinks: layers may have a softcap, slopes, or a sink for each head.
        lse: `forward` returns the log-sum-exp.
        non_causal: batches of a decoder may come without a causal mask, and `forward` reads `common.causal`.

    Example:
        ```python
        from dataclasses import replace

        from phonograph.core.device import known_device

        spec = AttentionSpec(
            num_query_heads=32, num_kv_heads=8, head_size=64, dtype="float16", kv_cache_dtype="float16", block_size=16
        )
        declared = Declaration(softcap=True)
        assert not declared.refusals(replace(spec, softcap=30.0), known_device("h200"))
        print(declared.refusals(replace(spec, lse=True), known_device("h200")))
        ```

        The example of the method continues this one.
    """

    devices: tuple[str, ...] = ("cuda",)
    capabilities: tuple[int, ...] = ()
    min_capability: tuple[int, int] = (0, 0)
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    kv_dtypes: tuple[str, ...] = ("float16", "bfloat16")
    head_sizes: tuple[int, ...] = ()
    head_size_multiple: int = 1
    max_head_size: int = 0
    block_size_multiple: int = 1
    kinds: tuple[AttentionKind, ...] = (AttentionKind.DECODER,)
    layouts: tuple[KVLayout, ...] = (KVLayout.NHD, KVLayout.HND)
    windows: bool = False
    left_window_only: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    non_causal: bool = False

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        """Return every reason against running `spec` on `device`: the value, and what would work.

        Args:
            spec: attention of the group.
            device: device, which need not be in this machine.

        Example:
            ```python
            (reason,) = declared.refusals(spec, known_device("cpu"))
            assert "it runs on cuda" in reason
            ```
        """
        return [*self._about_device(device), *self._about_numbers(spec), *self._about_features(spec)]

    def _about_device(self, device: DeviceSpec) -> list[str]:
        if device.kind not in self.devices:
            return [f"device {device.name} is a {device.kind} device; it runs on {_either(self.devices)}"]
        if device.kind != "cuda":
            return []
        capability = f"compute capability {device.capability[0]}.{device.capability[1]} of {device.name}"
        if self.capabilities and device.capability[0] not in self.capabilities:
            return [f"{capability}; it runs on {_either(f'{major}.x' for major in self.capabilities)}"]
        if device.capability < self.min_capability:
            return [f"{capability}; it needs {self.min_capability[0]}.{self.min_capability[1]} or more"]
        return []

    def _about_numbers(self, spec: AttentionSpec) -> list[str]:
        found: list[str] = []
        if spec.dtype not in self.dtypes:
            found.append(f"dtype {spec.dtype}; it computes in {_either(self.dtypes)}")
        if spec.kv_cache_dtype not in self.kv_dtypes:
            found.append(f"KV cache dtype {spec.kv_cache_dtype}; it reads {_either(self.kv_dtypes)}")
        elif spec.kv_cache_dtype != spec.dtype and not spec.has_fp8_cache:
            found.append(
                f"KV cache dtype {spec.kv_cache_dtype} with dtype {spec.dtype}; the cache takes the same dtype, or FP8"
            )
        if spec.num_query_heads % spec.num_kv_heads:
            found.append(
                f"{spec.num_query_heads} query heads with {spec.num_kv_heads} KV heads; it groups equally many of the "
                "one to each of the other"
            )
        if self.head_sizes and spec.head_size not in self.head_sizes:
            found.append(f"head size {spec.head_size}; it has kernels for {_either(self.head_sizes)}")
        if spec.head_size % self.head_size_multiple or 0 < self.max_head_size < spec.head_size:
            found.append(
                f"head size {spec.head_size}; it has kernels for multiples of {self.head_size_multiple} up to "
                f"{self.max_head_size}"
            )
        if spec.block_size % self.block_size_multiple:
            found.append(f"block size {spec.block_size}; it takes multiples of {self.block_size_multiple}")
        if spec.layout not in self.layouts:
            found.append(f"KV layout {spec.layout.value}; it reads {_either(layout.value for layout in self.layouts)}")
        return found

    def _about_features(self, spec: AttentionSpec) -> list[str]:
        found: list[str] = []
        if spec.kind not in self.kinds:
            found.append(f"{spec.kind.value} attention; it serves {_either(kind.value for kind in self.kinds)}")
        if spec.windowed and not self.windows:
            found.append("windows; it attends to all keys of a sequence")
        elif self.left_window_only and any(right > 0 for _, right in spec.windows):
            found.append("a window that looks ahead; its windows only look back")
        if spec.softcap and not self.softcap:
            found.append(f"softcap {spec.softcap:g}; it does not cap logits")
        if spec.alibi and not self.alibi:
            found.append("ALiBi; it takes no slopes")
        if spec.sinks and not self.sinks:
            found.append("attention sinks; its kernels have none")
        if spec.lse and not self.lse:
            found.append("the LSE; it returns the output alone")
        if spec.non_causal and not self.non_causal:
            found.append("batches without a causal mask; it always applies one")
        return found


class DeclaredCapabilities(Capabilities):
    """Capabilities whose refusals begin with those of a declaration.

    Example:
        ```python
        from phonograph.core.device import DeviceSpec
        from phonograph.graphs.modes import GraphSupport, Support

        class MyCapabilities(DeclaredCapabilities):
            name = "mine"
            declared = Declaration(devices=("cpu", "cuda"), windows=True)

            def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
                return Support(GraphSupport.ALWAYS, "its operators read all lengths from tensors")
        ```
    """

    declared: Declaration

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        """Return the refusals of the declaration. A subclass may add others.

        Args:
            spec: attention of the group.
            device: device, which need not be in this machine.
        """
        return self.declared.refusals(spec, device)


def _either(values: Iterable[object]) -> str:
    """Join values as "a, b or c"."""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last
