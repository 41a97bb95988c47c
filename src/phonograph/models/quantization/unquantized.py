"""Weights in the type of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A matrix in the type of the model.

    Attributes:
        matrix_IO: [inputs, outputs]. In memory the rows are outputs on a GPU and inputs on a CPU, whose library
            multiplies 4 to 32 tokens faster so.
    """

    matrix_IO: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        inputs, outputs = self.matrix_IO.shape
        return inputs, outputs

    @property
    def device(self) -> torch.device:
        return self.matrix_IO.device

    @property
    def operand(self) -> torch.Tensor:
        return self.matrix_IO.t()

    def product(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        return torch.mm(x_TI, self.matrix_IO) if bias_O is None else torch.addmm(bias_O, x_TI, self.matrix_IO)

    def add_product(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None, hidden_TO: torch.Tensor) -> None:
        hidden_TO.addmm_(x_TI, self.matrix_IO)
        if bias_O is not None:
            hidden_TO.add_(bias_O)

    def rows(self, first: int, last: int) -> DenseWeight:
        return DenseWeight(self.matrix_IO[:, first:last])

    def draw(self, std: float, generator: torch.Generator) -> None:
        self.matrix_IO.t().normal_(0.0, std, generator=generator)
