"""One layer of a decoder: its weights, and the places of a checkpoint's tensors in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.models.layers.linear import Linear, NormedLinear, WeightAllocator
from phonograph.models.spec import ModelSpec


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
        q_size, kv_size = spec.num_query_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        num_rotated_heads = spec.num_query_heads + spec.num_kv_heads
        # Dummy weights are drawn in the order of allocation.
        input_norm = allocate.tensor(spec.hidden_size)
        qkv = allocate.linear(spec.hidden_size, q_size + 2 * kv_size, bias=spec.qkv_bias)
        qk_norm = allocate.tensor(num_rotated_heads, spec.head_size) if spec.qk_norm else None
        output = allocate.linear(q_size, spec.hidden_size, bias=spec.o_bias)
        mlp_norm = allocate.tensor(spec.hidden_size)
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
            gate_up=NormedLinear(
                mlp_norm, allocate.linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
            ),
            down=allocate.linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias),
        )

    def checkpoint_views(self, spec: ModelSpec) -> dict[str, torch.Tensor]:
        """Return the destination of each tensor of a checkpoint by its name: a view of the fused weights."""
        prefix = f"model.layers.{self.heads.layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_rows, kv_rows = spec.num_query_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        views = {
            f"{prefix}.input_layernorm.weight": self.qkv.norm_I,
            f"{prefix}.post_attention_layernorm.weight": self.gate_up.norm_I,
        }
        qkv_rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        gate_up_rows = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        views |= self.qkv.linear.checkpoint_views(attention, qkv_rows)
        views |= self.output.checkpoint_views(attention, {"o_proj": spec.hidden_size})
        views |= self.gate_up.linear.checkpoint_views(mlp, gate_up_rows)
        views |= self.down.checkpoint_views(mlp, {"down_proj": spec.hidden_size})
        if self.heads.qk_norm is not None:
            views[f"{attention}.q_norm.weight"] = self.heads.qk_norm[: spec.num_query_heads]
            views[f"{attention}.k_norm.weight"] = self.heads.qk_norm[spec.num_query_heads :]
        return views
