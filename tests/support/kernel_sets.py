"""Models bound to a kernel set without an engine, and attention that a test can do without."""

from __future__ import annotations

import torch

from phonograph.kernels.ranks import Ranks
from phonograph.models.layers.kernel_set import KVTarget
from phonograph.models.layers.rotary import rotary_tables
from phonograph.models.layers.torch_parts import TorchKernels
from phonograph.models.transformer import Transformer


def bind_torch(model: Transformer, max_positions: int | None = None, ranks: Ranks | None = None) -> Transformer:
    """Let a model run on torch's operators, for positions up to its context length by default."""
    spec = model.spec
    table = rotary_tables(spec, max_positions or spec.context_length, model.dtype, model.device)
    model.bind(TorchKernels(table, spec.rms_norm_eps, spec.factors, ranks=ranks, vocab_size=spec.vocab_size))
    return model


class OwnQueries:
    """Attention whose output is the query. It writes no cache.

    layers: those that attended, in their order
    """

    def __init__(self, model: Transformer) -> None:
        self.layers: list[int] = []
        shapes = [(2, 1, 16, one.attention.num_kv_heads, one.attention.head_size) for one in model.spec.layers]
        self._caches = [torch.zeros(shape, dtype=model.dtype, device=model.device) for shape in shapes]
        self._slots = torch.full((1,), -1, dtype=torch.int64, device=model.device)

    def __call__(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor | None, v_TKD: torch.Tensor | None, layer: int
    ) -> torch.Tensor:
        self.layers.append(layer)
        return q_THD.contiguous()

    def kv_target(self, layer: int, num_tokens: int) -> KVTarget:
        return KVTarget(self._caches[layer], self._slots, None, None, clears_padding=True)

    def read(self, q_THD: torch.Tensor, layer: int, out_THD: torch.Tensor) -> None:
        self.layers.append(layer)
        out_THD.copy_(q_THD)
