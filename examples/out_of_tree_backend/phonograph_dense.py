"""Attention backend of another package, in plain torch operators: masked dense attention over splits of the keys.

It runs inside graphs, on the tape and on CUDA. The host reads nothing, every bound that a graph freezes holds for all
batches of its key, and `schedule` computes the values that depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phonograph.attention.attention_spec import AttentionKind, AttentionSpec
from phonograph.attention.backend import AttentionBackend, AttentionCall, AttentionLayer
from phonograph.attention.capabilities import Declaration, DeclaredCapabilities
from phonograph.attention.metadata import AttentionMetadata, CommonMetadata, MetadataBuilder
from phonograph.attention.selection import Registered
from phonograph.core.device import DeviceSpec
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet, GraphSupport, Support

SPLIT = 128
"""Keys of one split."""


class DenseCapabilities(DeclaredCapabilities):
    name = "dense"
    declared = Declaration(
        devices=("cpu", "cuda"),
        dtypes=("float32", "float16", "bfloat16"),
        kv_dtypes=("float32", "float16", "bfloat16"),
        kinds=(AttentionKind.DECODER, AttentionKind.ENCODER_ONLY),
        windows=True,
        softcap=True,
        lse=True,
        non_causal=True,
    )

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        return Support(GraphSupport.ALWAYS, "its schedule is made by operators in the graph, its bounds are the key's")

    def buffer_bytes(self, spec: AttentionSpec, device: DeviceSpec, limits: Limits, graphs: Sequence[GraphKey]) -> int:
        """Return the bytes of the temporaries of `forward`, in the largest graph and in the largest eager step.

        A graph on a CPU is recorded with the temporaries of all splits. The number of layers is not known here.
        """
        rows = [key.num_reqs * (key.query_len if key.graphs is GraphSet.DECODE else key.num_tokens) for key in graphs]
        recorded = -(-limits.max_model_len // SPLIT) if device.kind == "cpu" else 0
        per_row, per_slot = _split_bytes(spec, logits=3)
        total = limits.max_num_seqs * (limits.max_num_batched_tokens * per_row + per_slot)
        if rows:
            total += max(rows) * per_row + limits.max_num_seqs * per_slot
            per_row, per_slot = _split_bytes(spec, logits=8)
            total += recorded * (max(rows) * per_row + limits.max_num_seqs * per_slot)
        return total


def _split_bytes(spec: AttentionSpec, *, logits: int) -> tuple[int, int]:
    """Return the float32 bytes of one split, for each row of a slot and for each slot.

    A row has queries, results, `logits` copies of its logits, and masks. A slot has keys and values.
    """
    per_row = 4 * spec.num_query_heads * (4 * spec.head_size + logits * SPLIT) + 5 * SPLIT
    return per_row, 6 * 4 * SPLIT * spec.num_kv_heads * spec.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMetadata(AttentionMetadata):
    """Batch with its schedule.

    Attributes:
        sequence_T: sequence of each row; -1 for padding.
        place_T: place of each row in its query.
        max_query_len, num_splits: bounds that a graph freezes.
    """

    sequence_T: torch.Tensor
    place_T: torch.Tensor
    max_query_len: int
    num_splits: int


class DenseMetadataBuilder(MetadataBuilder[DenseMetadata]):
    """Builder with one schedule buffer for all graphs. Each step fills it again."""

    def __init__(self, device: torch.device, limits: Limits) -> None:
        self._limits = limits
        self._schedule = torch.zeros(2, limits.max_num_batched_tokens, dtype=torch.int64, device=device)

    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> DenseMetadata:
        sequence_T, place_T = self._schedule[:, : common.slot_mapping.shape[0]]
        return DenseMetadata(
            common=common,
            sequence_T=sequence_T,
            place_T=place_T,
            max_query_len=self.max_query_len(common, key),
            num_splits=self.num_splits(common, key),
        )

    def max_query_len(self, common: CommonMetadata, key: GraphKey | None) -> int:
        if key is None:
            return max(1, common.max_query_len)
        return key.query_len if key.graphs is GraphSet.DECODE else key.num_tokens

    def num_splits(self, common: CommonMetadata, key: GraphKey | None) -> int:
        """Return the splits of the longest sequence: in a graph, of the longest that a later batch may have."""
        longest = common.max_seq_len if key is None else self._limits.max_model_len
        return max(1, -(-longest // SPLIT))


class DenseBackend(AttentionBackend[DenseMetadata]):
    capabilities = DenseCapabilities()

    def make_builder(self) -> DenseMetadataBuilder:
        return DenseMetadataBuilder(self.device, self.limits)

    def schedule(self, metadata: DenseMetadata) -> None:
        starts = metadata.common.query_start_loc.long()
        row_T = torch.arange(len(metadata.sequence_T), device=self.device)
        # Empty slots that begin at a row do not own it.
        sequence_T = torch.searchsorted(starts[1:], row_T, right=True)
        is_nobodys = row_T >= starts[-1]
        metadata.sequence_T.copy_(sequence_T.masked_fill(is_nobodys, -1))
        metadata.place_T.copy_(row_T - starts[sequence_T.clamp(max=len(starts) - 2)])

    def write_kv(self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, call: AttentionCall[DenseMetadata]) -> None:
        slot_T = call.metadata.common.slot_mapping
        # torch has no masked write: rows without a slot repeat the write of row 0, or write the values that are there.
        valid_T = slot_T >= 0
        target_T = torch.where(valid_T, slot_T, slot_T[:1]).clamp(min=0)
        block_T, offset_T = target_T // self.spec.block_size, target_T % self.spec.block_size
        mask_T11 = valid_T[:, None, None]
        for plane, new_TKD in zip(call.kv_cache, (key_TKD, value_TKD), strict=True):
            first = torch.where(mask_T11[:1], new_TKD[:1], plane[block_T[:1], offset_T[:1]])
            plane.index_put_((block_T, offset_T), torch.where(mask_T11, new_TKD[: len(slot_T)], first))

    def forward(
        self,
        query_THD: torch.Tensor,
        call: AttentionCall[DenseMetadata],
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None = None,
    ) -> None:
        """Attend split by split on queries laid out by sequence and place [R, Q], and write the result in rows."""
        layer, kv_cache, metadata = call
        starts, lens_R = metadata.common.query_start_loc.long(), metadata.common.seq_lens.long()
        place_Q = torch.arange(metadata.max_query_len, device=self.device)
        row_RQ = (starts[:-1, None] + place_Q).clamp(max=len(query_THD) - 1)
        position_RQ = (lens_R - starts[1:] + starts[:-1])[:, None] + place_Q
        # [R, K, G, Q, D]: results of rows of other sequences are not used, and NaN stays in its row.
        query = query_THD[row_RQ].float().unflatten(2, (self.spec.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        largest = torch.full(query.shape[:-1], -torch.inf, device=self.device)
        total, summed = torch.zeros_like(largest), torch.zeros_like(query)
        for split in range(metadata.num_splits):
            key_W = torch.arange(split * SPLIT, (split + 1) * SPLIT, device=self.device)
            keys, values = self._gathered(kv_cache, metadata, key_W)
            logits = torch.einsum("rkgqd,rwkd->rkgqw", query, keys) * layer.scale
            if layer.softcap:
                logits = layer.softcap * torch.tanh(logits / layer.softcap)
            seen_RQW = self._seen(layer, metadata, key_W, position_RQ, lens_R)
            logits = logits.masked_fill(~seen_RQW[:, None, None], -torch.inf)
            higher = torch.maximum(largest, logits.amax(-1))
            finite = higher.masked_fill(higher == -torch.inf, 0.0)
            weights, rescale = torch.exp(logits - finite[..., None]), torch.exp(largest - finite)
            total = total * rescale + weights.sum(-1)
            summed = summed * rescale[..., None] + torch.einsum("rkgqw,rwkd->rkgqd", weights, values)
            largest = higher
        result_RQHD = (summed / total.clamp(min=1e-30)[..., None]).permute(0, 3, 1, 2, 4).flatten(2, 3)
        self._put(metadata, result_RQHD, out_THD)
        if lse_HT is not None:
            lse_RQH = (largest + total.log()).permute(0, 3, 1, 2).flatten(2)
            lse_HT.copy_(self._rows(metadata, lse_RQH, -torch.inf).T)

    def _put(self, metadata: DenseMetadata, result_RQHD: torch.Tensor, out_THD: torch.Tensor) -> None:
        out_THD.copy_(self._rows(metadata, result_RQHD, 0.0))

    def _rows(self, metadata: DenseMetadata, result_RQ: torch.Tensor, nobodys: float) -> torch.Tensor:
        """Return results by sequence and place as rows, with `nobodys` in padding rows."""
        num_slots, max_query_len = result_RQ.shape[:2]
        sequence_T = metadata.sequence_T
        rows = result_RQ[sequence_T.clamp(0, num_slots - 1), metadata.place_T.clamp(0, max_query_len - 1)]
        return rows.masked_fill((sequence_T < 0).view(-1, *[1] * (rows.dim() - 1)), nobodys)

    def _gathered(
        self, kv_cache: torch.Tensor, metadata: DenseMetadata, key_W: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [R, W, K, D] of a split, with zeros behind each sequence (the cache may have NaN)."""
        table = metadata.common.block_table
        block_W, offset_W = key_W // self.spec.block_size, key_W % self.spec.block_size
        blocks_RW = table[:, block_W.clamp(max=table.shape[1] - 1)].long()
        absent = (key_W >= metadata.common.seq_lens[:, None])[:, :, None, None]
        keys, values = (plane[blocks_RW, offset_W].float().masked_fill(absent, 0.0) for plane in kv_cache)
        return keys, values

    def _seen(
        self,
        layer: AttentionLayer,
        metadata: DenseMetadata,
        key_W: torch.Tensor,
        position_RQ: torch.Tensor,
        lens_R: torch.Tensor,
    ) -> torch.Tensor:
        """Return the mask [R, Q, W] of the keys of a split that each query attends to."""
        position, (left, right) = position_RQ[:, :, None], layer.window
        seen = (key_W < lens_R[:, None, None]).expand(*position_RQ.shape, -1)
        seen = seen & (key_W <= position) if metadata.common.causal else seen
        seen = seen & (key_W >= position - left) if left >= 0 else seen
        return seen & (key_W <= position + right) if right >= 0 else seen


def _load() -> type[DenseBackend]:
    """Return the backend's class. A backend with a kernel library imports it here."""
    return DenseBackend


REGISTERED = Registered(capabilities=DenseCapabilities(), loader=_load)
