"""Parts of mixers with a state for the ranks of tensor parallelism: some of the heads, or of the channels.

A part mixes as a whole mixer does: each head has its own state, and channels of the convolution do not read each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from phonograph.models.layers.layer_matrix import LayerMatrix
from phonograph.models.layers.states import gated_delta_net, mamba_mixer, short_conv
from phonograph.models.layers.states.gated_delta_net import GatedDeltaNet
from phonograph.models.layers.states.mamba_mixer import MambaMixer
from phonograph.models.layers.states.short_conv import ShortConv
from phonograph.models.layers.states.state_mixer import StateMixer

Ranges = tuple[tuple[int, int], ...]
"""First and last (exclusive) heads, outputs or inputs, in order."""


class StatePart(NamedTuple):
    """Part of a mixer that a rank has.

    Attributes:
        sizes: of its heads; None for a short convolution.
        projections: outputs of each matrix but the last.
        inputs: of the last matrix.
        others: rows of tensors that are no projections, by name in the layer; those that are not here are whole.
    """

    sizes: Any
    projections: tuple[Ranges, ...]
    inputs: Ranges
    others: Mapping[str, Ranges]

    def cut(self, mixer: StateMixer, matrices: Sequence[LayerMatrix]) -> StateMixer:
        """Return the mixer of this part, with the matrices that are cut."""
        *projections, output = matrices
        whole: Any = mixer
        if isinstance(whole, GatedDeltaNet):
            projection, gates = projections if len(projections) == 2 else (*projections, None)
            return replace(whole, sizes=self.sizes, projection=projection, gates=gates, output=output)
        if isinstance(whole, ShortConv):
            return replace(whole, projection=projections[0], output=output)
        joint_norm = whole.sizes.norm_groups > 0 and not self.sizes.norm_groups
        return replace(whole, sizes=self.sizes, projection=projections[0], output=output, joint_norm=joint_norm)


def state_part(mixer: StateMixer, rank: int, num_ranks: int) -> StatePart:
    """Return the part of a rank.

    Raises:
        ValueError: the mixer cannot be cut; the message says what it has.
    """
    if isinstance(mixer, GatedDeltaNet):
        return _delta_part(mixer, rank, num_ranks)
    if isinstance(mixer, MambaMixer):
        return _mamba_part(mixer, rank, num_ranks)
    assert isinstance(mixer, ShortConv)
    size = mixer.output.num_inputs
    channels = _share(size, rank, num_ranks, "channels")
    three = tuple(span for block in range(3) for span in _spans(channels, 1, block * size))
    return StatePart(None, (three,), channels, {short_conv.TAPS: channels, short_conv.BIAS: channels})


def _delta_part(mixer: GatedDeltaNet, rank: int, num_ranks: int) -> StatePart:
    sizes = mixer.sizes
    num_keys, num_values, key_size, value_size = sizes[:4]
    keys = _share(num_keys, rank, num_ranks, "heads of keys")
    values = _share(num_values, rank, num_ranks, "heads of values")
    if sizes.tiled:
        values = tuple(span for tile in range(num_values // num_keys) for span in _spans(keys, 1, tile * num_keys))
    channels = (
        *_spans(keys, key_size),
        *_spans(keys, key_size, num_keys * key_size),
        *_spans(values, value_size, 2 * num_keys * key_size),
    )
    if sizes.by_head:
        group = num_values // num_keys
        projections = _spans(keys, 2 * key_size + 2 * group * value_size), _spans(keys, 2 * group)
    else:
        gates = _spans(values, value_size, sizes.channels)
        projections = (*channels, *gates), (*values, *_spans(values, 1, num_values))
    if mixer.gates is None:
        mixed, rates_and_times = projections
        projections = ((*mixed, *_spans(rates_and_times, 1, sizes.channels + num_values * value_size)),)
    others = {gated_delta_net.TAPS: channels, gated_delta_net.DECAY: values, gated_delta_net.TIME_BIAS: values}
    part = sizes._replace(key_heads=num_keys // num_ranks, value_heads=num_values // num_ranks)
    return StatePart(part, projections, _spans(values, value_size), others)


def _mamba_part(mixer: MambaMixer, rank: int, num_ranks: int) -> StatePart:
    sizes = mixer.sizes
    heads = _share(sizes.heads, rank, num_ranks, "heads")
    # One norm over all heads follows the mixer, over the ranks. Gates after it would follow it in turn.
    norm_groups = 0 if sizes.norm_groups == 1 and not sizes.gates_last else sizes.norm_groups
    if norm_groups % num_ranks:
        raise ValueError(f"norms over {sizes.norm_groups} parts of an output, no multiple of {num_ranks}")
    if sizes.groups % num_ranks and num_ranks % sizes.groups:
        raise ValueError(f"{sizes.groups} groups of keys, neither a multiple nor a divisor of {num_ranks}")
    # Ranks repeat a group where there are fewer.
    own, first = max(1, sizes.groups // num_ranks), rank * sizes.groups // num_ranks
    groups, keys = ((first, first + own),), sizes.groups * sizes.key_size
    channels = (
        *_spans(heads, sizes.head_size),
        *_spans(groups, sizes.key_size, sizes.inner),
        *_spans(groups, sizes.key_size, sizes.inner + keys),
    )
    projection = (
        *_spans(heads, sizes.head_size),
        *_spans(channels, 1, sizes.inner),
        *_spans(heads, 1, sizes.inner + sizes.channels),
    )
    others = dict.fromkeys((mamba_mixer.TAPS, mamba_mixer.BIAS), channels)
    others |= dict.fromkeys((mamba_mixer.DECAY, mamba_mixer.SKIP, mamba_mixer.TIME_BIAS), heads)
    others[mamba_mixer.NORM] = _spans(heads, sizes.head_size)
    part = sizes._replace(heads=sizes.heads // num_ranks, groups=own, norm_groups=norm_groups // num_ranks)
    return StatePart(part, (projection,), _spans(heads, sizes.head_size), others)


def _share(count: int, rank: int, num_ranks: int, what: str) -> Ranges:
    if count % num_ranks:
        raise ValueError(f"{count} {what}, no multiple of {num_ranks}")
    return ((rank * count // num_ranks, (rank + 1) * count // num_ranks),)


def _spans(ranges: Ranges, size: int, start: int = 0) -> Ranges:
    """Return the numbers of heads that have `size` of them each, from `start` on."""
    return tuple((start + first * size, start + last * size) for first, last in ranges)
