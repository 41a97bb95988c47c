"""KV groups of a model: layers that share block tables, over pages of equal bytes.

Layers of equal attention form a kind. A layer with a window needs the keys of the window only, so its pages behind the
window are freed, which takes a block table of its own. One pool of pages serves all groups: every group has the same
number of layers, and its blocks have as many tokens as make its page as large as the others'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phonograph.attention.attention_spec import UNBOUNDED, AttentionKind, AttentionSpec
from phonograph.core.kv_group import KVGroup
from phonograph.errors import ConfigError, UnsupportedModelError, counted

_UNLIMITED = (UNBOUNDED, UNBOUNDED)
_MOST_GROUPS = 10
"""Largest number of groups. Each has a block table that every step copies."""
_MOST_WASTE = 0.2
"""Largest share of the pool that may be padding."""
_MOST_BLOCK = 1024
"""Tokens of the largest block that the default block size grows to."""
_GRANULE = 16
"""Divisor of the block sizes that GPU kernels take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroups:
    """Groups of a model.

    Attributes:
        groups: layers, block size and window of each.
        specs: attention of each, with its block size and the windows of its layers.
        layers_per_page: layers of a page; a group may have fewer.
    """

    groups: tuple[KVGroup, ...]
    specs: tuple[AttentionSpec, ...]
    layers_per_page: int

    @property
    def group_of_layer(self) -> list[int]:
        """Group of each layer with attention, in their order."""
        found = {layer: index for index, group in enumerate(self.groups) for layer in (*group.layers, *group.readers)}
        return [found[layer] for layer in sorted(found)]

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block in each group."""
        return tuple(group.block_size for group in self.groups)

    @property
    def grows_with_tokens(self) -> bool:
        """True if each token of a sequence takes its share of a block to the end: one group without a window."""
        return len(self.groups) == 1 and self.groups[0].window is None

    @property
    def members(self) -> dict[AttentionSpec, list[int]]:
        """Groups of each distinct specification."""
        found: dict[AttentionSpec, list[int]] = {}
        for index, spec in enumerate(self.specs):
            found.setdefault(spec, []).append(index)
        return found

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: a block of any group."""
        return self.layers_per_page * self.specs[0].block_size * self.specs[0].kv_token_bytes

    @property
    def waste(self) -> float:
        """Share of the pool that no layer uses, if all groups have as many pages."""
        return self._padding / self._places

    @property
    def _places(self) -> int:
        """Layers that the pages of all groups have room for."""
        return len(self.groups) * self.layers_per_page

    @property
    def _padding(self) -> int:
        if self.groups[0].step:
            return 0
        return self._places - sum(len(group.layers) for group in self.groups)

    @property
    def notes(self) -> list[str]:
        """Note on the padding, if there is any."""
        if not self._padding:
            return []
        return [
            f"{len(self.groups)} KV groups of {self.layers_per_page} layers: {self._padding} of {self._places} places "
            f"are padding, {self.waste:.1%} of the KV cache"
        ]


def group_name(index: int, group: KVGroup) -> str:
    """Return the name of a group in messages."""
    return f"KV group {index} ({counted(len(group.layers), 'layer')}, {keys_name(group)})"


def keys_name(group: KVGroup) -> str:
    """Return the name of the keys that a group's tokens attend to in messages."""
    if group.encoder_len:
        return f"{'up to ' if group.ragged_encoder else ''}{group.encoder_len} positions of the encoder"
    return "full attention" if group.window is None else f"window {group.window}"


def make_kv_groups(
    layers: Sequence[AttentionSpec],
    *,
    max_model_len: int,
    block_size: int | None = None,
    sources: Sequence[int | None] | None = None,
    indices: Sequence[int] | None = None,
    encoder_len: int = 0,
    ragged_encoder: bool = False,
) -> KVGroups:
    """Group the layers of a model.

    A window that is at least as long as the context never hides a key, so it makes no sliding group.

    Args:
        layers: attention of each layer that has it, with its window as the only one. All have the default block size.
        max_model_len: tokens of the longest sequence.
        block_size: configured block size; None for the default, which grows until pages are equal.
        sources: for each of `layers` the one whose keys and values it reads, None for its own; None if all have their
            own.
        indices: index in the model of each of `layers`; None if all layers have attention.
        encoder_len: positions of the encoder that cross attention reads.
        ragged_encoder: sequences may have fewer of them.

    Raises:
        ConfigError: the configured block size makes pages of several sizes.
        UnsupportedModelError: the layers do not divide into groups of equal pages, or a layer reads the keys of one
            that has none, is later, or has other attention.
    """
    readers = _readers(layers, sources or [None] * len(layers))
    reading = {layer for found in readers.values() for layer in found}
    numbers = indices or range(len(layers))
    kinds: dict[AttentionSpec, list[int]] = {}
    for index, spec in enumerate(layers):
        if index in reading:
            continue
        kinds.setdefault(replace(spec, windows=(_effective(spec.windows[0], max_model_len),)), []).append(index)
    most = layers_per_group([len(found) for found in kinds.values()])
    sizes = _block_sizes([kind.kv_token_bytes for kind in kinds], next(iter(kinds)).block_size, block_size)
    groups: list[KVGroup] = []
    specs: list[AttentionSpec] = []
    for (kind, found), size in zip(kinds.items(), sizes, strict=True):
        window = None if kind.windows[0] == _UNLIMITED else kind.windows[0][0] + 1
        for first in range(0, len(found), most):
            members = tuple(found[first : first + most])
            reads = tuple(numbers[one] for one in sorted(one for member in members for one in readers.get(member, ())))
            written = tuple(numbers[member] for member in members)
            group = KVGroup(layers=written, block_size=size, window=window, readers=reads)
            if kind.kind is AttentionKind.ENCODER_DECODER:
                group = replace(group, encoder_len=encoder_len, ragged_encoder=ragged_encoder)
            groups.append(group)
            windows = tuple(sorted({layers[index].windows[0] for index in found}))
            specs.append(replace(kind, block_size=size, windows=windows))
    return KVGroups(groups=tuple(groups), specs=tuple(specs), layers_per_page=most)


def make_step_groups(layers: Sequence[AttentionSpec], *, block_size: int | None = None) -> KVGroups:
    """Return the only group of a model that computes a prompt in one step; its layers differ in windows at most.

    Raises:
        UnsupportedModelError: they differ in more.
    """
    windows = tuple(sorted({layer.windows[0] for layer in layers}))
    spec = replace(layers[0], windows=windows, block_size=block_size or layers[0].block_size)
    for index, layer in enumerate(layers):
        if replace(layer, windows=windows, block_size=spec.block_size) != spec:
            raise UnsupportedModelError(
                f"layer {index} has other heads than layer 0; a model that computes prompts in one step has equal ones"
            )
    group = KVGroup(layers=tuple(range(len(layers))), block_size=spec.block_size, step=True)
    return KVGroups(groups=(group,), specs=(spec,), layers_per_page=1)


def _readers(layers: Sequence[AttentionSpec], sources: Sequence[int | None]) -> dict[int, list[int]]:
    """Return the layers that read the keys and values of each layer, beside itself."""
    found: dict[int, list[int]] = {}
    for index, (spec, source) in enumerate(zip(layers, sources, strict=True)):
        if source is None:
            continue
        problem = None
        if not 0 <= source < index:
            problem = "is not before it"
        elif sources[source] is not None:
            problem = "has none of its own"
        elif layers[source] != spec:
            problem = "has attention of another kind"
        if problem is not None:
            raise UnsupportedModelError(
                f"layer {index} reads the keys and values of layer {source}, which {problem}; an earlier layer with "
                "its own keys, and with equal heads and window, works"
            )
        found.setdefault(source, []).append(index)
    return found


def layers_per_group(counts: Sequence[int]) -> int:
    """Return the number of layers of each group, for kinds of that many layers.

    A kind of c layers takes c / n groups of n layers, rounded up, and the last one is padded. The rule takes the n with
    the least padding that makes at most 10 groups, because the cost of a step grows with the groups; of equal ones the
    largest, which makes the fewest groups. For 40 and 8 layers n is 8, without padding; for 52 and 10 it is 13: five
    groups with 3 places of padding, where 31 groups of two layers had none.

    Raises:
        UnsupportedModelError: more than a fifth of the pool would be padding.
    """
    total = sum(counts)
    if len(counts) == 1:
        return total

    def num_groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    sizes = [size for size in range(1, max(counts) + 1) if num_groups(size) <= _MOST_GROUPS]
    best = min(sizes, key=lambda size: (num_groups(size) * size, -size), default=0)
    if not best or 1 - total / (num_groups(best) * best) > _MOST_WASTE:
        wasted = f" {1 - total / (num_groups(best) * best):.0%} of the KV cache would be padding;" if best else ""
        raise UnsupportedModelError(
            f"its layers have {len(counts)} kinds of attention, of {', '.join(map(str, counts))} layers, which do not "
            f"divide into {_MOST_GROUPS} KV groups of equal size or fewer:{wasted} at most {_MOST_WASTE:.0%} works"
        )
    return best


def _effective(window: tuple[int, int], max_model_len: int) -> tuple[int, int]:
    """Return the window, or an unlimited one if it never hides a key of a causal sequence."""
    left, right = window
    return _UNLIMITED if right <= 0 and (left == UNBOUNDED or left + 1 >= max_model_len) else window


def _block_sizes(token_bytes: Sequence[int], default: int, configured: int | None) -> list[int]:
    """Return the tokens of a block of each kind, so that a layer's blocks have equal bytes.

    The kind with the widest tokens has the block size of the configuration, others have more tokens in a block.
    """
    widest, base = max(token_bytes), configured or default
    granule = _GRANULE if base % _GRANULE == 0 else 1
    # base * widest / size is a multiple of the granule for each size.
    step = math.lcm(*(granule * size // math.gcd(granule * size, widest) for size in token_bytes))
    if configured is None:
        base = -(-base // step) * step
        if base * widest // min(token_bytes) > _MOST_BLOCK:
            raise UnsupportedModelError(
                f"tokens of its layers take {', '.join(map(str, sorted(set(token_bytes))))} bytes of KV cache; blocks "
                f"of equal bytes would have more than {_MOST_BLOCK} tokens"
            )
    elif base % step:
        raise ConfigError(
            "block_size",
            base,
            f"makes no pages of equal bytes for layers with {' and '.join(map(str, sorted(set(token_bytes))))} bytes a "
            f"token; multiples of {step} work",
        )
    return [base * widest // size for size in token_bytes]
