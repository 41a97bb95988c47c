"""Rules of KV groups: the blocks that a sequence needs, those that it can give back, and the prefixes that it can use.

Positions are counted in tokens, blocks in entries of a sequence's block table. A sliding group attends to the last W
tokens: the query at position p reads the keys from p - W + 1 to p. So a sequence with C computed tokens reads no key
before C - W + 1 again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from phonograph.core.blocks import blocks_for, group_pages
from phonograph.core.kv_group import KVGroup


class BlockGroup(Protocol):
    """Rule of one KV group.

    Attributes:
        block_size: tokens of a block.
    """

    @property
    def block_size(self) -> int: ...

    def first_block(self, num_computed: int) -> int:
        """Return the first block that the tokens after `num_computed` computed ones read. Those before can be freed."""
        ...

    def blocks_at_admission(self, num_tokens: int, num_found: int) -> int:
        """Return the length of the block table at the admission of `num_tokens` tokens with `num_found` computed."""
        ...

    def most_blocks(self, num_tokens: int, first: int) -> int:
        """Return the most blocks held at a time while `num_tokens` tokens are computed, from block `first` on."""
        ...

    def longest_prefix(self, limit: int, step: int, is_cached: Callable[[int], bool]) -> int:
        """Return the longest prefix whose needed blocks are cached.

        Args:
            limit: maximum length in tokens, a multiple of `step`.
            step: the result is a multiple of it; itself a multiple of the block size.
            is_cached: returns True if the block of an index is in the prefix cache.
        """
        ...


class FullGroup:
    """A group whose tokens attend to all tokens before them. Blocks for all known tokens are taken at admission.

    The tokens of cross attention are the positions of a sequence's encoder.
    """

    def __init__(self, group: KVGroup) -> None:
        self.block_size = group.block_size

    def first_block(self, num_computed: int) -> int:
        return 0

    def blocks_at_admission(self, num_tokens: int, num_found: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def most_blocks(self, num_tokens: int, first: int) -> int:
        return blocks_for(num_tokens, self.block_size) - first

    def longest_prefix(self, limit: int, step: int, is_cached: Callable[[int], bool]) -> int:
        count = 0
        while count * self.block_size < limit and is_cached(count):
            count += 1
        return count * self.block_size // step * step


class SlidingGroup:
    """A group whose tokens attend to a window. Blocks are taken by chunk, and freed when they are behind the window."""

    def __init__(self, group: KVGroup, max_num_batched_tokens: int) -> None:
        assert group.window is not None
        self.block_size = group.block_size
        self.window = group.window
        self._group = group
        self._longest_chunk = max_num_batched_tokens

    def first_block(self, num_computed: int) -> int:
        return max(0, num_computed + 1 - self.window) // self.block_size

    def blocks_at_admission(self, num_tokens: int, num_found: int) -> int:
        return num_found // self.block_size

    def most_blocks(self, num_tokens: int, first: int) -> int:
        return min(
            blocks_for(num_tokens, self.block_size) - first, group_pages(self._group, num_tokens, self._longest_chunk)
        )

    def longest_prefix(self, limit: int, step: int, is_cached: Callable[[int], bool]) -> int:
        size = self.block_size
        prefix, start = limit, limit // size  # blocks from `start` to the end of the prefix are cached
        while prefix:
            first = self.first_block(prefix)
            while start > first and is_cached(start - 1):
                start -= 1
            if start <= first:
                break
            # Block `start - 1` is missing, so that no prefix may need it: the next candidate ends before it.
            prefix = (start - 1) * size // step * step
            start = prefix // size
        return prefix
