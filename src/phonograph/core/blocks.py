"""Sizes in blocks of the paged KV cache."""

from __future__ import annotations


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // block_size)


def most_step_tokens(*, num_blocks: int, block_size: int, max_model_len: int, max_num_seqs: int) -> int:
    """Return the tokens of the largest step that the cache holds: at most `max_num_seqs` sequences without context."""
    whole, rest = divmod(num_blocks, blocks_for(max_model_len, block_size))
    fitting = whole * max_model_len + min(rest * block_size, max_model_len)
    return min(fitting, max_num_seqs * max_model_len)
