"""FlashAttention libraries, each as a table from its arguments to our values.

The tables rely on these facts of the libraries' code:

- With a block table, causal masks and windows are aligned to the last key, as ours are.
- A window without a bound on a side has -1 there (None in `flash_attn.cute`). Versions 2 and 3 drop a window that
  reaches beyond max_seqlen_k or max_seqlen_q, so both must be true upper bounds.
- Query rows behind the last sequence stay unwritten, in the output and in the LSE.
- Version 2 writes the LSE of queries without keys beyond its tensor, at a place for padded queries (flash-attention,
  issue 2842), so each sequence gets a key. The caller drops what comes of it.
- Sinks are bfloat16 and part of the LSE.
- Version 3 takes queries, keys and values of one dtype. If that is FP8 (e4m3), descale factors of all three are float32
  [sequences, KV heads] at any strides (None for 1), the weights are rounded to FP8 too, and the output is bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from phonograph.attention.attention_spec import UNBOUNDED, AttentionSpec
from phonograph.attention.backend import AttentionCall, AttentionLayer
from phonograph.attention.metadata import AttentionMetadata, CommonMetadata

Functions = dict[str, Callable[..., Any]]
Window = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Numbers that the launches of a step freeze.

    Attributes:
        max_query_len, max_seq_len: upper bounds, both at least 1.
        num_splits: parts that the keys of a sequence are cut into: a bound with a plan, the exact number without one,
            0 for the library's own choice. Version 2 takes none.
        planned: True if `schedule` makes a plan and launches read it.
    """

    max_query_len: int
    max_seq_len: int
    num_splits: int = 0
    planned: bool = False


class Plan:
    """Plan of one graph, or of eager steps.

    `part` is the filled part of the persistent buffer, and None until `schedule` has run. It outlives the metadata of a
    step: a replay of pieces runs attention with new metadata, but `schedule` ran in the capture only.
    """

    def __init__(self) -> None:
        self.part: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttentionMetadata(AttentionMetadata):
    """Batch with what its launches freeze.

    Attributes:
        whole: True if the first query is in the first row; else the rows before it belong to another launch.
    """

    launch: Launch
    plan: Plan
    whole: bool


FlashAttentionCall = AttentionCall[FlashAttentionMetadata]


class FlashAttentionLibrary:
    """FlashAttention of one library, for one KV group.

    Attributes:
        function: name of its attention function.
        arguments: arguments that are always passed, each with the name of its value in `attend`.
        constants: further arguments with their values.
        sink: argument for sinks, passed only if the model has them.
        descales: arguments for an FP8 cache, passed only for one: factors of queries, keys and values.
        scheduler: arguments of `get_scheduler_metadata`; empty if the library has no such function.
    """

    function: ClassVar[str] = "flash_attn_varlen_func"
    arguments: ClassVar[dict[str, str]]
    constants: ClassVar[dict[str, Any]] = {}
    sink: ClassVar[str] = ""
    descales: ClassVar[tuple[str, ...]] = ()
    scheduler: ClassVar[tuple[str, ...]] = ()

    def __init__(self, functions: Functions, spec: AttentionSpec) -> None:
        self.functions = functions
        self.spec = spec

    @classmethod
    def needs(cls, spec: AttentionSpec | None) -> dict[str, set[str]]:
        """Return the functions with the arguments that are passed by name, for `spec` or for every model."""
        arguments = {*cls.arguments, *cls.constants}
        if spec is not None and spec.sinks:
            arguments.add(cls.sink)
        if spec is not None and spec.has_fp8_cache:
            arguments.update(cls.descales)
        found = {cls.function: arguments}
        return found | {"get_scheduler_metadata": set(cls.scheduler)} if cls.scheduler else found

    def schedule(self, metadata: FlashAttentionMetadata, window: Window) -> torch.Tensor | None:
        """Return the plan of the step, int32 [n], for launches with this window; None if the library has no plans.

        Kernels compute it from the contents of the batch's tensors. n follows from shapes and numbers.
        """
        del metadata, window
        return None

    def lens(self, common: CommonMetadata) -> torch.Tensor:
        """Return the lengths of the sequences as the library takes them, int32 [slots]."""
        return common.seq_lens

    def attend(
        self,
        query_THD: torch.Tensor,
        key_BSKD: torch.Tensor,
        value_BSKD: torch.Tensor,
        call: FlashAttentionCall,
        plan: torch.Tensor | None,
        out_THD: torch.Tensor,
    ) -> torch.Tensor | None:
        """Write the output. Returns the LSE, float32 [H, T], or None if the spec has no `lse`."""
        layer, metadata = call.layer, call.metadata
        common, launch = metadata.common, metadata.launch
        values = {
            "query": query_THD,
            "key": key_BSKD,
            "value": value_BSKD,
            "out": out_THD,
            "query_start_loc": common.query_start_loc,
            "seq_lens": self.lens(common),
            "block_table": common.block_table,
            "causal": common.causal,
            "max_query_len": launch.max_query_len,
            "max_seq_len": launch.max_seq_len,
            "num_splits": launch.num_splits,
            "plan": plan,
            "scale": layer.scale,
            "window": self.window(layer.window),
            "softcap": layer.softcap,
            "alibi_slopes": layer.alibi_slopes,
            "lse": self.spec.lse,
        }
        arguments = {argument: values[name] for argument, name in self.arguments.items()} | self.constants
        if self.descales and self.spec.has_fp8_cache:
            arguments |= self._factors(layer, common.seq_lens.shape[0])
        if layer.sinks is not None:
            # Converted each time: a tensor kept from a capture would lie in memory that other graphs reuse.
            arguments[self.sink] = layer.sinks.to(torch.bfloat16)
        result = self.functions[self.function](**arguments)
        return self._take(result, out_THD, metadata)

    def window(self, window: Window) -> Any:
        """Return a window as the library takes it."""
        return window

    def _factors(self, layer: AttentionLayer, num_seqs: int) -> dict[str, torch.Tensor | None]:
        """Return views of the layer's tensors, which live as long as any graph."""
        scales = zip(self.descales, (layer.q_scale, layer.k_scale, layer.v_scale), strict=True)
        return {name: None if scale_K is None else scale_K.expand(num_seqs, -1) for name, scale_K in scales}

    def _take(self, result: Any, out_THD: torch.Tensor, metadata: FlashAttentionMetadata) -> torch.Tensor | None:
        """Store the output and return the LSE of a result: a tensor, or a tuple of output, LSE and more."""
        out, lse = (result[0], result[1]) if isinstance(result, tuple) else (result, None)
        # Some have no argument for the output, and version 2 writes elsewhere where it folds query heads.
        if out.data_ptr() != out_THD.data_ptr():
            out = out.reshape(out_THD.shape)
            if metadata.whole and "out" in self.arguments.values():
                out_THD.copy_(out)
            else:
                # A library without this argument returns a new tensor, with anything in rows of no request.
                starts = metadata.common.query_start_loc
                rows = torch.arange(out_THD.shape[0], dtype=torch.int32, device=out_THD.device)
                written = ((rows >= starts[:1]) & (rows < starts[-1:]))[:, None, None]
                torch.where(written, out, out_THD, out=out_THD)
        return lse if self.spec.lse else None


_EVERYWHERE = {
    "q": "query",
    "cu_seqlens_q": "query_start_loc",
    "max_seqlen_q": "max_query_len",
    "softmax_scale": "scale",
    "causal": "causal",
    "window_size": "window",
    "softcap": "softcap",
}
_VARLEN = _EVERYWHERE | {"k": "key", "v": "value", "max_seqlen_k": "max_seq_len"}
_VLLM = _VARLEN | {
    "seqused_k": "seq_lens",
    "block_table": "block_table",
    "return_softmax_lse": "lse",
    "out": "out",
}
_PLANNED = {"scheduler_metadata": "plan", "num_splits": "num_splits"}


class _VllmLibrary(FlashAttentionLibrary):
    """`vllm.vllm_flash_attn`, which has one function for all versions and takes the lengths of the keys."""

    def window(self, window: Window) -> list[int]:
        return list(window)


class _Scheduling(FlashAttentionLibrary):
    """Version 3, whose plan is made ahead of time."""

    descales = ("q_descale", "k_descale", "v_descale")
    sink = "s_aux"
    scheduler = (
        *("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "cache_seqlens"),
        *("qkv_dtype", "cu_seqlens_q", "page_size", "causal", "window_size", "has_softcap", "num_splits"),
    )

    def longest(self, metadata: FlashAttentionMetadata) -> int:
        """Return the longest sequence that its launches assume."""
        return metadata.launch.max_seq_len

    def schedule(self, metadata: FlashAttentionMetadata, window: Window) -> torch.Tensor:
        """Return the plan. Every number must equal that of the launches, or sizes differ."""
        spec, common, launch = self.spec, metadata.common, metadata.launch
        return self.functions["get_scheduler_metadata"](
            batch_size=common.seq_lens.shape[0],
            max_seqlen_q=launch.max_query_len,
            max_seqlen_k=self.longest(metadata),
            num_heads_q=spec.num_query_heads,
            num_heads_kv=spec.num_kv_heads,
            headdim=spec.head_size,
            cache_seqlens=common.seq_lens,
            qkv_dtype=getattr(torch, spec.kv_cache_dtype),
            cu_seqlens_q=common.query_start_loc,
            page_size=spec.block_size,
            causal=common.causal,
            window_size=window,
            has_softcap=spec.softcap > 0,
            num_splits=launch.num_splits,
        )


class _Version2(FlashAttentionLibrary):
    def lens(self, common: CommonMetadata) -> torch.Tensor:
        return common.seq_lens.clamp(min=1) if self.spec.lse else common.seq_lens


class VllmLibrary2(_VllmLibrary, _Version2):
    arguments = _VLLM | {"alibi_slopes": "alibi_slopes"}
    constants: ClassVar[dict[str, Any]] = {"fa_version": 2}


class VllmLibrary3(_VllmLibrary, _Scheduling):
    arguments = _VLLM | _PLANNED
    constants: ClassVar[dict[str, Any]] = {"fa_version": 3}


class VllmLibrary4(_VllmLibrary):
    arguments = _VLLM | {"num_splits": "num_splits"}
    constants: ClassVar[dict[str, Any]] = {"fa_version": 4}
    sink = "s_aux"


class PackageLibrary2(_Version2):
    """The package `flash_attn`, version 2. It takes cumulative lengths of the keys, so these are its plan."""

    arguments = _VARLEN | {
        "cu_seqlens_k": "plan",
        "alibi_slopes": "alibi_slopes",
        "return_attn_probs": "lse",
        "block_table": "block_table",
    }

    def schedule(self, metadata: FlashAttentionMetadata, window: Window) -> torch.Tensor:
        del window
        lens = self.lens(metadata.common)
        starts = lens.new_zeros(lens.shape[0] + 1)
        torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
        return starts


class InterfaceLibrary3(_Scheduling):
    """The module `flash_attn_interface`, version 3, and published kernels with the same functions.

    It takes the longest sequence from the width of the block table, so its plan must assume that too.
    """

    function = "flash_attn_with_kvcache"
    arguments = (
        _EVERYWHERE
        | _PLANNED
        | {
            "k_cache": "key",
            "v_cache": "value",
            "cache_seqlens": "seq_lens",
            "page_table": "block_table",
            "return_softmax_lse": "lse",
        }
    )

    def longest(self, metadata: FlashAttentionMetadata) -> int:
        return metadata.common.block_table.shape[1] * self.spec.block_size


class CuteLibrary4(FlashAttentionLibrary):
    """`flash_attn.cute`, version 4."""

    arguments = _VARLEN | {
        "seqused_k": "seq_lens",
        "page_table": "block_table",
        "num_splits": "num_splits",
        "return_lse": "lse",
    }
    sink = "learnable_sink"

    def window(self, window: Window) -> tuple[int | None, ...]:
        return tuple(None if bound == UNBOUNDED else bound for bound in window)
