"""Models bound to a kernel set without an engine, and attention that a test can do without."""

from __future__ import annotations

import torch

from phonograph.models.layers.kernel_set import KVTarget
from phonograph.models.layers.rotary import rotary_tables
from phonograph.models.layers.torch_parts import TorchKernels
from phonograph.models.transformer import Transformer


def bind_torch(model: Transformer, max_positions: int | None = None) -> Transformer:
    """Let a model run on torch's operators, for positions up to its context length by default."""
    table = rotary_tables(model.spec, max_positions or model.spec.context_length, model.dtype, model.device)
    model.bind(TorchKernels(table, model.spec.rms_norm_eps, model.spec.factors))
    return model


class OwnQueries:
    """Attention whose output is the query. It writes no cache.

    layers: those that attended, in their order
    """

    def __init__(self, model: Transformer) -> None:
        self.layers: list[int] = []
        spec = model.spec
        shape = (2, 1, 16, spec.num_kv_heads, spec.head_size)
        self._cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._slots = torch.full((1,), -1, dtype=torch.int64, device=model.device)

    def __call__(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: int) -> torch.Tensor:
        self.layers.append(layer)
        return q_THD.contiguous()

    def kv_target(self, layer: int, num_tokens: int) -> KVTarget:
        return KVTarget(self._cache, self._slots, None, None, clears_padding=True)

    def read(self, q_THD: torch.Tensor, layer: int, out_THD: torch.Tensor) -> None:
        self.layers.append(layer)
        out_THD.copy_(q_THD)
