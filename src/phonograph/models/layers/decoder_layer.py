"""One layer of a decoder: its weights, and the places of a checkpoint's tensors in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.models.layers.linear import Linear, NormedLinear, WeightAllocator
from phonograph.models.spec import LayerMatrix, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHeads:
    """Heads of one layer, and their norm before attention.

    Attributes:
        qk_norm: [H + K, D], the query norm's weight for each query head, then the key norm's for each KV head; or None.
    """

    layer: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    qk_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Weights of one layer. Query, key and value are one matrix with (H + 2K) * D outputs; gate and up are another."""

    qkv: NormedLinear
    heads: AttentionHeads
    output: Linear
    gate_up: NormedLinear
    down: Linear

    @classmethod
    def make(cls, spec: ModelSpec, index: int, allocate: WeightAllocator) -> DecoderLayer:
        qkv_matrix, output_matrix, gate_up_matrix, down_matrix = spec.matrices(index)
        # Dummy weights are drawn in the order of allocation.
        input_norm = allocate.tensor(spec.hidden_size)
        qkv = _linear(spec, qkv_matrix, allocate)
        qk_norm = None
        if spec.qk_norm:
            qk_norm = allocate.tensor(spec.num_query_heads + spec.num_kv_heads, spec.head_size)
        output = _linear(spec, output_matrix, allocate)
        mlp_norm = allocate.tensor(spec.hidden_size)
        gate_up = _linear(spec, gate_up_matrix, allocate)
        down = _linear(spec, down_matrix, allocate)
        return cls(
            qkv=NormedLinear(input_norm, qkv),
            heads=AttentionHeads(
                layer=index,
                num_query_heads=spec.num_query_heads,
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                qk_norm=qk_norm,
            ),
            output=output,
            gate_up=NormedLinear(mlp_norm, gate_up),
            down=down,
        )

    def checkpoint_views(self, spec: ModelSpec) -> dict[str, torch.Tensor]:
        """Return the destination of each tensor of a checkpoint by its name: a view of the fused weights."""
        prefix = f"model.layers.{self.heads.layer}"
        attention = f"{prefix}.self_attn"
        views = {
            f"{prefix}.input_layernorm.weight": self.qkv.norm_I,
            f"{prefix}.post_attention_layernorm.weight": self.gate_up.norm_I,
        }
        for linear, part_prefix, outputs in self.matrices(spec):
            views |= linear.checkpoint_views(part_prefix, outputs)
        if self.heads.qk_norm is not None:
            views[f"{attention}.q_norm.weight"] = self.heads.qk_norm[: spec.num_query_heads]
            views[f"{attention}.k_norm.weight"] = self.heads.qk_norm[spec.num_query_heads :]
        return views

    def matrices(self, spec: ModelSpec) -> list[tuple[Linear, str, dict[str, int]]]:
        """Return the matrices, each with the prefix of its names in a checkpoint and the outputs of its parts."""
        linears = self.qkv.linear, self.output, self.gate_up.linear, self.down
        matrices = spec.matrices(self.heads.layer)
        return [(linear, matrix.prefix, matrix.parts) for linear, matrix in zip(linears, matrices, strict=True)]


def _linear(spec: ModelSpec, matrix: LayerMatrix, allocate: WeightAllocator) -> Linear:
    scheme = spec.matrix_scheme(matrix)
    return allocate.linear(matrix.inputs, sum(matrix.parts.values()), bias=matrix.bias, scheme=scheme)
