"""Parts of a checkpoint's tensors that a rank loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from phonograph.models.layer_spec import SINKS, FeedForward, LayerAttention, LayerFeedForward
from phonograph.models.layers.expert_spec import LayerExperts
from phonograph.models.layers.layer_matrix import LayerMatrix
from phonograph.models.layers.states.state_cuts import Ranges, state_part
from phonograph.models.layers.states.state_mixer import StateMixer
from phonograph.models.quantization.cpu_weights import dequantized
from phonograph.models.quantization.grouped_weight import GroupedScheme, GroupedWeight
from phonograph.models.quantization.scheme import Stored
from phonograph.models.spec import LAYERS, ModelSpec
from phonograph.models.weights.tensor_cuts import TensorCut, gate_up_ranges, matrix_cuts, qkv_ranges
from phonograph.models.weights.tensor_parallel import cut_model

_CutFeedForward = LayerFeedForward | LayerExperts


class DequantizedCut(NamedTuple):
    """A matrix in 4 or 8 bits whose part is in the model's type.

    Attributes:
        module: name in the checkpoint.
        whole: the matrix.
        first, last: inputs of the rank.
    """

    module: str
    whole: LayerMatrix
    first: int
    last: int

    def stored(self) -> dict[str, Stored]:
        """Return the tensors of the checkpoint by the ends of their names."""
        assert self.whole.scheme is not None
        return self.whole.scheme.stored(self.whole.num_outputs, self.whole.num_inputs)

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, torch.Tensor], into_OI: torch.Tensor) -> None:
        """Dequantize the tensors, and copy the inputs of the rank."""
        scheme, whole = self.whole.scheme, self.whole
        assert isinstance(scheme, GroupedScheme)

        def allocate(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype or torch.float32)

        weight = scheme.allocate(whole.num_outputs, whole.num_inputs, allocate)
        assert isinstance(weight, GroupedWeight)
        scheme.load(self.module, tensors, weight, 0)
        into_OI.copy_(dequantized(weight, torch.float32)[self.first : self.last].t())


class RankTensors:
    """Parts of a checkpoint's tensors that a rank loads.

    Attributes:
        whole: the model in the checkpoint.
        rank: the rank.
        num_ranks: number of ranks.
        cuts: by the names of tensors. Tensors without an entry are whole on every rank.
        dequantized: matrices that are quantized in the checkpoint and not on the rank.
    """

    def __init__(self, whole: ModelSpec, rank: int, num_ranks: int) -> None:
        self.cuts: dict[str, TensorCut] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        self.dequantized: list[DequantizedCut] = []
        self.whole, self.rank, self.num_ranks = whole, rank, num_ranks
        cut = cut_model(whole, num_ranks)
        for index, layer in enumerate(whole.layers):
            prefix, own = f"{LAYERS}.{index}.", cut.layers[index]
            if isinstance(layer.mixer, LayerAttention):
                self._add_attention(prefix, layer.mixer, own.attention)
            if layer.state is not None and own.state is not None:
                self._add_state(prefix, layer.state, own.state)
            for one, part in _feed_forwards(layer.feed_forward, own.feed_forward):
                outputs = gate_up_ranges(one.gate_up, one.down.num_inputs, rank, num_ranks)
                self._add(prefix, one.gate_up, part.gate_up, outputs)
                self._add(prefix, one.down, part.down, self._inputs(part.down))
        rows, size = cut.head.num_outputs, whole.vocab_size
        vocabulary = ((min(rank * rows, size), min((rank + 1) * rows, size)),)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            self.cuts[name] = TensorCut((size, whole.hidden_size), 0, vocabulary)

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a tensor in the checkpoint, whose part has `shape`."""
        cut = self.cuts.get(name)
        return shape if cut is None else cut.whole

    def whole_sizes(self, name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return outputs and inputs of a matrix, or the shape of another tensor, whose part has `sizes`."""
        return self._sizes.get(name) or self.whole_shape(name, sizes)

    def of(self, name: str, tensor: torch.Tensor, block: int = 1) -> torch.Tensor:
        """Return the rank's part of a tensor; see `TensorCut.of`."""
        cut = self.cuts.get(name)
        return tensor if cut is None else cut.of(tensor, block)

    def fitted(
        self, name: str, tensor: torch.Tensor, destination: torch.Tensor, block: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rank's part of a tensor, and its destination; the rest of a longer one becomes zero.

        The last ranks may have fewer tokens of the vocabulary than their rows.
        """
        part = self.of(name, tensor, block)
        if name in self.cuts and len(part) < len(destination):
            destination[len(part) :] = 0
            destination = destination[: len(part)]
        return part, destination

    def kv_heads(self, layer: int) -> slice:
        """Return the rank's KV heads of a layer."""
        num_heads = self.whole.layers[layer].attention.num_kv_heads
        first = self.rank * num_heads // self.num_ranks
        return slice(first, first + max(1, num_heads // self.num_ranks))

    def _add_attention(self, prefix: str, whole: LayerAttention, own: LayerAttention) -> None:
        ranges = qkv_ranges(whole, self.rank, self.num_ranks)
        self._add(prefix, whole.qkv, own.qkv, ranges)
        self._add(prefix, whole.output, own.output, self._inputs(own.output))
        if whole.joint_norms:
            queries, *keys = ranges
            for norm, first, spans in (("q_norm", 0, [queries]), ("k_norm", whole.num_query_heads, keys[:1])):
                start = first * whole.head_size
                size = (whole.num_key_heads if first else whole.num_query_heads) * whole.head_size
                own_spans = tuple((begin - start, end - start) for begin, end in spans)
                self.cuts[f"{prefix}self_attn.{norm}.weight"] = TensorCut((size,), 0, own_spans)
        if whole.sinks:
            heads = own.num_query_heads
            span = self.rank * heads, (self.rank + 1) * heads
            self.cuts[prefix + SINKS] = TensorCut((whole.num_query_heads,), 0, (span,))

    def _add_state(self, prefix: str, whole: StateMixer, own: StateMixer) -> None:
        part = state_part(whole, self.rank, self.num_ranks)
        for matrix, cut, ranges in zip(whole.matrices, own.matrices, (*part.projections, part.inputs), strict=True):
            self._add(prefix, matrix, cut, ranges)
        for name, shape in whole.other_shapes.items():
            if name in part.others:
                self.cuts[prefix + name] = TensorCut(shape, 0, part.others[name])

    def _inputs(self, cut: LayerMatrix) -> Ranges:
        return ((self.rank * cut.num_inputs, (self.rank + 1) * cut.num_inputs),)

    def _add(self, prefix: str, whole: LayerMatrix, cut: LayerMatrix, ranges: Ranges) -> None:
        for name, part in whole.projections():
            self._sizes[prefix + whole.tensor_name(name, "weight")] = part.num_outputs, whole.num_inputs
        if whole.scheme is not None and cut.scheme is None:
            ((name, _),) = whole.projections()
            self.dequantized.append(DequantizedCut(prefix + name, whole, *ranges[0]))
        for name, kind, found in matrix_cuts(whole, cut, ranges):
            self.cuts[prefix + name] = found._replace(zero=kind == "bias" and cut.partial and self.rank > 0)


def _feed_forwards(
    whole: FeedForward | None, cut: FeedForward | None
) -> Iterator[tuple[_CutFeedForward, _CutFeedForward]]:
    """Yield a feed-forward next to its cut, if there is one, and then a shared expert next to its cut."""
    if whole is None:
        return
    assert isinstance(whole, LayerFeedForward | LayerExperts) and isinstance(cut, LayerFeedForward | LayerExperts)
    yield whole, cut
    if isinstance(whole, LayerExperts) and isinstance(cut, LayerExperts) and whole.shared and cut.shared:
        yield whole.shared, cut.shared
