"""Pool of the paged KV cache's blocks, with reference counts and the cached contents of free blocks.

A block is in exactly one of three states: used (at least one reference), evictable (free, but its contents have a
digest and can be found by it) or blank (free and without a digest). Blank blocks are allocated first, then evictable
ones, least recently used first. A block that is unlikely to be found again may be released to be evicted first.

The pool only counts references. The caller ensures that a block is written only by the sequence that allocated it,
until it is full; that it is named only once full; and that only named blocks are shared. So a shared block is never
written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from phonograph.kv_cache.block_events import BlockEvents


class BlockPool:
    """Blocks 0 .. num_blocks - 1. All are usable: padding is written to slot -1 and needs no block.

    `events` records the digests that leave their blocks, if there is one.
    """

    def __init__(self, num_blocks: int, events: BlockEvents | None = None) -> None:
        self.num_blocks = num_blocks
        self._events = events
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        # A plain dict finds its oldest key in time linear in the deleted keys; an OrderedDict in constant time.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def is_used(self, block_id: int) -> bool:
        return self._references[block_id] > 0

    def num_references(self, block_id: int) -> int:
        return self._references[block_id]

    def allocate(self) -> int:
        """Return a free block with one reference and forget its contents. The caller has checked `num_free`."""
        if self._blank:
            block_id = self._blank.pop()
        else:
            block_id, _ = self._evictable.popitem(last=False)
            digest = self._digest_of[block_id]
            assert digest is not None
            del self._block_of[digest]
            self._digest_of[block_id] = None
            if self._events is not None:
                self._events.removed(digest)
        self._references[block_id] = 1
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, all of them found by `find`."""
        for block_id in block_ids:
            if not self._references[block_id]:
                del self._evictable[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """Drop a reference to each block of a table.

        Starts at the tail, so that the tail of a chain is evicted before its head: a head without its tail can still be
        used, a tail without its head cannot be found.

        Args:
            block_ids: blocks in the order of their tokens.
            evict_first: evict them before all blocks that are free now.
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
                    if evict_first:
                        self._evictable.move_to_end(block_id, last=False)

    def name(self, block_id: int, digest: bytes) -> bool:
        """Make a used, full block findable. If another block has the same contents, that one keeps the digest.

        Returns:
            True if no other block has the digest.
        """
        assert self._references[block_id] and self._digest_of[block_id] is None
        if digest in self._block_of:
            return False
        self._block_of[digest] = block_id
        self._digest_of[block_id] = digest
        return True

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def touch(self, digest: bytes) -> None:
        """Make a free block with this digest, if any, the last to be evicted."""
        block_id = self._block_of.get(digest)
        if block_id is not None and not self._references[block_id]:
            self._evictable.move_to_end(block_id)

    def unname(self, digest: bytes) -> None:
        """Remove a digest from its block, if any; a used block stays used."""
        block_id = self._block_of.pop(digest, None)
        if block_id is None:
            return
        self._digest_of[block_id] = None
        if self._events is not None:
            self._events.removed(digest)
        if not self._references[block_id]:
            del self._evictable[block_id]
            self._blank.append(block_id)

    def forget(self) -> None:
        """Remove all digests; used blocks stay used."""
        self._blank.extend(self._evictable)
        self._evictable.clear()
        self._block_of.clear()
        self._digest_of = [None] * self.num_blocks
        if self._events is not None:
            self._events.cleared()
