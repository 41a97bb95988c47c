"""Layers of a model whose keys and values share block tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers with one block table for each sequence.

    A page of the pool holds a block of any group: `block_size` tokens in each of the group's layers.

    Attributes:
        layers: indices of the layers that write keys and values.
        block_size: tokens of a block.
        readers: indices of the layers that write none and read those of a layer of the group.
        window: keys that a token attends to, itself included; None for all. Blocks behind it may be freed.
        step: keys and values are read in the layer and the step that write them, so all layers share one tensor.
        encoder_len: positions of an encoder, if the layers attend to its states; 0 if they attend to the sequence's own
            tokens. A sequence has the blocks of its positions from its admission on.
        ragged_encoder: sequences may have fewer positions than `encoder_len`.
    """

    layers: tuple[int, ...]
    block_size: int
    window: int | None = None
    readers: tuple[int, ...] = ()
    step: bool = False
    encoder_len: int = 0
    ragged_encoder: bool = False
