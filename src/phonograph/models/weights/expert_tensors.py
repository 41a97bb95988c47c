"""Tensors of a checkpoint that have the matrices of all experts of a layer.

Shapes: X experts, O outputs of an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class ExpertTensors(NamedTuple):
    """Layout of tensors [X, O, ...], in which experts and outputs have the order of the matrix.

    Attributes:
        num_experts: X.
    """

    num_experts: int

    def shape(self, rows_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in a checkpoint of a tensor whose rows are [X * O, ...]."""
        num_rows, *rest = rows_shape
        return self.num_experts, num_rows // self.num_experts, *rest

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a checkpoint as rows of the matrix."""
        return tensor.flatten(0, 1)

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the matrix in the layout of the checkpoint, in the same memory."""
        return rows.unflatten(0, (self.num_experts, -1))
