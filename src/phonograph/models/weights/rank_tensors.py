"""Parts of a checkpoint's tensors that a rank loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from phonograph.models.layer_spec import SINKS, FeedForward, LayerAttention, LayerFeedForward
from phonograph.models.layers.expert_spec import LayerExperts
from phonograph.models.layers.layer_matrix import LayerMatrix
from phonograph.models.layers.states.state_cuts import Ranges, state_part
from phonograph.models.layers.states.state_mixer import StateMixer
from phonograph.models.quantization.cpu_weights import dequantized
from phonograph.models.quantization.grouped_weight import GroupedWeight
from phonograph.models.quantization.scheme import QuantizedModule, Scheme, Stored
from phonograph.models.spec import LAYERS, ModelSpec
from phonograph.models.weights.tensor_cuts import TensorCut, gate_up_ranges, matrix_cuts, qkv_ranges
from phonograph.models.weights.tensor_parallel import cut_model, is_ordered

_CutFeedForward = LayerFeedForward | LayerExperts


@dataclass(frozen=True)
class WholeProjection:
    """A projection in 4 or 8 bits that a rank reads whole, to take its part.

    Attributes:
        module: name in the checkpoint.
        scheme: its format.
        outputs, inputs: its sizes.
        first, last: range of the rank, of the inputs of `down` or of the attention's output.
    """

    module: str
    scheme: Scheme
    outputs: int
    inputs: int
    first: int
    last: int

    def stored(self) -> dict[str, Stored]:
        """Return the tensors of the checkpoint by the ends of their names."""
        return self.scheme.stored(self.outputs, self.inputs)

    def read(self, tensors: Mapping[str, torch.Tensor]) -> GroupedWeight:
        """Return the whole weight, with scales in float32."""

        def allocate(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype or torch.float32)

        weight = self.scheme.allocate(self.outputs, self.inputs, allocate)
        assert isinstance(weight, GroupedWeight)
        own = {end: tensors[name] for end in self.stored() if (name := f"{self.module}.{end}") in tensors}
        self.scheme.load(self.module, own, weight, 0)
        return weight


class DequantizedCut(WholeProjection):
    """A projection whose part is in the model's type."""

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, torch.Tensor], into_OI: torch.Tensor) -> None:
        """Dequantize the projection, and copy the inputs of the rank.

        Args:
            tensors: by their names in the checkpoint.
            into_OI: part of the rank.
        """
        into_OI.copy_(dequantized(self.read(tensors), torch.float32)[self.first : self.last].t())


@dataclass(frozen=True)
class PermutedCut(WholeProjection):
    """A projection of a feed-forward with an order of `down`'s inputs: a rank has some of its groups.

    Attributes:
        order: name of the tensor with the group of each input of `down`, which orders the outputs of gates and ups.
    """

    order: str

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, torch.Tensor], module: QuantizedModule) -> None:
        """Copy the range of the rank, in the order of the groups.

        Args:
            tensors: by their names in the checkpoint.
            module: part of the rank.
        """
        weight, whole, rows = module.weight, self.read(tensors).values, None
        assert isinstance(weight, GroupedWeight)
        down, _, end = self.order.rpartition(".")
        if self.module != down:
            order_I = torch.argsort(tensors[self.order], stable=True)
            # Gates and ups may be one projection.
            halves = range(0, self.outputs, len(order_I))
            rows = torch.cat([start + order_I[self.first : self.last] for start in halves])

        def part(columns: torch.Tensor, inputs: int) -> torch.Tensor:
            """Return the rank's outputs; or its columns, which have that many inputs each."""
            own = columns[:, self.first // inputs : self.last // inputs] if rows is None else columns[rows]
            return own.to(weight.device)

        weight.write_packed(module.first, part(whole.packed_OW, 32 // whole.bits))
        weight.write_scales(module.name, module.first, part(whole.scales_OG, whole.group))
        if whole.zeros_OG is not None:
            weight.write_zeros(module.first, part(whole.zeros_OG, whole.group))
        if weight.values.order_I is not None:
            weight.write_order(module.name, tensors[f"{self.module}.{end}"].to(weight.device))
        if module.loaded is not None:
            module.loaded()


class RankTensors:
    """Parts of a checkpoint's tensors that a rank loads.

    Attributes:
        whole: the model in the checkpoint.
        rank: the rank.
        num_ranks: number of ranks.
        cuts: by the names of tensors. Tensors without an entry are whole on every rank.
        dequantized: matrices that are quantized in the checkpoint and not on the rank.
        permuted: projections by their names whose part is in the order of the groups of `down`.
    """

    def __init__(self, whole: ModelSpec, rank: int, num_ranks: int) -> None:
        self.cuts: dict[str, TensorCut] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        self.dequantized: list[DequantizedCut] = []
        self.permuted: dict[str, PermutedCut] = {}
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
                if is_ordered(one.down) and part.down.scheme is not None:
                    self._permute(prefix, one, *self._inputs(part.down)[0])
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
            sizes = whole.num_outputs, whole.num_inputs
            self.dequantized.append(DequantizedCut(prefix + name, whole.scheme, *sizes, *ranges[0]))
        for name, kind, found in matrix_cuts(whole, cut, ranges):
            self.cuts[prefix + name] = found._replace(zero=kind == "bias" and cut.partial and self.rank > 0)

    def _permute(self, prefix: str, whole: _CutFeedForward, first: int, last: int) -> None:
        """Replace the cuts of a feed-forward whose `down` has an order of inputs; the rank has this range of it."""
        ((down, part),) = whole.down.projections()
        assert part.scheme is not None
        stored = part.scheme.stored(part.num_outputs, whole.down.num_inputs)
        order = next(f"{prefix}{down}.{end}" for end in stored if end.endswith("g_idx"))
        for matrix in (whole.gate_up, whole.down):
            for name, part in matrix.projections():
                assert part.scheme is not None
                sizes = part.num_outputs, matrix.num_inputs, first, last
                one = self.permuted[prefix + name] = PermutedCut(prefix + name, part.scheme, *sizes, order)
                for end in one.stored():
                    self.cuts.pop(f"{one.module}.{end}", None)


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
