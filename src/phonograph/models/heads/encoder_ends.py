"""Weights of the beginning and the end of a model that generates nothing; see `pooler_spec`.

The pooler's stages run by torch's operators in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn import functional

from phonograph.errors import WeightError
from phonograph.models.heads.pooler_spec import InputEmbedding, PoolerStage
from phonograph.models.layers.linear import WeightAllocator, norm_views

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputWeights:
    """Tables beside the embeddings of tokens, [P, E] and [types, E] or None, and the norm of the sum or None."""

    spec: InputEmbedding
    positions_PE: torch.Tensor | None
    token_types_XE: torch.Tensor | None
    norm: torch.Tensor | None

    @classmethod
    def make(cls, spec: InputEmbedding, hidden_size: int, allocate: WeightAllocator) -> InputWeights:
        """Allocate the weights without contents."""
        return cls(
            spec=spec,
            positions_PE=allocate.tensor(spec.positions, hidden_size) if spec.positions else None,
            token_types_XE=allocate.tensor(spec.token_types, hidden_size) if spec.token_types else None,
            norm=allocate.norm(hidden_size) if spec.norm else None,
        )

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Return the destination of each tensor of a checkpoint by its name in the model."""
        tables = (("positions", self.positions_PE), ("token_types", self.token_types_XE))
        views = {f"{name}.weight": table for name, table in tables if table is not None}
        return views if self.norm is None else {**views, **norm_views("embed_norm", self.norm)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights:
    """Weights of a stage, float32; `norm_2O` has the weight and the bias of the norm."""

    spec: PoolerStage
    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    norm_2O: torch.Tensor | None

    @classmethod
    def make(cls, spec: PoolerStage, allocate: WeightAllocator) -> StageWeights:
        """Allocate the weights without contents."""
        size = spec.num_outputs
        return cls(
            spec=spec,
            weight_OI=allocate.tensor(size, spec.num_inputs, dtype=torch.float32),
            bias_O=allocate.tensor(size, dtype=torch.float32) if spec.bias else None,
            norm_2O=allocate.layer_norm(size, dtype=torch.float32, bias=False) if spec.norm else None,
        )

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Return the destination of each tensor by its name."""
        views = {f"{self.spec.name}.weight": self.weight_OI}
        if self.bias_O is not None:
            views[f"{self.spec.name}.bias"] = self.bias_O
        if self.norm_2O is not None:
            views[f"{self.spec.norm}.weight"] = self.norm_2O[0]
        return views

    def read_rows(self, files: Iterable[Path]) -> torch.Tensor:
        """Return the weight [O, I] of a classifier made of rows of the head, float32. Reads no other rows.

        Raises:
            WeightError: the files have no head of this width in 16 or 32 bits.
        """
        rows = self.spec.rows
        assert rows is not None, "the stage has a weight of its own"
        for file in files:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    if not name.endswith(rows.source):
                        continue
                    matrix = tensors.get_slice(name)
                    found = torch.cat([matrix[token : token + 1] for token in rows.token_ids])
                    if not found.is_floating_point() or found.itemsize < 2 or found.shape[1] != self.spec.num_inputs:
                        problem = f"is {str(found.dtype).removeprefix('torch.')} of {found.shape[1]} columns; expected "
                        problem += f"16 or 32 bits and {self.spec.num_inputs}"
                        raise WeightError(f"tensor {name} in {file} {problem}")
                    found = found.float()
                    return found if self.spec.num_outputs == len(rows.token_ids) else found[1:] - found[:1]
        raise WeightError(f"no file has {rows.source}, whose rows are the classifier; is tie_word_embeddings right?")

    def __call__(self, rows_NI: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the rows [N, O] of the stage."""
        rows_NO = functional.linear(rows_NI, self.weight_OI, self.bias_O)
        if self.spec.activation != "none":
            rows_NO = _ACTIVATIONS[self.spec.activation](rows_NO)
        if self.norm_2O is not None:
            rows_NO = functional.layer_norm(rows_NO, rows_NO.shape[-1:], *self.norm_2O, eps=eps)
        return rows_NO
