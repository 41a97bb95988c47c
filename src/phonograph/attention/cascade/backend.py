"""Cascade attention around a backend: one launch over a common prefix, one over the suffixes.

It needs a backend whose kernels return the LSE and serve batches without a causal mask. To that backend the prefix is
a batch of one sequence, whose query is all tokens of the step. The suffixes are the batch itself with shorter
sequences. Each launch has its own backend and builder, so that neither overwrites the other's plan.

A kernel at the head of the step writes the length of the prefix and the lengths and blocks of the suffixes into
persistent tensors. So the metadata of a graph hold for every prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AttentionBackend, AttentionCall, MakeBackend
from phonograph.attention.cascade.rule import part_limits
from phonograph.attention.metadata import AnyBuilder, AttentionMetadata, CommonMetadata, CommonPrefix, MetadataBuilder
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.kernels.cascade_tensors import PrefixCut


class CascadeKernels(Protocol):
    """Module with the two kernels, for the device; `kernels.triton.attention.cascade` documents them."""

    cut_prefix: Callable[..., None]
    merge_by_lse: Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeMetadata(AttentionMetadata):
    """Batch that cascades, with the metadata of both launches."""

    prefix: AttentionMetadata
    suffix: AttentionMetadata
    prefix_len: torch.Tensor


class CascadeMetadataBuilder(MetadataBuilder[AttentionMetadata]):
    """Builder of both launches if a step cascades, else of the ordinary backend's metadata."""

    def __init__(self, ordinary: AnyBuilder, prefix: AnyBuilder, suffix: AnyBuilder, cut: PrefixCut) -> None:
        self._ordinary = ordinary
        self._prefix = prefix
        self._suffix = suffix
        self._cut = cut

    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> AttentionMetadata:
        assert key is None or key.cascade == (common.prefix is not None), "a cascade graph replays cascades only"
        if common.prefix is None:
            return self._ordinary.build(common, key=key)
        prefixes, suffixes = self._split(common, common.prefix)
        # All tokens of the graph are one query of the prefix's launch.
        prefix_key = None if key is None else GraphKey(GraphSet.MIXED, key.num_tokens, 1)
        return CascadeMetadata(
            common=common,
            prefix=self._prefix.build(prefixes, key=prefix_key),
            suffix=self._suffix.build(suffixes, key=key),
            prefix_len=common.prefix.length,
        )

    def _split(self, common: CommonMetadata, prefix: CommonPrefix) -> tuple[CommonMetadata, CommonMetadata]:
        """Return both batches, their host copies cut as the kernel cuts the tensors."""
        cut, num_slots, length = self._cut, common.seq_lens.shape[0], prefix.num_tokens
        prefixes = replace(
            common,
            num_reqs=1,
            num_decodes=0,
            num_decode_tokens=0,
            max_query_len=common.num_tokens,
            max_seq_len=length,
            query_start_loc=cut.prefix_starts,
            seq_lens=cut.prefix_lens,
            block_table=common.block_table[:1],
            query_start_loc_cpu=np.array([0, common.num_tokens], np.int32),
            seq_lens_cpu=np.array([length], np.int32),
            causal=False,
            prefix=None,
        )
        suffixes = replace(
            common,
            max_seq_len=common.max_seq_len - length,
            seq_lens=cut.suffix_lens[:num_slots],
            block_table=cut.suffix_table[:num_slots],
            seq_lens_cpu=np.maximum(common.seq_lens_cpu - length, 0),
            prefix=None,
        )
        return prefixes, suffixes


class CascadeBackend(AttentionBackend[AttentionMetadata]):
    """Backend that cascades.

    Args:
        ordinary: makes the backend of steps that do not cascade.
        part: makes the backends of the two launches, which return the LSE.
        kernels: cut the batch and merge the outputs.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        limits: Limits,
        *,
        ordinary: MakeBackend,
        part: MakeBackend,
        kernels: CascadeKernels,
    ) -> None:
        super().__init__(spec, device, limits)
        self._kernels = kernels
        self._ordinary = ordinary(replace(spec, cascade=False), device, limits)
        with_lse = replace(spec, cascade=False, lse=True)
        for_prefix, for_suffixes = part_limits(spec, limits)
        self._prefix = part(replace(with_lse, non_causal=True), device, for_prefix)
        self._suffix = part(with_lse, device, for_suffixes)
        self.capabilities = self._suffix.capabilities
        self.clears_padding = self._ordinary.clears_padding and self._suffix.clears_padding
        self.quantizes_queries = self._ordinary.quantizes_queries
        self.reads_on_host = self._ordinary.reads_on_host or self._suffix.reads_on_host
        self._cut = PrefixCut.make(limits.max_num_seqs, -(-limits.max_model_len // spec.block_size), device)
        shape = for_suffixes.max_num_batched_tokens, spec.num_query_heads, spec.head_size
        self._prefix_out = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)

    def make_builder(self) -> CascadeMetadataBuilder:
        return CascadeMetadataBuilder(
            self._ordinary.make_builder(), self._prefix.make_builder(), self._suffix.make_builder(), self._cut
        )

    def schedule(self, metadata: AttentionMetadata) -> None:
        if not isinstance(metadata, CascadeMetadata):
            self._ordinary.schedule(metadata)
            return
        common = metadata.common
        self._kernels.cut_prefix(
            self._cut,
            metadata.prefix_len,
            common.query_start_loc,
            common.seq_lens,
            common.block_table,
            block_size=self.spec.block_size,
        )
        self._prefix.schedule(metadata.prefix)
        self._suffix.schedule(metadata.suffix)

    def write_kv(self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, call: AttentionCall[AttentionMetadata]) -> None:
        layer, kv_cache, metadata = call
        if isinstance(metadata, CascadeMetadata):
            self._suffix.write_kv(key_TKD, value_TKD, AttentionCall(layer, kv_cache, metadata.suffix))
        else:
            self._ordinary.write_kv(key_TKD, value_TKD, call)

    def forward(
        self,
        query_THD: torch.Tensor,
        call: AttentionCall[AttentionMetadata],
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None = None,
    ) -> None:
        layer, kv_cache, metadata = call
        if not isinstance(metadata, CascadeMetadata):
            self._ordinary.forward(query_THD, call, out_THD, lse_HT)
            return
        prefix = AttentionCall(layer, kv_cache, metadata.prefix)
        suffix = AttentionCall(layer, kv_cache, metadata.suffix)
        prefix_out_THD = self._prefix_out[: query_THD.shape[0]]
        prefix_lse_HT = self._prefix.forward_lse(query_THD, prefix, prefix_out_THD)
        suffix_lse_HT = self._suffix.forward_lse(query_THD, suffix, out_THD)
        end = self._cut.prefix_starts[1:]
        self._kernels.merge_by_lse(prefix_out_THD, prefix_lse_HT, out_THD, suffix_lse_HT, end, lse_HT)
