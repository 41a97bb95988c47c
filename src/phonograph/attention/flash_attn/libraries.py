"""One shape for the libraries that offer FlashAttention: what is the same for the backend, and each one's own words.

Facts of their code that the calls here rest on:

- With a block table all of them align causal masks and windows to the last key, as we do.
- A window's bound on a side without one is -1 (None in `flash_attn.cute`). Version 2 and 3 drop a window that reaches
  beyond max_seqlen_k or max_seqlen_q, so both must be true upper bounds.
- Rows of queries behind the last sequence stay unwritten, in the output and in the LSE.
- Sinks are bfloat16 there, and are part of the LSE.
- Version 3 takes queries, keys and values of one dtype. Where that is FP8 (e4m3), factors for all three come as float32
  [sequences, KV heads] at any strides (none is 1), the weights are rounded to FP8 too, and the output is bfloat16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from phonograph.attention.backend import UNBOUNDED, AttentionLayer, AttentionSpec

Functions = dict[str, Callable[..., Any]]
Window = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the launches of a step share. Tensors are int32, as in CommonMetadata.

    query_start_loc [R+1], seq_lens [R], block_table [R, blocks]
    max_query_len, max_seq_len: upper bounds, both at least 1
    num_splits: parts that the keys of a sequence may be cut into: a bound where the launch has a plan, their number
        where it has none, 0 for the library's own choice; version 2 takes none
    whole: the first query is the first row's; else rows before it are another launch's
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool
    num_splits: int
    whole: bool


class Library(ABC):
    """One library's FlashAttention for one KV group.

    needs: its functions with the arguments that `attend` and `schedule` pass by name
    sink:  the argument that takes sinks, needed only where a model has them
    descales: the arguments that an FP8 cache needs
    """

    needs: ClassVar[dict[str, tuple[str, ...]]]
    sink: ClassVar[tuple[str, str]] = ("", "")
    descales: ClassVar[tuple[str, tuple[str, ...]]] = ("", ())

    def __init__(self, functions: Functions, spec: AttentionSpec) -> None:
        self.functions = functions
        self.spec = spec

    def schedule(self, launch: Launch, window: Window) -> torch.Tensor | None:
        """The plan of the step, int32 [n], for launches with this one window; None where the library has none.

        The contents are computed on the device, from those of the batch's tensors; n follows from shapes and numbers.
        """
        del launch, window
        return None

    @abstractmethod
    def attend(
        self,
        layer: AttentionLayer,
        query_THD: torch.Tensor,
        key_BSKD: torch.Tensor,
        value_BSKD: torch.Tensor,
        launch: Launch,
        plan: torch.Tensor | None,
        out_THD: torch.Tensor,
    ) -> torch.Tensor | None:
        """Writes the output; returns the LSE, float32 [H, T], where the spec asks for it."""

    def take(self, result: Any, out_THD: torch.Tensor, launch: Launch) -> torch.Tensor | None:
        """Output and LSE out of what a function returned: a tensor, or a tuple with the LSE in the second place."""
        out, lse = (result[0], result[1]) if isinstance(result, tuple) else (result, None)
        # Some have no argument for the output, and version 2 writes elsewhere where it folds query heads.
        if out.data_ptr() == out_THD.data_ptr():
            return lse if self.spec.lse else None
        out = out.reshape(out_THD.shape)
        if launch.whole:
            out_THD.copy_(out)
        else:
            rows = torch.arange(out_THD.shape[0], dtype=torch.int32, device=out_THD.device)
            own = (rows >= launch.query_start_loc[:1])[:, None, None]
            torch.where(own, out, out_THD, out=out_THD)
        return lse if self.spec.lse else None


_DESCALES = "q_descale", "k_descale", "v_descale"


def _fp8(spec: AttentionSpec, layer: AttentionLayer, launch: Launch) -> dict[str, Any]:
    """The factors of an FP8 cache and of queries: views of the layer's own tensors, which live as long as any graph."""
    if not spec.kv_cache_dtype.startswith("float8"):
        return {}
    num_seqs = launch.seq_lens.shape[0]
    scales = zip(_DESCALES, (layer.q_scale, layer.k_scale, layer.v_scale), strict=True)
    return {name: None if scale_K is None else scale_K.expand(num_seqs, -1) for name, scale_K in scales}


def _sinks(sinks_H: torch.Tensor) -> torch.Tensor:
    # At each call, not once: a tensor first made inside a capture would lie in memory that other graphs use too.
    return sinks_H.to(torch.bfloat16)


class _VllmLibrary(Library):
    """`vllm.vllm_flash_attn`: one function for all versions. It takes the lengths of the keys as they are."""

    fa_version: ClassVar[int]

    @abstractmethod
    def own(self, layer: AttentionLayer, launch: Launch, plan: torch.Tensor | None) -> dict[str, Any]:
        """The arguments that only this version takes."""

    def attend(
        self,
        layer: AttentionLayer,
        query_THD: torch.Tensor,
        key_BSKD: torch.Tensor,
        value_BSKD: torch.Tensor,
        launch: Launch,
        plan: torch.Tensor | None,
        out_THD: torch.Tensor,
    ) -> torch.Tensor | None:
        result = self.functions["flash_attn_varlen_func"](
            q=query_THD,
            k=key_BSKD,
            v=value_BSKD,
            max_seqlen_q=launch.max_query_len,
            cu_seqlens_q=launch.query_start_loc,
            max_seqlen_k=launch.max_seq_len,
            seqused_k=launch.seq_lens,
            softmax_scale=layer.scale,
            causal=launch.causal,
            window_size=list(layer.window),
            softcap=layer.softcap,
            block_table=launch.block_table,
            return_softmax_lse=self.spec.lse,
            out=out_THD,
            fa_version=self.fa_version,
            **self.own(layer, launch, plan),
        )
        return self.take(result, out_THD, launch)


_VLLM_ARGUMENTS = (
    *("q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "seqused_k", "softmax_scale", "causal"),
    *("window_size", "softcap", "block_table", "return_softmax_lse", "out", "fa_version"),
)
_SCHEDULER_ARGUMENTS = (
    *("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "cache_seqlens"),
    *("qkv_dtype", "cu_seqlens_q", "page_size", "causal", "window_size", "has_softcap", "num_splits"),
)


class VllmLibrary2(_VllmLibrary):
    needs: ClassVar[dict[str, tuple[str, ...]]] = {"flash_attn_varlen_func": (*_VLLM_ARGUMENTS, "alibi_slopes")}
    fa_version = 2

    def own(self, layer: AttentionLayer, launch: Launch, plan: torch.Tensor | None) -> dict[str, Any]:
        return {"alibi_slopes": layer.alibi_slopes}


class VllmLibrary3(_VllmLibrary):
    needs: ClassVar[dict[str, tuple[str, ...]]] = {
        "flash_attn_varlen_func": (*_VLLM_ARGUMENTS, "scheduler_metadata", "num_splits"),
        "get_scheduler_metadata": _SCHEDULER_ARGUMENTS,
    }
    sink = ("flash_attn_varlen_func", "s_aux")
    descales = "flash_attn_varlen_func", _DESCALES
    fa_version = 3

    def schedule(self, launch: Launch, window: Window) -> torch.Tensor:
        return _scheduler_metadata(self, launch, window, launch.max_seq_len)

    def own(self, layer: AttentionLayer, launch: Launch, plan: torch.Tensor | None) -> dict[str, Any]:
        own: dict[str, Any] = {"scheduler_metadata": plan, "num_splits": launch.num_splits}
        own |= _fp8(self.spec, layer, launch)
        return own if layer.sinks is None else {**own, "s_aux": _sinks(layer.sinks)}


class VllmLibrary4(_VllmLibrary):
    needs: ClassVar[dict[str, tuple[str, ...]]] = {"flash_attn_varlen_func": (*_VLLM_ARGUMENTS, "num_splits")}
    sink = ("flash_attn_varlen_func", "s_aux")
    fa_version = 4

    def own(self, layer: AttentionLayer, launch: Launch, plan: torch.Tensor | None) -> dict[str, Any]:
        own: dict[str, Any] = {"num_splits": launch.num_splits}
        return own if layer.sinks is None else {**own, "s_aux": _sinks(layer.sinks)}


class PackageLibrary2(Library):
    """The package `flash_attn`, version 2: its plan are the cumulative lengths of the keys, which it takes instead."""

    needs: ClassVar[dict[str, tuple[str, ...]]] = {
        "flash_attn_varlen_func": (
            *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal"),
            *("window_size", "softcap", "alibi_slopes", "return_attn_probs", "block_table"),
        )
    }

    def schedule(self, launch: Launch, window: Window) -> torch.Tensor:
        del window
        starts = launch.seq_lens.new_zeros(launch.seq_lens.shape[0] + 1)
        torch.cumsum(launch.seq_lens, 0, dtype=torch.int32, out=starts[1:])
        return starts

    def attend(
        self,
        layer: AttentionLayer,
        query_THD: torch.Tensor,
        key_BSKD: torch.Tensor,
        value_BSKD: torch.Tensor,
        launch: Launch,
        plan: torch.Tensor | None,
        out_THD: torch.Tensor,
    ) -> torch.Tensor | None:
        result = self.functions["flash_attn_varlen_func"](
            q=query_THD,
            k=key_BSKD,
            v=value_BSKD,
            cu_seqlens_q=launch.query_start_loc,
            cu_seqlens_k=plan,
            max_seqlen_q=launch.max_query_len,
            max_seqlen_k=launch.max_seq_len,
            softmax_scale=layer.scale,
            causal=launch.causal,
            window_size=layer.window,
            softcap=layer.softcap,
            alibi_slopes=layer.alibi_slopes,
            return_attn_probs=self.spec.lse,
            block_table=launch.block_table,
        )
        return self.take(result, out_THD, launch)


class InterfaceLibrary3(Library):
    """The module `flash_attn_interface`, version 3, and kernels published with its functions.

    It takes the longest sequence from the width of the block table, so its plan has to be made for that.
    """

    needs: ClassVar[dict[str, tuple[str, ...]]] = {
        "flash_attn_with_kvcache": (
            *("q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q"),
            *("softmax_scale", "causal", "window_size", "softcap", "scheduler_metadata", "num_splits"),
            "return_softmax_lse",
        ),
        "get_scheduler_metadata": _SCHEDULER_ARGUMENTS,
    }
    sink = ("flash_attn_with_kvcache", "s_aux")
    descales = "flash_attn_with_kvcache", _DESCALES

    def schedule(self, launch: Launch, window: Window) -> torch.Tensor:
        return _scheduler_metadata(self, launch, window, launch.block_table.shape[1] * self.spec.block_size)

    def attend(
        self,
        layer: AttentionLayer,
        query_THD: torch.Tensor,
        key_BSKD: torch.Tensor,
        value_BSKD: torch.Tensor,
        launch: Launch,
        plan: torch.Tensor | None,
        out_THD: torch.Tensor,
    ) -> torch.Tensor | None:
        sinks = {} if layer.sinks is None else {"s_aux": _sinks(layer.sinks)}
        result = self.functions["flash_attn_with_kvcache"](
            q=query_THD,
            k_cache=key_BSKD,
            v_cache=value_BSKD,
            cache_seqlens=launch.seq_lens,
            page_table=launch.block_table,
            cu_seqlens_q=launch.query_start_loc,
            max_seqlen_q=launch.max_query_len,
            softmax_scale=layer.scale,
            causal=launch.causal,
            window_size=layer.window,
            softcap=layer.softcap,
            scheduler_metadata=plan,
            num_splits=launch.num_splits,
            return_softmax_lse=self.spec.lse,
            **_fp8(self.spec, layer, launch),
            **sinks,
        )
        return self.take(result, out_THD, launch)


class CuteLibrary4(Library):
    """`flash_attn.cute`, version 4."""

    needs: ClassVar[dict[str, tuple[str, ...]]] = {
        "flash_attn_varlen_func": (
            *("q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "seqused_k", "page_table"),
            *("softmax_scale", "causal", "window_size", "softcap", "num_splits", "return_lse"),
        )
    }
    sink = ("flash_attn_varlen_func", "learnable_sink")

    def attend(
        self,
        layer: AttentionLayer,
        query_THD: torch.Tensor,
        key_BSKD: torch.Tensor,
        value_BSKD: torch.Tensor,
        launch: Launch,
        plan: torch.Tensor | None,
        out_THD: torch.Tensor,
    ) -> torch.Tensor | None:
        sinks = {} if layer.sinks is None else {"learnable_sink": _sinks(layer.sinks)}
        left, right = (None if bound == UNBOUNDED else bound for bound in layer.window)
        result = self.functions["flash_attn_varlen_func"](
            q=query_THD,
            k=key_BSKD,
            v=value_BSKD,
            cu_seqlens_q=launch.query_start_loc,
            max_seqlen_q=launch.max_query_len,
            max_seqlen_k=launch.max_seq_len,
            seqused_k=launch.seq_lens,
            page_table=launch.block_table,
            softmax_scale=layer.scale,
            causal=launch.causal,
            window_size=(left, right),
            softcap=layer.softcap,
            num_splits=launch.num_splits,
            return_lse=self.spec.lse,
            **sinks,
        )
        return self.take(result, out_THD, launch)


def _scheduler_metadata(library: Library, launch: Launch, window: Window, max_seq_len: int) -> torch.Tensor:
    """Version 3's ahead-of-time schedule. Every number must be the one that the launches pass, or sizes differ."""
    spec = library.spec
    return library.functions["get_scheduler_metadata"](
        batch_size=launch.seq_lens.shape[0],
        max_seqlen_q=launch.max_query_len,
        max_seqlen_k=max_seq_len,
        num_heads_q=spec.num_query_heads,
        num_heads_kv=spec.num_kv_heads,
        headdim=spec.head_size,
        cache_seqlens=launch.seq_lens,
        qkv_dtype=getattr(torch, spec.kv_cache_dtype),
        cu_seqlens_q=launch.query_start_loc,
        page_size=spec.block_size,
        causal=launch.causal,
        window_size=window,
        has_softcap=spec.softcap > 0,
        num_splits=launch.num_splits,
    )
