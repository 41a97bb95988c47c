"""Backend that runs decodes and prefills of one batch as two launches inside one graph.

A kernel that is fast for one kind of query is often slow for the other. So a kernel cuts the batch on the device
(`split_batch`). Each part is the whole batch with the sequences of the other part empty, so what a graph froze holds
for every batch. The parts are two backends, or one backend with different frozen bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AttentionBackend, AttentionCall, MakeBackend
from phonograph.attention.composite.capabilities import SplitCapabilities, decode_part
from phonograph.attention.metadata import (
    AnyBuilder,
    AttentionMetadata,
    CommonMetadata,
    MetadataBuilder,
    cut_on_host,
    leading_decodes,
)
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.kernels.triton.attention.split_batch import SplitBatch, split_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMetadata(AttentionMetadata):
    """Batch with the metadata of its two parts.

    Attributes:
        decode: metadata of the decodes, or of the whole batch if there are only decodes.
        prefill: metadata of the prefills, or None if there are only decodes.
        num_decode_rows: rows of the query that decodes may have.
    """

    decode: AttentionMetadata
    prefill: AttentionMetadata | None
    num_decode_rows: int


class SplitMetadataBuilder(MetadataBuilder[SplitMetadata]):
    """Builder of both parts, each by its own backend's builder."""

    def __init__(
        self,
        decode: AnyBuilder,
        prefill: AnyBuilder,
        split: SplitBatch,
        decode_query_len: int,
    ) -> None:
        self._decode = decode
        self._prefill = prefill
        self._split = split
        self._query_len = decode_query_len

    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> SplitMetadata:
        if key is not None and key.graphs is GraphSet.DECODE:
            return self._decodes_only(common, key, key.num_tokens)
        num_slots, num_tokens = common.seq_lens.shape[0], common.slot_mapping.shape[0]
        if (
            key is None
            and common.num_reqs
            and leading_decodes(common.query_start_loc_cpu, self._query_len) == num_slots
        ):
            return self._decodes_only(common, None, num_tokens)
        part = decode_part(num_tokens, num_slots, self._query_len)
        decodes, prefills = self._cut(common, num_slots, part)
        return SplitMetadata(
            common=common,
            decode=self._decode.build(decodes, key=None if key is None else part),
            prefill=self._prefill.build(prefills, key=key),
            num_decode_rows=decodes.slot_mapping.shape[0],
        )

    def _decodes_only(self, common: CommonMetadata, key: GraphKey | None, num_rows: int) -> SplitMetadata:
        decode = self._decode.build(common, key=key)
        return SplitMetadata(common=common, decode=decode, prefill=None, num_decode_rows=num_rows)

    def _cut(self, common: CommonMetadata, num_slots: int, part: GraphKey) -> tuple[CommonMetadata, CommonMetadata]:
        """Cut tensors and host copies into decodes, whose graph key is `part`, and prefills."""
        decode_slots, split = part.num_reqs, self._split
        cut = cut_on_host(common.query_start_loc_cpu, common.seq_lens_cpu, self._query_len)
        decodes = replace(
            common,
            num_reqs=cut.num_decodes,
            num_decodes=cut.num_decodes,
            num_tokens=cut.border,
            num_decode_tokens=cut.border,
            max_query_len=self._query_len,
            max_seq_len=int(cut.decode_lens.max(initial=0)),
            query_start_loc=split.decode_starts[: decode_slots + 1],
            seq_lens=split.decode_lens[:decode_slots],
            block_table=common.block_table[:decode_slots],
            slot_mapping=common.slot_mapping[: part.num_tokens],
            query_start_loc_cpu=cut.decode_starts[: decode_slots + 1],
            seq_lens_cpu=cut.decode_lens[:decode_slots],
        )
        prefills = replace(
            common,
            num_decodes=0,
            num_decode_tokens=0,
            max_query_len=cut.max_prefill_query_len,
            max_seq_len=int(cut.prefill_lens.max(initial=0)),
            query_start_loc=split.prefill_starts[: num_slots + 1],
            seq_lens=split.prefill_lens[:num_slots],
            query_start_loc_cpu=cut.prefill_starts,
            seq_lens_cpu=cut.prefill_lens,
        )
        return decodes, prefills


class SplitBackend(AttentionBackend[SplitMetadata]):
    """Two backends as one.

    Args:
        decode: makes the backend of the decodes.
        prefill: makes the backend of the prefills.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        limits: Limits,
        *,
        decode: MakeBackend,
        prefill: MakeBackend,
    ) -> None:
        super().__init__(spec, device, limits)
        self.decode = decode(spec, device, limits)
        self.prefill = prefill(spec, device, limits)
        self.capabilities = SplitCapabilities(self.decode.capabilities, self.prefill.capabilities)
        # Each part clears only the rows after its own sequences.
        self.clears_padding = self.decode.clears_padding and self.prefill.clears_padding
        self.reads_on_host = self.decode.reads_on_host or self.prefill.reads_on_host
        self._query_len = 1 + spec.speculative_tokens
        self._split = SplitBatch.make(limits.max_num_seqs, device)

    def make_builder(self) -> SplitMetadataBuilder:
        return SplitMetadataBuilder(
            self.decode.make_builder(), self.prefill.make_builder(), self._split, self._query_len
        )

    def schedule(self, metadata: SplitMetadata) -> None:
        if metadata.prefill is not None:
            common = metadata.common
            split_batch(self._split, common.query_start_loc, common.seq_lens, decode_query_len=self._query_len)
            self.prefill.schedule(metadata.prefill)
        # Last: kernels that do not wait for all earlier ones may read what it writes.
        self.decode.schedule(metadata.decode)

    def write_kv(self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, call: AttentionCall[SplitMetadata]) -> None:
        layer, kv_cache, metadata = call
        # One write for all rows; the decodes' part has only the first ones.
        if metadata.prefill is not None:
            self.prefill.write_kv(key_TKD, value_TKD, AttentionCall(layer, kv_cache, metadata.prefill))
        else:
            self.decode.write_kv(key_TKD, value_TKD, AttentionCall(layer, kv_cache, metadata.decode))

    def forward(
        self,
        query_THD: torch.Tensor,
        call: AttentionCall[SplitMetadata],
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None = None,
    ) -> None:
        layer, kv_cache, metadata = call
        rows = metadata.num_decode_rows
        lse = None if lse_HT is None else lse_HT[:, :rows]
        # Decodes first: their launch may write zeros to the rows of prefills.
        self.decode.forward(query_THD[:rows], AttentionCall(layer, kv_cache, metadata.decode), out_THD[:rows], lse)
        if metadata.prefill is not None:
            self.prefill.forward(query_THD, AttentionCall(layer, kv_cache, metadata.prefill), out_THD, lse_HT)
