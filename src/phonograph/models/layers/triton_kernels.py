"""Kernel set of Triton kernels: few, fused launches over static memory.

Nothing is allocated. Every intermediate is a slice of one workspace for the largest step, so that all graphs share it
and its size is known in advance. A step of one token is limited by reading the weights once: its norms, activation and
residual additions are inside the matrix products.

A batch-invariant kernel set has neither that path nor products chosen by the number of rows. Every step runs the same
kernels, each of which computes a row independently of its position.
"""

from __future__ import annotations

import torch

from phonograph.kernels.scaled_products import Fp8Rows, Rows
from phonograph.kernels.triton.attention.rope_and_kv_write import rope_and_write_kv
from phonograph.kernels.triton.elementwise import layers
from phonograph.kernels.triton.gemm.gemm_dispatch import (
    linear,
    linear_add,
    linear_add_norm,
    linear_silu,
    make_scratch,
    takes_fp8_rows,
    takes_squares,
)
from phonograph.kernels.triton.gemm.gemv import gemv
from phonograph.kernels.triton.gemm.product import ADD, SILU
from phonograph.kernels.triton.gemm.tuning import BATCH_INVARIANT
from phonograph.models.layers.decoder_layer import AttentionHeads
from phonograph.models.layers.kernel_set import Attend, Stream
from phonograph.models.layers.linear import Linear, NormedLinear
from phonograph.models.layers.workspace import Workspace
from phonograph.models.quantization.block_embedding import Embedding

_FEW_TOKENS = 128


class TritonKernels:
    """Kernel set of Triton kernels, on a CUDA device.

    Args:
        workspace: intermediates of the largest step.
        rotary_PD: cosines, then sines, of each position's angles, float32.
        eps: epsilon of the norms.
        batch_invariant: make each token's result independent, bit by bit, of other tokens; 16-bit weights only.
    """

    def __init__(
        self, workspace: Workspace, rotary_PD: torch.Tensor, eps: float, *, batch_invariant: bool = False
    ) -> None:
        self.workspace = workspace
        self._rotary_PD = rotary_PD
        self._eps = eps
        self._scratch = make_scratch(rotary_PD.device)._replace(
            dequantized=workspace.dequantized, scaled=workspace.scaled_scratch()
        )
        self._batch_invariant = batch_invariant
        self._config = BATCH_INVARIANT if batch_invariant else None

    def rotary(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the positions: the kernel reads the table itself."""
        return positions_T

    def embed(self, input_ids_T: torch.Tensor, embedding_VE: Embedding, then: NormedLinear) -> Stream:
        assert isinstance(embedding_VE, torch.Tensor)
        rows = input_ids_T.shape[0]
        hidden_TE, normed_TE = self.workspace.hidden_TE[:rows], self.workspace.normed_TE[:rows]
        normed = self._input_of(then.linear, normed_TE)
        layers.embed_and_norm(input_ids_T, embedding_VE, then.norm_I, self._eps, hidden_TE, normed)
        stream = Stream(hidden_TE, None if self._is_one_row(hidden_TE) else normed_TE)
        stream.fp8_rows = normed if isinstance(normed, Fp8Rows) else None
        return stream

    def project(self, stream: Stream, layer: NormedLinear) -> torch.Tensor:
        out_TF = self.workspace.qkv_TF[: stream.hidden_TE.shape[0]]
        weight_OI, bias_O = layer.linear.weight.operand, layer.linear.bias_O
        if stream.normed_TE is None:
            gemv(stream.hidden_TE, layer.linear.matrix.t(), bias_O, out_TF, norm_K=layer.norm_I, eps=self._eps)
        else:
            scratch, config = self._scratch, self._config
            rows = stream.fp8_rows or stream.normed_TE
            linear(rows, weight_OI, bias_O, out_TF, squares=stream.squares, scratch=scratch, config=config)
        return out_TF

    def attention(
        self, qkv_TF: torch.Tensor, heads: AttentionHeads, rotary: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        num_tokens = qkv_TF.shape[0]
        out_TF = self.workspace.attention_TF[:num_tokens]
        target = attend.kv_target(heads.layer, num_tokens)
        rope_and_write_kv(
            qkv_TF,
            rotary,
            self._rotary_PD,
            target.kv_cache,
            target.slot_mapping,
            num_query_heads=heads.num_query_heads,
            num_kv_heads=heads.num_kv_heads,
            qk_norm=heads.qk_norm,
            eps=self._eps,
            k_scale=target.k_scale,
            v_scale=target.v_scale,
            clear_TF=None if target.clears_padding else out_TF,
            batch_invariant=self._batch_invariant,
        )
        # Other views of one row lose the stride between rows, for which kernels are compiled.
        q_THD = qkv_TF.as_strided(
            (num_tokens, heads.num_query_heads, heads.head_size), (qkv_TF.stride(0), heads.head_size, 1)
        )
        attend.read(q_THD, heads.layer, out_TF.unflatten(-1, (-1, heads.head_size)))
        return out_TF

    def project_gated(self, stream: Stream, layer: NormedLinear, then: Linear) -> Rows:
        space, rows, squares, config = self.workspace, stream.hidden_TE.shape[0], stream.squares, self._config
        weight_2IE, bias_2I, inner_TI = layer.linear.weight.operand, layer.linear.bias_O, space.inner_TI[:rows]
        normed_TE = stream.normed_TE
        if normed_TE is None:
            weight_2IE = layer.linear.matrix.t()
            gemv(stream.hidden_TE, weight_2IE, bias_2I, inner_TI, mode=SILU, norm_K=layer.norm_I, eps=self._eps)
            return inner_TI
        x = stream.fp8_rows or normed_TE
        if linear_silu(x, weight_2IE, bias_2I, inner_TI, squares=squares, scratch=self._scratch, config=config):
            return inner_TI
        gate_up_T2I = space.gate_up_T2I[:rows]
        linear(x, weight_2IE, bias_2I, gate_up_T2I, squares=squares, scratch=self._scratch)
        inner = self._input_of(then, inner_TI)
        layers.silu_and_mul(gate_up_T2I, inner)
        return inner

    def add(self, stream: Stream, x: Rows, layer: Linear, then: NormedLinear | None) -> Stream:
        hidden_TE, normed_TE = stream.hidden_TE, stream.normed_TE
        product = x, layer.weight.operand, layer.bias_O, hidden_TE
        stream.fp8_rows = None
        if normed_TE is None:
            assert isinstance(x, torch.Tensor)
            gemv(x, layer.matrix.t(), layer.bias_O, hidden_TE, mode=ADD)
        elif then is None:
            linear_add(*product, scratch=self._scratch, config=self._config)
        else:
            normed = self._input_of(then.linear, normed_TE)
            stream.fp8_rows = normed if isinstance(normed, Fp8Rows) else None
            stream.squares = linear_add_norm(
                *product,
                then.norm_I,
                self._eps,
                normed,
                defer=self._defers_norm(stream, then.linear),
                scratch=self._scratch,
                config=self._config,
            )
        return stream

    def leaves_rows_out(self, num_tokens: int) -> bool:
        """Return True if the last layer computes only the rows that need logits.

        It then always computes as many rows as there can be, so that all such steps run the same kernels. This only
        pays if these are at most half the tokens, and if there are enough tokens that products are not limited by
        reading the weights.
        """
        most_logits = self.workspace.logits_NV.shape[0]
        return self._config is None and num_tokens > _FEW_TOKENS and num_tokens >= 2 * most_logits

    def keep_rows(self, stream: Stream, attended_TF: torch.Tensor, rows_P: torch.Tensor) -> tuple[Stream, torch.Tensor]:
        """Return the rows in the memory of the projection and of the norm of all rows."""
        space, count = self.workspace, rows_P.shape[0]
        attended_PF = space.qkv_TF[:count, : attended_TF.shape[1]]
        normed_PE, hidden_PE = space.normed_TE[:count], space.normed_TE[count : 2 * count]
        layers.gather_rows(attended_TF, rows_P, attended_PF)
        layers.gather_rows(stream.hidden_TE, rows_P, hidden_PE)
        return Stream(hidden_PE, normed_PE, is_part=True), attended_PF

    def logits(
        self, hidden_TE: torch.Tensor, rows_N: torch.Tensor | None, norm_E: torch.Tensor, head: Linear
    ) -> torch.Tensor:
        num_logits = (hidden_TE if rows_N is None else rows_N).shape[0]
        rows_NE, logits_NV = self.workspace.rows_NE[:num_logits], self.workspace.logits_NV[:num_logits]
        if rows_N is None:
            layers.rms_norm(hidden_TE, norm_E, self._eps, rows_NE)
        else:
            layers.gather_and_norm(hidden_TE, rows_N, norm_E, self._eps, rows_NE)
        linear(rows_NE, head.weight.operand, None, logits_NV, scratch=self._scratch, config=self._config)
        return logits_NV

    def _input_of(self, layer: Linear, rows_TI: torch.Tensor) -> Rows:
        """Return the memory of a product's input: room for FP8 if it takes that, or `rows_TI`."""
        scaled = self._scratch.scaled
        if scaled is None or not takes_fp8_rows(len(rows_TI), layer.weight.operand, self._scratch):
            return rows_TI
        return scaled.rows(*rows_TI.shape)

    def _is_one_row(self, hidden_TE: torch.Tensor) -> bool:
        """Return True if the products of one row compute its norm inside; those of quantized weights do not."""
        return hidden_TE.shape[0] == 1 and self._config is None and not self.workspace.has_quantized_layers

    def _defers_norm(self, stream: Stream, following: Linear) -> bool:
        """Return True if the next product divides by the norm."""
        if self._config is not None or stream.is_part:
            return False
        (num_inputs, num_outputs), rows = following.weight.shape, stream.hidden_TE
        if takes_fp8_rows(rows.shape[0], following.weight.operand, self._scratch):
            return False
        return takes_squares(rows.shape[0], num_outputs, num_inputs, following.weight.operand, rows.dtype)
