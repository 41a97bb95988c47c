"""The decoder's forward pass on a GPU: few, fused kernels over static memory.

It computes what `Decoder.forward` computes, from the same weights. Nothing is allocated: every intermediate is a slice
of one workspace, made once for the largest step, so that all graphs share it and its size is known before anything
runs. A step of one token reads each weight once and does nothing else worth mentioning, so it has a path of its own in
which norms, activation and residual adds live inside the matrix products.

A batch-invariant decoder has neither that path nor products chosen by the number of rows: every step runs the same
kernels, each of which treats a row alike wherever it stands.

Shapes: T tokens, N rows that need logits, H query heads, K KV heads, D head size, E hidden size, I intermediate size, V
vocabulary, F = (H + 2K) * D.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch

from phonograph.kernels.triton.elementwise import layers
from phonograph.kernels.triton.gemm import gemv
from phonograph.kernels.triton.gemm.linear import (
    linear,
    linear_add,
    linear_add_norm,
    linear_silu,
    make_scratch,
)
from phonograph.kernels.triton.gemm.tuning import BATCH_INVARIANT, takes_squares
from phonograph.models.decoder import Decoder
from phonograph.models.layers.workspace import Workspace

_FEW_TOKENS = 128
FusedAttention = Callable[[int, torch.Tensor, torch.Tensor], None]
"""(layer index, projection [T, F], output [T, H * D]): rotates, writes keys and values, attends into the output."""


class FusedDecoder:
    """Forward pass and logits over the weights of `decoder`, on a CUDA device.

    max_num_tokens, max_num_logits: the largest step
    batch_invariant: what a token gets does not depend, in any bit, on the others of the step; 16-bit weights only
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_num_tokens: int,
        max_num_logits: int,
        max_positions: int,
        batch_invariant: bool = False,
    ) -> None:
        self.decoder = decoder
        self.spec = decoder.spec
        self.workspace = Workspace.make(decoder.spec, max_num_tokens, max_num_logits, decoder.dtype, decoder.device)
        self.rotary_PD = decoder.rotary_table(max_positions, torch.float32)
        self._eps = decoder.spec.rms_norm_eps
        self._scratch = make_scratch(decoder.device)
        self._config = BATCH_INVARIANT if batch_invariant else None
        self._indices: Sequence[int] = range(len(decoder.layers))

    def forward(
        self, input_ids_T: torch.Tensor, attention: FusedAttention, rows_P: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The residual stream [T, E] after the last layer, before the final norm, in the workspace.

        rows_P: of a step of `leaves_rows_out`, the only rows that anyone asks for, as many as there can be rows of
        logits, int64; then it is those rows [P, E]. Behind its attention the last layer computes no others.
        """
        if input_ids_T.shape[0] == 1 and self._config is None:
            return self._one_token(input_ids_T, attention)
        return self._many(input_ids_T, attention, rows_P)

    @contextmanager
    def only_layers(self, indices: Sequence[int]) -> Generator[None]:
        """Inside, `forward` runs these layers alone, for what it launches: all kernels are those of the first layer,
        the second, the last, and such whose attention differs."""
        every, self._indices = self._indices, indices
        try:
            yield
        finally:
            self._indices = every

    def leaves_rows_out(self, num_tokens: int) -> bool:
        """Whether the last layer of a prefill of so many tokens computes only rows that need logits.

        Always as many as there can be, so that its kernels are those of every other such step; and so only where that
        is half the tokens at most. Of so few tokens that a product takes as long as its weights nothing is left out.
        """
        most_logits = self.workspace.logits_NV.shape[0]
        return self._config is None and num_tokens > _FEW_TOKENS and num_tokens >= 2 * most_logits

    def logits(self, hidden_TE: torch.Tensor, rows_N: torch.Tensor | None, num_logits: int) -> torch.Tensor:
        """Logits [N, V], in the workspace, of the rows `rows_N` of what `forward` returned (None: of all its rows)."""
        space, decoder, eps = self.workspace, self.decoder, self._eps
        logits_NV = space.logits_NV[:num_logits]
        lm_head_VE = decoder.lm_head_EV.t()
        rows_NE = space.rows_NE[:num_logits]
        if rows_N is None:
            layers.rms_norm(hidden_TE, decoder.final_norm, eps, rows_NE)
        else:
            layers.gather_and_norm(hidden_TE, rows_N, decoder.final_norm, eps, rows_NE)
        linear(rows_NE, lm_head_VE, None, logits_NV, scratch=self._scratch, config=self._config)
        return logits_NV

    def _one_token(self, input_ids_T: torch.Tensor, attention: FusedAttention) -> torch.Tensor:
        space, decoder, eps = self.workspace, self.decoder, self._eps
        hidden, qkv, attended, inner = space.hidden_TE[:1], space.qkv_TF[:1], space.attention_TF[:1], space.inner_TI[:1]
        first = decoder.layers[0]
        layers.embed_and_norm(input_ids_T, decoder.embedding_VE, first.input_norm, eps, hidden, space.normed_TE[:1])
        for index in self._indices:
            layer = decoder.layers[index]
            gemv.gemv_norm(hidden, layer.input_norm, eps, layer.qkv.t(), layer.qkv_bias, qkv)
            attention(index, qkv, attended)
            gemv.gemv_add(attended, layer.output.t(), layer.output_bias, hidden)
            gemv.gemv_norm_silu(hidden, layer.mlp_norm, eps, layer.gate_up.t(), layer.gate_up_bias, inner)
            gemv.gemv_add(inner, layer.down.t(), layer.down_bias, hidden)
        return hidden

    def _many(
        self, input_ids_T: torch.Tensor, attention: FusedAttention, rows_P: torch.Tensor | None = None
    ) -> torch.Tensor:
        space, decoder, eps, rows = self.workspace, self.decoder, self._eps, input_ids_T.shape[0]
        hidden, normed, qkv = space.hidden_TE[:rows], space.normed_TE[:rows], space.qkv_TF[:rows]
        attended, gate_up, inner = space.attention_TF[:rows], space.gate_up_T2I[:rows], space.inner_TI[:rows]
        scratch, config, first = self._scratch, self._config, decoder.layers[0]
        layers.embed_and_norm(input_ids_T, decoder.embedding_VE, first.input_norm, eps, hidden, normed)
        squares = None
        # Whether the norms' divisions are left to the products behind them.
        defer_qkv, defer_mlp = (
            config is None and takes_squares(rows, weight.shape[1], weight.shape[0], hidden.dtype)
            for weight in (first.qkv, first.gate_up)
        )
        following = [*decoder.layers[1:], None]
        for index in self._indices:
            layer, next_layer = decoder.layers[index], following[index]
            linear(normed, layer.qkv.t(), layer.qkv_bias, qkv, squares=squares, scratch=scratch, config=config)
            attention(index, qkv, attended)
            if next_layer is None and rows_P is not None:
                attended, hidden, normed, gate_up, inner = self._asked_for(rows_P, attended, hidden)
                defer_mlp = False
            product = attended, layer.output.t(), layer.output_bias, hidden
            squares = linear_add_norm(
                *product, layer.mlp_norm, eps, normed, defer=defer_mlp, scratch=scratch, config=config
            )
            weight_2IE, bias_2I = layer.gate_up.t(), layer.gate_up_bias
            if not linear_silu(normed, weight_2IE, bias_2I, inner, squares=squares, scratch=scratch, config=config):
                linear(normed, weight_2IE, bias_2I, gate_up, squares=squares, scratch=scratch)
                layers.silu_and_mul(gate_up, inner)
            product = inner, layer.down.t(), layer.down_bias, hidden
            if next_layer is None:
                linear_add(*product, scratch=scratch, config=config)
            else:
                norm = next_layer.input_norm
                squares = linear_add_norm(*product, norm, eps, normed, defer=defer_qkv, scratch=scratch, config=config)
        return hidden

    def _asked_for(
        self, rows_P: torch.Tensor, attended_TF: torch.Tensor, hidden_TE: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Attention's output and the residual stream of these rows, and room for their norm, gates and activation:
        where the projection and the norm of all rows were."""
        space, count = self.workspace, len(rows_P)
        attended = space.qkv_TF[:count, : attended_TF.shape[1]]
        normed, hidden = space.normed_TE[:count], space.normed_TE[count : 2 * count]
        layers.gather_rows(attended_TF, rows_P, attended)
        layers.gather_rows(hidden_TE, rows_P, hidden)
        return attended, hidden, normed, space.gate_up_T2I[:count], space.inner_TI[:count]
