"""Who holds which block of the paged KV cache, and which free blocks still hold contents worth finding again.

A block is in exactly one of three states: *held* (one reference or more), *evictable* (free, but its contents have a
name and can be found by it), or *blank* (free and nameless). Blank blocks are handed out first, then evictable ones,
the longest unused first.

References are only counted here. Who may write is a rule of the caller's: a block is written by the sequence that
allocated it until it is full, it is named only once full, and only named blocks are shared. So a shared block is never
written; `check` holds pool and callers to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 0 .. num_blocks - 1, all of them usable (padding needs none: it is written to slot -1)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        # A plain dict finds its oldest key in time linear in the keys deleted before it; this one at once.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    def is_held(self, block_id: int) -> bool:
        return self._references[block_id] > 0

    def allocate(self) -> int:
        """A free block with one reference; its former contents are forgotten. The caller has checked `num_free`."""
        if self._blank:
            block_id = self._blank.pop()
        else:
            block_id, _ = self._evictable.popitem(last=False)
            digest = self._digest_of[block_id]
            assert digest is not None
            del self._block_of[digest]
            self._digest_of[block_id] = None
        self._references[block_id] = 1
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each block, all of them found by `find`."""
        for block_id in block_ids:
            if not self._references[block_id]:
                del self._evictable[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops a reference to each block of a table.

        From the tail, so that the tail of a chain is evicted before its head: a head without its tail can still be
        used, a tail without its head cannot be found.
        """
        for block_id in reversed(block_ids):
            references = self._references[block_id] - 1
            assert references >= 0, f"block {block_id} was freed twice"
            self._references[block_id] = references
            if not references:
                if self._digest_of[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._evictable[block_id] = None

    def name(self, block_id: int, digest: bytes) -> None:
        """Makes a held, full block findable; unless another block has the same contents, which then keeps the name."""
        assert self._references[block_id] and self._digest_of[block_id] is None
        if digest not in self._block_of:
            self._block_of[digest] = block_id
            self._digest_of[block_id] = digest

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def unname(self, digest: bytes) -> None:
        """Takes the name from the block that has it, if any; a held block stays held."""
        block_id = self._block_of.pop(digest, None)
        if block_id is None:
            return
        self._digest_of[block_id] = None
        if not self._references[block_id]:
            del self._evictable[block_id]
            self._blank.append(block_id)

    def forget(self) -> None:
        """Takes the name from every block; held ones stay held."""
        self._blank.extend(self._evictable)
        self._evictable.clear()
        self._block_of.clear()
        self._digest_of = [None] * self.num_blocks
