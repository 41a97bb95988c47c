"""Tensors of a checkpoint that have the matrices of all experts of a layer.

Shapes: X experts, O outputs of an expert, I inputs. In memory the rows of a matrix are [X * O, ...].
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_WEIGHT = "weight"


class ExpertTensors(NamedTuple):
    """Layout of tensors [X, O, ...]. Each has a kind: "weight" and "bias", or those of a quantized format.

    Attributes:
        num_experts: X.
        input_major: tensors of the kind "weight" are [X, I, O].
        interleaved: outputs of the two halves of an expert's matrix lie in turn: gate, up, gate, up.
        bare: weights have the name of their module, and other kinds follow it behind "_"; otherwise kinds follow ".".
    """

    num_experts: int
    input_major: bool = False
    interleaved: bool = False
    bare: bool = False

    def name(self, module: str, kind: str) -> str:
        """Return the name of a tensor of a module."""
        if not self.bare:
            return f"{module}.{kind}"
        return module if kind == _WEIGHT else f"{module}_{kind}"

    def shape(self, kind: str, rows_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in a checkpoint of a tensor whose rows are [X * O, ...]."""
        num_rows, *rest = rows_shape
        sizes = num_rows // self.num_experts, *rest
        return self.num_experts, *(reversed(sizes) if self.input_major and kind == _WEIGHT else sizes)

    def rows(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a checkpoint as rows of the matrix."""
        by_expert = tensor.transpose(1, 2) if self.input_major and kind == _WEIGHT else tensor
        if self.interleaved:
            by_expert = by_expert.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return by_expert.flatten(0, 1)

    def view(self, kind: str, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the matrix in the memory that they have, with numbers in the order of the checkpoint.

        Interleaved halves have a dimension more than in the checkpoint.
        """
        by_expert = rows.unflatten(0, (self.num_experts, -1))
        if self.interleaved:
            by_expert = by_expert.unflatten(1, (2, -1)).transpose(1, 2)
        return by_expert.movedim(-1, 1) if self.input_major and kind == _WEIGHT else by_expert
