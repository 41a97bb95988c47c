"""Cuts of a model's matrices for ranks: the outputs or inputs of a rank, and its part of each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, cycle
from typing import NamedTuple

import torch

from phonograph.errors import UnsupportedModelError, WeightError
from phonograph.models.layer_spec import LayerAttention
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.layers.states.state_cuts import Ranges


class TensorCut(NamedTuple):
    """A rank's part of a tensor.

    Attributes:
        whole: shape of the tensor in the checkpoint.
        dim: the dimension that is cut; None for none.
        ranges: what the rank has of it.
        zero: the rank has zeros in its place: the bias of a sum, which rank 0 adds.
        sizes: of a tensor with the sizes of a matrix: the whole ones, and those of the rank.
    """

    whole: tuple[int, ...]
    dim: int | None = None
    ranges: Ranges = ()
    zero: bool = False
    sizes: tuple[list[int], list[int]] | None = None

    def of(self, tensor: torch.Tensor, block: int = 1) -> torch.Tensor:
        """Return the rank's part: of one range a view, so that no other part of a mapped file is read.

        Args:
            tensor: in the checkpoint. A dimension that is cut may have bytes of blocks in place of numbers.
            block: numbers of a block.

        Raises:
            WeightError: the part begins or ends inside a block.
        """
        if self.zero:
            return torch.zeros_like(tensor)
        if self.sizes is not None and tensor.tolist() == self.sizes[0]:
            return tensor.new_tensor(self.sizes[1])
        if self.dim is None:
            return tensor
        size, own_size = self.whole[self.dim], tensor.shape[self.dim]
        if self.dim and own_size != size and any(place % block for span in self.ranges for place in span):
            raise WeightError(f"a part of {self.ranges[0]} of {size} is not of whole blocks of {block}")
        places = [(first * own_size // size, last * own_size // size) for first, last in self.ranges]
        parts = [tensor.narrow(self.dim, first, last - first) for first, last in places]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def qkv_ranges(whole: LayerAttention, rank: int, num_ranks: int) -> Ranges:
    """Return the outputs of a rank's query, key and value heads in the whole matrix."""
    size, kv_heads = whole.head_size, max(1, whole.num_kv_heads // num_ranks)
    # A gate follows each query.
    queries = (1 + whole.gated) * whole.num_query_heads
    first = rank * whole.num_kv_heads // num_ranks
    blocks = [(0, rank * queries // num_ranks, queries // num_ranks)]
    starts = range(queries, whole.qkv.num_outputs // size, whole.num_kv_heads)
    blocks += [(start, first, kv_heads) for start in starts]
    return tuple(((start + head) * size, (start + head + count) * size) for start, head, count in blocks)


def gate_up_ranges(whole: LayerMatrix, inner: int, rank: int, num_ranks: int) -> Ranges:
    """Return the outputs of a rank's gates and ups in the whole matrix of one expert, in the order of a checkpoint."""
    count = inner // num_ranks
    if not whole.gated:
        return ((rank * count, (rank + 1) * count),)
    if whole.fused is not None and whole.fused.interleaved:
        return ((2 * rank * count, 2 * (rank + 1) * count),)
    return tuple((half + rank * count, half + (rank + 1) * count) for half in (0, inner))


def part_ranges(whole: LayerMatrix, ranges: Ranges) -> list[Ranges]:
    """Return the ranges of each part of a matrix."""
    ends = [*accumulate(part.num_outputs for part in whole.parts)]
    return [_within(ranges, first, last) for first, last in zip([0, *ends], ends, strict=False)]


def _within(ranges: Ranges, first: int, last: int) -> Ranges:
    """Return the ranges inside a part of a matrix, from its beginning."""
    cut = ((max(start, first) - first, min(end, last) - first) for start, end in ranges)
    return tuple((start, end) for start, end in cut if start < end)


def matrix_cuts(whole: LayerMatrix, cut: LayerMatrix, ranges: Ranges) -> Iterator[tuple[str, str, TensorCut]]:
    """Yield name in the layer, kind and cut of each tensor of a matrix.

    Raises:
        UnsupportedModelError: the format has no matrix of the cut sizes.
    """
    by_part = [ranges] * len(whole.parts) if cut.partial else part_ranges(whole, ranges)
    projections = zip(
        whole.projections(), cut.projections(), cycle(zip(whole.parts, by_part, strict=True)), strict=False
    )
    for (name, part), (_, own), (one, spans) in projections:
        size = whole.num_inputs if cut.partial else one.num_outputs
        own_shapes = _shapes(cut, own)
        for kind, shape in _shapes(whole, part).items():
            if kind not in own_shapes:  # of a matrix that is dequantized
                continue
            found = _cut_dim(shape, own_shapes[kind], size, spans)
            if kind == "weight_shape":
                sizes = [part.num_outputs, whole.num_inputs], [own.num_outputs, cut.num_inputs]
                found = found._replace(sizes=sizes)
            yield whole.tensor_name(name, kind), kind, found


def _shapes(matrix: LayerMatrix, part: MatrixPart) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a projection's tensors in a checkpoint, by kind."""
    shapes: dict[str, tuple[int, ...]] = {"weight": (part.num_outputs, matrix.num_inputs)}
    if part.scheme is not None:
        stored = part.scheme.stored(part.num_outputs, matrix.num_inputs)
        shapes = {kind: one.shape for kind, one in stored.items()}
    if matrix.bias:
        shapes["bias"] = (part.num_outputs,)
    fused = matrix.fused
    return shapes if fused is None else {kind: fused.shape(kind, shape) for kind, shape in shapes.items()}


def _cut_dim(whole: tuple[int, ...], cut: tuple[int, ...], size: int, ranges: Ranges) -> TensorCut:
    """Return the part of a tensor whose shape differs in one dimension.

    Args:
        whole: shape in the checkpoint.
        cut: shape for a rank.
        size: outputs or inputs of the checkpoint's projection, of which the dimension has one in a few.
        ranges: the rank's outputs or inputs.

    Raises:
        UnsupportedModelError: the ranges begin or end inside a word of the dimension.
    """
    dims = [dim for dim, sizes in enumerate(zip(whole, cut, strict=True)) if sizes[0] != sizes[1]]
    if not dims:
        return TensorCut(whole)
    (dim,) = dims
    places = [(first * whole[dim], last * whole[dim]) for first, last in ranges]
    if any(place % size for span in places for place in span):
        raise UnsupportedModelError(f"the cut at {ranges[0][1]} of {size} is inside a packed word")
    return TensorCut(whole, dim, tuple((first // size, last // size) for first, last in places))
