"""Layers with weights: a matrix product, and the product of normed rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Linear:
    """Weights of a matrix product: x @ weight + bias.

    Attributes:
        weight_IO: [inputs, outputs]. In memory the rows are outputs on a GPU and inputs on a CPU, whose library
            multiplies 4 to 32 tokens faster so.
        bias_O: [outputs], or None.
    """

    weight_IO: torch.Tensor
    bias_O: torch.Tensor | None = None

    def checkpoint_views(self, prefix: str, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return views of the outputs by the names of a checkpoint: [size, inputs] matrices and [size] biases.

        Args:
            prefix: prefix of the names.
            sizes: outputs of each part of a fused matrix, in order.
        """
        counts = list(sizes.values())
        views = dict(zip((f"{prefix}.{name}.weight" for name in sizes), self.weight_IO.t().split(counts), strict=True))
        if self.bias_O is not None:
            views |= zip((f"{prefix}.{name}.bias" for name in sizes), self.bias_O.split(counts), strict=True)
        return views


@dataclass(frozen=True, slots=True)
class NormedLinear:
    """A matrix product of normed input: rms_norm(x) @ weight + bias. `norm_I` [inputs] has the weights of the norm."""

    norm_I: torch.Tensor
    linear: Linear


@dataclass(slots=True)
class WeightAllocator:
    """Allocator of a model's weights, without contents.

    `parameters` lists the weights in memory layout, all contiguous, in the order of allocation.
    """

    dtype: torch.dtype
    device: torch.device
    parameters: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def tensor(self, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.parameters.append(tensor)
        return tensor

    def matrix(self, size_in: int, size_out: int) -> torch.Tensor:
        """Return [size_in, size_out] in the memory layout of `Linear`."""
        if self.device.type == "cpu":
            return self.tensor(size_in, size_out)
        return self.tensor(size_out, size_in).t()

    def linear(self, size_in: int, size_out: int, *, bias: bool) -> Linear:
        return Linear(self.matrix(size_in, size_out), self.tensor(size_out) if bias else None)
