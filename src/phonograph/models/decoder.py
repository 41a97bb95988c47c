"""The decoder of every supported architecture: one forward pass over tokens, with attention passed in.

Nothing here depends on the contents of a tensor or changes from step to step, so that a step can be captured: by a CUDA
graph, or by the tape. Residual adds are folded into the matrix products that feed them.

Matrices are held as [in, out], the shape in which they multiply. On a GPU they lie in memory as [out, in], as in a
checkpoint; on the CPU as [in, out], which its library multiplies by 4 to 32 tokens up to 1.5 times as fast (2 times out
of the cache, and as fast elsewhere).

Shapes: T tokens, N rows that need logits, H query heads, K KV heads, D head size, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from phonograph.kernels.torch.layers import rms_norm, rope, silu_and_mul
from phonograph.models.spec import ModelSpec
from phonograph.models.weights.kv_scales import KVScales

AttentionFunction = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer index, query [T, H, D], key [T, K, D], value [T, K, D]) -> contiguous output [T, H, D].

It writes keys and values to the cache and attends. Its inputs are views whose heads are contiguous, not whole tokens.
"""


@dataclass(slots=True, kw_only=True)
class DecoderLayer:
    """Weights of one layer; query, key and value are one matrix, gate and up another. QKV is (H + 2K) * D columns."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """[H + K, D]: the query norm's weight for each query head, then the key norm's for each KV head."""
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class Decoder:
    """Weights of a model, allocated once and without contents, and its forward pass.

    max_positions: length of the rotary table; the model's context length by default.
    `parameters` are the weights as they lie in memory, all contiguous; `kv_scales` those of an FP8 KV cache.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_positions: int | None = None
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.parameters: list[torch.Tensor] = []
        self.kv_scales = KVScales()
        self.layers = [self._make_layer() for _ in range(spec.num_layers)]
        self.final_norm = self._allocate(spec.hidden_size)
        self.lm_head_EV = self._matrix(spec.hidden_size, spec.vocab_size)
        if spec.tie_word_embeddings:
            self.embedding_VE = self.lm_head_EV.t()
        else:
            self.embedding_VE = self._allocate(spec.vocab_size, spec.hidden_size)
        self._eps = torch.tensor(spec.rms_norm_eps, dtype=torch.float32, device=device)
        self._cos_sin_PD = self.rotary_table(max_positions or spec.context_length, dtype)

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionFunction
    ) -> torch.Tensor:
        """The residual stream [T, E] after the last layer, before the final norm. Call it in inference mode."""
        eps, head_size = self._eps, self.spec.head_size
        num_query_heads, num_kv_heads = self.spec.num_query_heads, self.spec.num_kv_heads
        qk_and_v, q_and_k = [num_query_heads + num_kv_heads, num_kv_heads], [num_query_heads, num_kv_heads]
        cos_Th, sin_Th = torch.index_select(self._cos_sin_PD, 0, positions_T).chunk(2, -1)
        cos_T11h, sin_T1h = cos_Th[:, None, None], sin_Th[:, None]
        hidden_TE = functional.embedding(input_ids_T, self.embedding_VE)
        for index, layer in enumerate(self.layers):
            qkv = _linear(rms_norm(hidden_TE, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
            qk, value_TKD = qkv.unflatten(-1, (-1, head_size)).split(qk_and_v, 1)
            if layer.qk_norm is not None:
                qk = rms_norm(qk, layer.qk_norm, eps)
            query_THD, key_TKD = rope(qk, cos_T11h, sin_T1h).split(q_and_k, 1)
            out_THD = attention(index, query_THD, key_TKD, value_TKD)
            _add_linear(hidden_TE, out_THD.view(out_THD.shape[0], -1), layer.output, layer.output_bias)
            gate_up = _linear(rms_norm(hidden_TE, layer.mlp_norm, eps), layer.gate_up, layer.gate_up_bias)
            _add_linear(hidden_TE, silu_and_mul(gate_up), layer.down, layer.down_bias)
        return hidden_TE

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in the model's dtype, of rows of what `forward` returned."""
        return torch.mm(rms_norm(hidden_NE, self.final_norm, self._eps), self.lm_head_EV)

    def destinations(self) -> dict[str, torch.Tensor]:
        """Where each tensor of a checkpoint goes, by its name: a view of the fused weights.

        Views have the shapes of `ModelSpec.tensor_shapes`, but for the norms of query and key heads, which are [H, D]
        and [K, D] for a [D] in the checkpoint. Together they cover every weight.
        """
        spec = self.spec
        views = {"model.embed_tokens.weight": self.embedding_VE, "model.norm.weight": self.final_norm}
        if not spec.tie_word_embeddings:
            views["lm_head.weight"] = self.lm_head_EV.t()
        q_rows, kv_rows = spec.num_query_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        qkv_rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        gate_up_rows = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        for index, layer in enumerate(self.layers):
            prefix, attention, mlp = (f"model.layers.{index}{part}" for part in ("", ".self_attn", ".mlp"))
            views[f"{prefix}.input_layernorm.weight"] = layer.input_norm
            views[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm
            views |= _split(attention, qkv_rows, layer.qkv, layer.qkv_bias)
            views |= _split(attention, {"o_proj": spec.hidden_size}, layer.output, layer.output_bias)
            views |= _split(mlp, gate_up_rows, layer.gate_up, layer.gate_up_bias)
            views |= _split(mlp, {"down_proj": spec.hidden_size}, layer.down, layer.down_bias)
            if layer.qk_norm is not None:
                views[f"{attention}.q_norm.weight"] = layer.qk_norm[: spec.num_query_heads]
                views[f"{attention}.k_norm.weight"] = layer.qk_norm[spec.num_query_heads :]
        return views

    def _make_layer(self) -> DecoderLayer:
        spec = self.spec
        q_size, kv_size = spec.num_query_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        qkv_size, gate_up_size = q_size + 2 * kv_size, 2 * spec.intermediate_size
        num_rotated_heads = spec.num_query_heads + spec.num_kv_heads
        return DecoderLayer(
            input_norm=self._allocate(spec.hidden_size),
            qkv=self._matrix(spec.hidden_size, qkv_size),
            qkv_bias=self._allocate(qkv_size) if spec.qkv_bias else None,
            qk_norm=self._allocate(num_rotated_heads, spec.head_size) if spec.qk_norm else None,
            output=self._matrix(q_size, spec.hidden_size),
            output_bias=self._allocate(spec.hidden_size) if spec.o_bias else None,
            mlp_norm=self._allocate(spec.hidden_size),
            gate_up=self._matrix(spec.hidden_size, gate_up_size),
            gate_up_bias=self._allocate(gate_up_size) if spec.mlp_bias else None,
            down=self._matrix(spec.intermediate_size, spec.hidden_size),
            down_bias=self._allocate(spec.hidden_size) if spec.mlp_bias else None,
        )

    def _matrix(self, size_in: int, size_out: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return self._allocate(size_in, size_out)
        return self._allocate(size_out, size_in).t()

    def _allocate(self, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.parameters.append(tensor)
        return tensor

    def rotary_table(self, num_positions: int, dtype: torch.dtype) -> torch.Tensor:
        """[positions, D]: cosines of each position's angles, then sines; the angles in float32 as in transformers."""
        frequencies = torch.tensor(self.spec.rope_frequencies, dtype=torch.float32, device=self.device)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32, device=self.device), frequencies)
        table = torch.empty(num_positions, self.spec.head_size, dtype=dtype, device=self.device)
        table[:, : frequencies.numel()] = angles.cos() * self.spec.rope_factor
        table[:, frequencies.numel() :] = angles.sin() * self.spec.rope_factor
        return table


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _add_linear(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    total.addmm_(x, weight)
    if bias is not None:
        total.add_(bias)


def _split(
    prefix: str, rows: dict[str, int], weight: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Views of a fused [in, out] matrix and its bias, as the named [rows, in] matrices and [rows] biases."""
    sizes = list(rows.values())
    views = dict(zip((f"{prefix}.{name}.weight" for name in rows), weight.t().split(sizes), strict=True))
    if bias is not None:
        views |= zip((f"{prefix}.{name}.bias" for name in rows), bias.split(sizes), strict=True)
    return views
