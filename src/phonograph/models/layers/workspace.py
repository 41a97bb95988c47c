"""Static memory of a step on a GPU: every intermediate of the decoder, sized for the largest step.

All graphs share it, so their memory is known before anything runs. Attention's intermediates and the MLP's share one
place, because they are never live together; the gated activation replaces the gates.

Shapes: T tokens, N rows that need logits, H query heads, K KV heads, D head size, E hidden size, I intermediate size, V
vocabulary, F = (H + 2K) * D (H * D for the attention's output).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from phonograph.models.spec import DTYPE_BYTES, ModelSpec


@dataclass(slots=True, kw_only=True)
class Workspace:
    """Intermediates of a step of T tokens with N rows of logits. Sampling reads `logits_NV`.

    `dequantized` has the numbers of one quantized matrix, for the product that follows.
    """

    hidden_TE: torch.Tensor
    normed_TE: torch.Tensor
    qkv_TF: torch.Tensor
    attention_TF: torch.Tensor
    gate_up_T2I: torch.Tensor
    inner_TI: torch.Tensor
    rows_NE: torch.Tensor
    logits_NV: torch.Tensor
    dequantized: torch.Tensor

    @classmethod
    def make(
        cls, spec: ModelSpec, num_tokens: int, num_logits: int, dtype: torch.dtype, device: torch.device
    ) -> Workspace:
        qkv, attention, gate_up = _widths(spec)
        shapes = cls._shapes(spec, num_tokens, num_logits)
        made = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        shared = made["shared"].view(-1)
        gate_up_T2I = shared[: num_tokens * gate_up].view(num_tokens, gate_up)
        return cls(
            hidden_TE=made["hidden"],
            normed_TE=made["normed"],
            qkv_TF=shared[: num_tokens * qkv].view(num_tokens, qkv),
            attention_TF=shared[num_tokens * qkv :][: num_tokens * attention].view(num_tokens, attention),
            gate_up_T2I=gate_up_T2I,
            inner_TI=gate_up_T2I[:, : spec.intermediate_size],
            rows_NE=made["rows"],
            logits_NV=made["logits"],
            dequantized=made["dequantized"].view(-1),
        )

    @classmethod
    def nbytes(cls, spec: ModelSpec, num_tokens: int, num_logits: int, dtype: str) -> int:
        shapes = cls._shapes(spec, num_tokens, num_logits).values()
        return sum(rows * width for rows, width in shapes) * DTYPE_BYTES[dtype]

    @staticmethod
    def _shapes(spec: ModelSpec, num_tokens: int, num_logits: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of the allocations; "shared" serves attention and the MLP."""
        qkv, attention, gate_up = _widths(spec)
        return {
            "hidden": (num_tokens, spec.hidden_size),
            "normed": (num_tokens, spec.hidden_size),
            "shared": (num_tokens, max(qkv + attention, gate_up)),
            "rows": (num_logits, spec.hidden_size),
            "logits": (num_logits, spec.vocab_size),
            "dequantized": (1, _largest_matrix(spec) if spec.quantization is not None else 0),
        }

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


def _widths(spec: ModelSpec) -> tuple[int, int, int]:
    """Return the widths of the fused projection, of the attention's output, and of gates and up of the MLP."""
    q_size, kv_size = spec.num_query_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    return q_size + 2 * kv_size, q_size, 2 * spec.intermediate_size


def _largest_matrix(spec: ModelSpec) -> int:
    """Return the numbers of the largest fused matrix of a layer."""
    qkv, attention, gate_up = _widths(spec)
    return spec.hidden_size * max(qkv, attention, gate_up)
