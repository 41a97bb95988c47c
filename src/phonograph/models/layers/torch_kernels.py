"""Kernel set of torch's operators, for CPUs and as the reference for others. Norms are computed at once.

It calls few operators, because each costs two to four microseconds at the tape's replay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from phonograph.kernels.torch.layers import rms_norm, rope, silu_and_mul
from phonograph.models.layers.decoder_layer import AttentionHeads
from phonograph.models.layers.kernel_set import Attend, Stream
from phonograph.models.layers.linear import Linear, NormedLinear
from phonograph.models.quantization.block_embedding import BlockEmbedding, Embedding


class Rotary(NamedTuple):
    """Cosines and sines of each token's angles, in the model's dtype."""

    cos_T11h: torch.Tensor
    sin_T1h: torch.Tensor


class TorchKernels:
    """Kernel set of torch's operators, which allocate their results.

    `rotary_PD` has cosines, then sines, of each position's angles, in the model's dtype.
    """

    def __init__(self, rotary_PD: torch.Tensor, eps: float) -> None:
        self._rotary_PD = rotary_PD
        self._eps = torch.tensor(eps, dtype=torch.float32, device=rotary_PD.device)

    def rotary(self, positions_T: torch.Tensor) -> Rotary:
        cos_Th, sin_Th = torch.index_select(self._rotary_PD, 0, positions_T).chunk(2, -1)
        return Rotary(cos_Th[:, None, None], sin_Th[:, None])

    def embed(self, input_ids_T: torch.Tensor, embedding_VE: Embedding, then: NormedLinear) -> Stream:
        if isinstance(embedding_VE, BlockEmbedding):
            return Stream(embedding_VE.lookup(input_ids_T))
        return Stream(functional.embedding(input_ids_T, embedding_VE))

    def project(self, stream: Stream, layer: NormedLinear) -> torch.Tensor:
        normed_TE = rms_norm(stream.hidden_TE, layer.norm_I, self._eps)
        return layer.linear.product(normed_TE)

    def attention(self, qkv_TF: torch.Tensor, heads: AttentionHeads, rotary: Rotary, attend: Attend) -> torch.Tensor:
        num_query_heads, num_kv_heads = heads.num_query_heads, heads.num_kv_heads
        qkv_TXD = qkv_TF.unflatten(-1, (-1, heads.head_size))
        qk_TXD, v_TKD = qkv_TXD.split([num_query_heads + num_kv_heads, num_kv_heads], 1)
        if heads.qk_norm is not None:
            qk_TXD = rms_norm(qk_TXD, heads.qk_norm, self._eps)
        q_THD, k_TKD = rope(qk_TXD, rotary.cos_T11h, rotary.sin_T1h).split([num_query_heads, num_kv_heads], 1)
        out_THD = attend(q_THD, k_TKD, v_TKD, heads.layer)
        return out_THD.view(out_THD.shape[0], -1)

    def project_gated(self, stream: Stream, layer: NormedLinear, then: Linear) -> torch.Tensor:
        return silu_and_mul(self.project(stream, layer))

    def add(self, stream: Stream, x: torch.Tensor, layer: Linear, then: NormedLinear | None) -> Stream:
        layer.add_product(x, stream.hidden_TE)
        return stream

    def leaves_rows_out(self, num_tokens: int) -> bool:
        """Return False: a graph's padding rows would compute the last layer again for rows that it saves."""
        return False

    def keep_rows(self, stream: Stream, attended_TF: torch.Tensor, rows_P: torch.Tensor) -> tuple[Stream, torch.Tensor]:
        return Stream(stream.hidden_TE.index_select(0, rows_P)), attended_TF.index_select(0, rows_P)

    def logits(
        self, hidden_TE: torch.Tensor, rows_N: torch.Tensor | None, norm_E: torch.Tensor, head: Linear
    ) -> torch.Tensor:
        hidden_NE = hidden_TE if rows_N is None else hidden_TE.index_select(0, rows_N)
        return head.product(rms_norm(hidden_NE, norm_E, self._eps))
