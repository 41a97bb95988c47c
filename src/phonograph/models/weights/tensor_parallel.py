"""Tensor parallelism: the smaller model of a rank.

A rank has a part of the heads, of the feed-forward's inner size and of the vocabulary. Queries, keys, values, gates and
ups are cut by their outputs, the products that follow them by their inputs; the sum of these over the ranks is the
output. Layers with a state are cut by heads (`state_cuts`). KV heads are repeated where there are fewer than ranks. All
ranks have equal sizes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from phonograph.errors import ConfigError, UnsupportedModelError
from phonograph.models.layer_spec import FeedForward, LayerAttention, LayerFeedForward, LayerSpec
from phonograph.models.layers.expert_spec import LayerExperts
from phonograph.models.layers.layer_matrix import LayerMatrix
from phonograph.models.layers.states.state_cuts import Ranges, state_part
from phonograph.models.layers.states.state_mixer import StateMixer
from phonograph.models.quantization.float8 import Fp8
from phonograph.models.quantization.gguf_blocks import BLOCK_TYPES, GgufBlocks
from phonograph.models.quantization.grouped_weight import GroupedScheme
from phonograph.models.quantization.scheme import Scheme
from phonograph.models.spec import ModelSpec
from phonograph.models.weights.tensor_cuts import gate_up_ranges, matrix_cuts, part_ranges, qkv_ranges

SETTING = "tensor_parallel_size"
_MOST_RANKS = 64


class _Uncut(Exception):
    """A model cannot be cut; the message has the layer and the size."""


def cut_model(model: ModelSpec, num_ranks: int) -> ModelSpec:
    """Return the model of one of `num_ranks` ranks. Its `vocab_size` is whole; its embedding and head have fewer rows.

    Raises:
        ConfigError: a size cannot be cut, or a part of the model has no rule; the message has the ranks that work.
    """
    if num_ranks == 1:
        return model
    try:
        return _cut(model, num_ranks)
    except _Uncut as error:
        works = " or ".join(str(count) for count in range(1, _MOST_RANKS + 1) if _can_cut(model, count))
        raise ConfigError(SETTING, num_ranks, f"{error}; {works} works") from None


def _can_cut(model: ModelSpec, num_ranks: int) -> bool:
    try:
        return num_ranks == 1 or _cut(model, num_ranks) is not model
    except _Uncut:
        return False


def _cut(model: ModelSpec, num_ranks: int) -> ModelSpec:
    if model.pooler is not None or model.input is not None or model.norms.after_sum:
        raise _Uncut("models that pool and encoders have no rule for several ranks yet")
    equal: dict[LayerSpec, LayerSpec] = {}
    for index, layer in enumerate(model.layers):
        if layer not in equal:
            equal[layer] = _cut_layer(layer, f"layer {index}", num_ranks)
    head = model.head
    rows = -(-model.vocab_size // num_ranks)
    head = replace(head, parts=tuple(part._replace(num_outputs=rows) for part in head.parts))
    return replace(model, layers=tuple(equal[layer] for layer in model.layers), head=head)


def _cut_layer(layer: LayerSpec, name: str, num_ranks: int) -> LayerSpec:
    mixer = layer.mixer
    if isinstance(mixer, LayerAttention):
        mixer = _cut_attention(mixer, name, num_ranks)
    elif mixer is not None:
        mixer = _cut_state(mixer, name, num_ranks)
    beside = None if layer.beside is None else _cut_state(layer.beside, name, num_ranks)
    feed_forward = None if layer.feed_forward is None else _cut_feed_forward(layer.feed_forward, name, num_ranks)
    return replace(layer, mixer=mixer, beside=beside, feed_forward=feed_forward)


def _cut_state(whole: StateMixer, name: str, num_ranks: int) -> StateMixer:
    try:
        part = state_part(whole, 0, num_ranks)
    except ValueError as error:
        raise _Uncut(f"{name}: {whole.name} has {error}") from None
    *projections, output = whole.matrices
    matrices = [_with_outputs(*pair, name) for pair in zip(projections, part.projections, strict=True)]
    return part.cut(whole, [*matrices, _with_inputs(output, output.num_inputs // num_ranks, name)])


def _cut_attention(whole: LayerAttention, name: str, num_ranks: int) -> LayerAttention:
    num_query_heads = _share(name, "{} query heads", whole.num_query_heads, num_ranks)
    if whole.num_kv_heads % num_ranks and num_ranks % whole.num_kv_heads:
        raise _Uncut(f"{name} has {whole.num_kv_heads} KV heads, neither a multiple nor a divisor of {num_ranks}")
    num_kv_heads = max(1, whole.num_kv_heads // num_ranks)
    size = whole.head_size
    return replace(
        whole,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        qkv=_with_outputs(whole.qkv, qkv_ranges(whole, 0, num_ranks), name),
        output=_with_inputs(whole.output, num_query_heads * size, name),
    )


def _cut_feed_forward(whole: FeedForward, name: str, num_ranks: int) -> FeedForward:
    assert isinstance(whole, LayerFeedForward | LayerExperts)
    what = "an inner size of {}" if isinstance(whole, LayerFeedForward) else "experts of an inner size of {}"
    inner = _share(name, what, whole.down.num_inputs, num_ranks)
    ranges = gate_up_ranges(whole.gate_up, whole.down.num_inputs, 0, num_ranks)
    down = _in_order(whole.down) if _can_permute(whole, inner) else whole.down
    gate_up, down = _with_outputs(whole.gate_up, ranges, name), _with_inputs(down, inner, name)
    if isinstance(whole, LayerFeedForward):
        return replace(whole, gate_up=gate_up, down=down)
    shared = None if whole.shared is None else _cut_feed_forward(whole.shared, f"{name}, shared expert", num_ranks)
    assert shared is None or isinstance(shared, LayerFeedForward)
    return replace(whole, gate_up=gate_up, down=down, shared=shared)


def is_ordered(matrix: LayerMatrix) -> bool:
    """Return True if the inputs of each group are spread over the matrix."""
    return isinstance(matrix.scheme, GroupedScheme) and matrix.scheme.ordered


def _can_permute(whole: LayerFeedForward | LayerExperts, inner: int) -> bool:
    """Return True if `down` has an order of inputs, and ranks of an inner size can have gates and ups of its groups."""
    scheme = whole.down.scheme
    if not isinstance(scheme, GroupedScheme) or not scheme.ordered or scheme.group_size < 0 or whole.gate_up.bias:
        return False
    return inner % scheme.group_size == 0 and all(type(part.scheme) is type(scheme) for part in whole.gate_up.parts)


def _in_order(down: LayerMatrix) -> LayerMatrix:
    """Return the matrix with the inputs of each group next to each other."""
    assert isinstance(down.scheme, GroupedScheme)
    scheme = replace(down.scheme, ordered=False)
    return down.with_schemes(lambda _: scheme)


def _share(name: str, what: str, size: int, num_ranks: int) -> int:
    if size % num_ranks:
        raise _Uncut(f"{name} has {what.format(size)}, no multiple of {num_ranks}")
    return size // num_ranks


def _with_outputs(whole: LayerMatrix, ranges: Ranges, name: str) -> LayerMatrix:
    parts = [
        part._replace(num_outputs=sum(last - first for first, last in own))
        for part, own in zip(whole.parts, part_ranges(whole, ranges), strict=True)
    ]
    cut = replace(whole, parts=tuple(parts))
    _check_format(whole, cut, ranges, name)
    return cut


def _with_inputs(whole: LayerMatrix, num_inputs: int, name: str) -> LayerMatrix:
    parts = whole.parts
    if is_ordered(whole):
        # The inputs of a rank have parts of all groups, so that they are dequantized while they are loaded.
        parts = tuple(part._replace(scheme=None) for part in parts)
    cut = replace(whole, num_inputs=num_inputs, partial=True, parts=parts)
    _check_format(whole, cut, ((0, num_inputs),), name)
    return cut


def _check_format(whole: LayerMatrix, cut: LayerMatrix, ranges: Ranges, name: str) -> None:
    """Check that the weight format of a matrix can be cut there."""
    scheme, axis = whole.scheme, int(cut.partial)
    if scheme is None or cut.scheme is None:
        return
    where = f"{name}: {whole.path(whole.parts[0].name)} in {scheme.name}"
    unit = _unit(scheme, axis)
    if any(place % unit for span in ranges for place in span):
        size = ranges[0][1] - ranges[0][0]
        raise _Uncut(f"{where} is cut between groups of {unit} only, and {size} is no multiple of that")
    try:
        # All experts are alike.
        list(islice(matrix_cuts(whole, cut, ranges), len(whole.parts)))
    except UnsupportedModelError as error:
        raise _Uncut(f"{where}: {error}") from None


def _unit(scheme: Scheme, axis: int) -> int:
    """Return the outputs (axis 0) or inputs (1) that have a scale together."""
    if isinstance(scheme, Fp8) and scheme.scales == "block":
        return scheme.block[axis]
    if isinstance(scheme, GgufBlocks):
        return BLOCK_TYPES[scheme.kind].inputs if axis else 1
    return scheme.group_size if axis and isinstance(scheme, GroupedScheme) and scheme.group_size > 0 else 1
