"""The static memory of a step on a GPU: every intermediate of the decoder, sized for the largest step.

All graphs share it, so what graphs need beside their lists of nodes is known before anything runs.

Shapes: T tokens, N rows that need logits, H query heads, K KV heads, D head size, E hidden size, I intermediate size, V
vocabulary, F = (H + 2K) * D (H * D for the attention's output).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from phonograph.models.spec import DTYPE_BYTES, ModelSpec


@dataclass(slots=True, kw_only=True)
class Workspace:
    """Intermediates of a step of T tokens with N rows of logits. `logits_NV` is what all graphs leave for sampling."""

    hidden_TE: torch.Tensor
    normed_TE: torch.Tensor
    qkv_TF: torch.Tensor
    attention_TF: torch.Tensor
    gate_up_T2I: torch.Tensor
    inner_TI: torch.Tensor
    rows_NE: torch.Tensor
    logits_NV: torch.Tensor

    @staticmethod
    def shapes(spec: ModelSpec, num_tokens: int, num_logits: int) -> dict[str, tuple[int, int]]:
        q_size, kv_size = spec.num_query_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        return {
            "hidden_TE": (num_tokens, spec.hidden_size),
            "normed_TE": (num_tokens, spec.hidden_size),
            "qkv_TF": (num_tokens, q_size + 2 * kv_size),
            "attention_TF": (num_tokens, q_size),
            "gate_up_T2I": (num_tokens, 2 * spec.intermediate_size),
            "inner_TI": (num_tokens, spec.intermediate_size),
            "rows_NE": (num_logits, spec.hidden_size),
            "logits_NV": (num_logits, spec.vocab_size),
        }

    @classmethod
    def make(
        cls, spec: ModelSpec, num_tokens: int, num_logits: int, dtype: torch.dtype, device: torch.device
    ) -> Workspace:
        shapes = cls.shapes(spec, num_tokens, num_logits)
        return cls(**{name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()})

    @classmethod
    def nbytes(cls, spec: ModelSpec, num_tokens: int, num_logits: int, dtype: str) -> int:
        shapes = cls.shapes(spec, num_tokens, num_logits).values()
        return sum(rows * width for rows, width in shapes) * DTYPE_BYTES[dtype]

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in fields(self)]
