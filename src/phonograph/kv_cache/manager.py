"""Block tables of sequences, and the prefix cache: equal prefixes share their full blocks.

A full block is named by a digest of its tokens and of the block before it, so that a digest identifies everything from
the first token on. SHA-256 makes collisions infeasible even for a malicious user, so tokens are not compared again.
(Hash chains over blocks: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", 2023.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from struct import pack

from phonograph.kv_cache.block_pool import BlockPool


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks of one sequence, empty while it waits.

    Attributes:
        tokens: returns the sequence's known tokens from start to stop; called when blocks are named.
        digests: digests of the leading full blocks computed so far.
        num_published: leading blocks that are in the prefix cache.
        num_found: leading blocks that other sequences computed, at every admission.
    """

    tokens: Callable[[int, int], list[int]]
    block_ids: list[int] = field(default_factory=list[int])
    digests: list[bytes] = field(default_factory=list[bytes])
    num_published: int = 0
    num_found: int = sys.maxsize


class CacheManager:
    """Allocator of blocks for sequences, with the prefix cache.

    A block is published when its last token is scheduled, and may be found by the next admission, even into the same
    step. It is read only after it is written, because steps run in the order of their schedules, and each layer writes
    the keys and values of the whole batch before it attends. Therefore every scheduled batch must be run, or `reset`
    called.
    """

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching

    def admit(self, table: BlockTable, num_tokens: int, *, reserve: int, reuse: bool) -> int | None:
        """Fill an empty table with blocks for `num_tokens` tokens, or do nothing if too few blocks are free.

        Args:
            table: block table of the sequence.
            num_tokens: known tokens.
            reserve: blocks that must stay free.
            reuse: take cached blocks. The last token's block is never taken, because sampling needs that token's
                logits.

        Returns:
            The number of tokens whose keys and values are in the blocks already, or None if blocks are short.
        """
        pool, size = self.pool, self._block_size
        if pool.num_free <= reserve:
            return None
        found: list[int] = []
        if reuse and self._enable_prefix_caching:
            num_reusable = (num_tokens - 1) // size
            self._extend_digests(table, num_reusable)
            for digest in table.digests[:num_reusable]:
                block_id = pool.find(digest)
                if block_id is None:
                    break
                found.append(block_id)
        num_fresh = -(-num_tokens // size) - len(found)
        num_idle = sum(not pool.is_used(block_id) for block_id in found)
        if num_fresh + num_idle + reserve > pool.num_free:
            return None
        pool.share(found)  # before allocation, which may evict found blocks
        table.block_ids = found + [pool.allocate() for _ in range(num_fresh)]
        table.num_published = len(found)
        table.num_found = min(table.num_found, len(found))
        return len(found) * size

    def grow(self, table: BlockTable) -> int:
        """Append a block and return it. The caller has checked that one is free."""
        block_id = self.pool.allocate()
        table.block_ids.append(block_id)
        return block_id

    def publish(self, table: BlockTable, num_tokens: int) -> None:
        """Make the full blocks of the leading `num_tokens` tokens findable. The tokens are known and scheduled."""
        num_full = num_tokens // self._block_size
        if num_full <= table.num_published or not self._enable_prefix_caching:
            return
        self._extend_digests(table, num_full)
        for index in range(table.num_published, num_full):
            self.pool.name(table.block_ids[index], table.digests[index])
        table.num_published = num_full

    def free(self, table: BlockTable) -> None:
        """Release the blocks; published ones can be found until they are evicted."""
        self.pool.release(table.block_ids)
        table.block_ids = []

    def forget(self, table: BlockTable) -> None:
        """Remove the blocks that a sequence computed from the prefix cache, and publish no more of them.

        Includes blocks that it released before. Sequences that share such a block keep it.
        """
        for digest in table.digests[table.num_found : table.num_published]:
            self.pool.unname(digest)
        table.num_published = sys.maxsize

    def reset(self, tables: Iterable[BlockTable]) -> None:
        """Forget all cached prefixes, at any time.

        Args:
            tables: all block tables. Those with blocks keep them, and publish nothing until they are admitted again,
                because their contents are older than the reset.
        """
        self.pool.forget()
        for table in tables:
            table.num_published = sys.maxsize

    def _extend_digests(self, table: BlockTable, num_full: int) -> None:
        size, digests = self._block_size, table.digests
        if len(digests) >= num_full:
            return
        token_ids = table.tokens(len(digests) * size, num_full * size)
        layout = f"{size}q"
        parent = digests[-1] if digests else b""
        for start in range(0, len(token_ids), size):
            parent = sha256(parent + pack(layout, *token_ids[start : start + size])).digest()
            digests.append(parent)
