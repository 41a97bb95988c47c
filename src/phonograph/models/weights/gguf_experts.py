"""Tensors of GGUF files for the router, the experts and the shared expert of a layer.

A file has one tensor of all experts for gates, one for ups and one for outputs, whatever the names in transformers'
checkpoints are, and such tensors of biases. Each is a piece of a matrix of the model: some rows of each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from phonograph.models.layer_spec import LayerMatrix, LayerSpec
from phonograph.models.layers.expert_spec import LayerExperts
from phonograph.models.quantization.gguf_blocks import FLOATS, fused_schemes
from phonograph.models.quantization.mxfp4 import Mxfp4Scheme
from phonograph.models.quantization.scheme import Scheme


class ExpertPiece(NamedTuple):
    """Rows of a matrix that one tensor of a file has.

    Attributes:
        layer: index of the layer.
        place: place of the matrix in `LayerExperts.matrices`.
        matrix: the matrix.
        first: first row, in each expert.
        outputs: rows, of each expert.
        bias: the tensor has the biases of the rows, and no weights.
    """

    layer: int
    place: int
    matrix: LayerMatrix
    first: int
    outputs: int
    bias: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        experts = () if self.matrix.num_experts is None else (self.matrix.num_experts,)
        return *experts, self.outputs, *(() if self.bias else (self.matrix.num_inputs,))

    @property
    def module(self) -> str:
        """Name of the matrix's first projection in a checkpoint of transformers."""
        return f"model.layers.{self.layer}.{next(self.matrix.projections())[0]}"

    def part(self, whole: ExpertPiece, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a rank's part of a tensor, [experts, outputs, numbers or bytes of the inputs].

        Biases are [experts, outputs]; those of a sum over ranks are zeros in place of a view, but on rank 0.

        Args:
            whole: the piece of the file, of which this one is the rank's part.
            rank: the rank.
            tensor: numbers or bytes of the file.
        """
        rows = tensor.view(whole.matrix.num_experts or 1, whole.outputs, -1)
        sizes = (self.outputs, whole.outputs), (self.matrix.num_inputs, whole.matrix.num_inputs)
        if self.bias:
            rows, sizes = rows.squeeze(2), sizes[:1]
            rows = torch.zeros_like(rows) if rank and self.matrix.partial else rows
        for dim, (own, size) in enumerate(sizes, start=1):
            length = rows.shape[dim] * own // size
            rows = rows.narrow(dim, rank * length % rows.shape[dim], length)
        return rows


def expert_pieces(layers: Sequence[LayerSpec]) -> dict[str, ExpertPiece]:
    """Return the pieces by the names of their tensors, in the order of the matrices' rows."""
    return {
        f"blk.{index}.{name}.{kind}": ExpertPiece(index, place, matrix, first, outputs, kind == "bias")
        for index, layer in enumerate(layers)
        if isinstance(experts := layer.feed_forward, LayerExperts)
        for place, name, first, outputs in _pieces_of(experts)
        for matrix in (experts.matrices[place],)
        for kind in ("weight", "bias")[: 1 + matrix.bias]
    }


def expert_tensors(layers: Sequence[LayerSpec]) -> set[str]:
    """Return the names of the same weights and biases in checkpoints of transformers."""
    return {
        f"model.layers.{index}.{matrix.tensor_name(name, kind)}"
        for index, layer in enumerate(layers)
        if isinstance(layer.feed_forward, LayerExperts)
        for matrix in layer.feed_forward.matrices
        for name, _ in matrix.projections()
        for kind in ("weight", "bias")
    }


def expert_schemes(kinds: Mapping[str, str], layers: Sequence[LayerSpec]) -> dict[str, Scheme]:
    """Return the weight format of each projection of a matrix whose pieces are all in blocks.

    A matrix of experts whose pieces are all in MXFP4 has the format of gpt-oss's files.

    Args:
        kinds: types of the file's tensors by their names.
        layers: layers of the model.
    """
    matrices: dict[tuple[int, int], list[str]] = {}
    pieces = expert_pieces(layers)
    for name, piece in pieces.items():
        if not piece.bias:
            matrices.setdefault((piece.layer, piece.place), []).append(name)
    schemes: dict[str, Scheme] = {}
    for (layer, _), names in matrices.items():
        matrix = pieces[names[0]].matrix
        own_kinds = [kinds[name] for name in names if name in kinds]
        # Loading reports missing pieces.
        if not matrix.quantizable or len(own_kinds) < len(names) or not FLOATS.keys().isdisjoint(own_kinds):
            continue
        only_mxfp4 = matrix.num_experts is not None and {*own_kinds} == {"MXFP4"}
        by_kind = {"MXFP4": Mxfp4Scheme()} if only_mxfp4 else fused_schemes(own_kinds)
        for index, (name, _) in enumerate(matrix.projections()):
            schemes[f"model.layers.{layer}.{name}"] = by_kind[own_kinds[index % len(matrix.parts)]]
    return schemes


def _pieces_of(experts: LayerExperts) -> Iterator[tuple[int, str, int, int]]:
    """Yield the place of the matrix, the name of the tensor, and the first and the number of its rows."""
    num_experts = experts.routing.num_experts
    yield 0, "ffn_gate_inp", 0, num_experts
    if experts.shared_gate:
        yield 0, "ffn_gate_inp_shexp", num_experts, 1
    for place, end in ((1, "exps"), (3, "shexp")):
        if place < len(experts.matrices):
            half = experts.matrices[place].expert_outputs // 2
            yield place, f"ffn_gate_{end}", 0, half
            yield place, f"ffn_up_{end}", half, half
            yield place + 1, f"ffn_down_{end}", 0, experts.matrices[place + 1].expert_outputs
