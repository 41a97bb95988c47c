"""Sizes in blocks of the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from phonograph.core.kv_group import KVGroup


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // block_size)


def group_blocks(group: KVGroup, num_tokens: int) -> int:
    """Return the blocks of one KV group that hold the keys of a sequence of `num_tokens` tokens, without its window.

    If encoders differ in length, that of the sequence has as many positions as the sequence has tokens, if it may.
    """
    return blocks_for(encoder_positions(group, num_tokens) if group.encoder_len else num_tokens, group.block_size)


def encoder_positions(group: KVGroup, num_tokens: int) -> int:
    """Return the positions of the encoder of such a sequence of `num_tokens` tokens, in a group of cross attention."""
    most = group.encoder_len if num_tokens else 0
    return min(most, num_tokens) if group.ragged_encoder else most


def pages_for_request(groups: Sequence[KVGroup], num_tokens: int, max_num_batched_tokens: int) -> int:
    """Return the most pages that a request of `num_tokens` tokens holds at a time.

    Args:
        groups: KV groups of the model.
        num_tokens: tokens of the request.
        max_num_batched_tokens: tokens of the largest chunk.
    """
    return sum(group_pages(group, num_tokens, max_num_batched_tokens) for group in groups)


def group_pages(group: KVGroup, num_tokens: int, max_num_batched_tokens: int) -> int:
    """Return the most pages of one KV group that a request holds at a time; see `pages_for_request`.

    A chunk reads the window before its first token and writes its own tokens. These are at most W - 1 + T adjacent
    tokens, with a window of W and a chunk of T tokens. They begin anywhere in a block. An encoder may have all of its
    positions.
    """
    all_tokens = group_blocks(replace(group, ragged_encoder=False), num_tokens)
    if group.window is None:
        return all_tokens
    return min(all_tokens, blocks_for(group.window + max_num_batched_tokens - 2, group.block_size) + 1)


def most_tokens(num_blocks: int, blocks_of: Callable[[int], int], most: int) -> int:
    """Return the most tokens, up to `most`, that take at most `num_blocks` blocks.

    Args:
        num_blocks: blocks to fill.
        blocks_of: returns the blocks that a number of tokens takes; does not fall with more tokens, and is 0 for 0.
        most: limit of the result.
    """
    fitting, refused = 0, most + 1
    while refused - fitting > 1:
        middle = (fitting + refused) // 2
        if blocks_of(middle) <= num_blocks:
            fitting = middle
        else:
            refused = middle
    return fitting


def most_step_tokens(*, num_blocks: int, groups: Sequence[KVGroup], max_model_len: int, max_num_seqs: int) -> int:
    """Return the tokens of the largest step that the cache holds: at most `max_num_seqs` sequences without context.

    Args:
        num_blocks: pages of the cache; one holds a block of any KV group.
        groups: KV groups of the model.
        max_model_len: tokens of the longest sequence.
        max_num_seqs: number of sequences.
    """

    def blocks_of(length: int) -> int:
        return sum(group_blocks(group, length) for group in groups)

    whole, rest = divmod(num_blocks, blocks_of(max_model_len))
    longest = most_tokens(rest, blocks_of, max_model_len)
    return min(whole * max_model_len + longest, max_num_seqs * max_model_len)
