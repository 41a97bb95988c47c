"""Block tables of sequences over the block pool, and the prefix cache: equal prefixes share their full blocks.

A full block is named by a digest over its tokens and the digest of the block before it, so that a name stands for
everything from the first token on. SHA-256 makes two prefixes of one name infeasible to find even for a user who
tries, which is why tokens are not compared again. (Hash chains over blocks: Kwon et al., "Efficient Memory Management
for Large Language Model Serving with PagedAttention", 2023, and the systems after it.)
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
    """The blocks of one sequence, empty while it waits.

    tokens(start, stop): the sequence's known tokens in that range; asked for when blocks are named
    digests:       names of its leading full blocks, as far as they were needed
    num_published: leading blocks that are in the prefix cache
    num_found:     leading blocks that other sequences computed: found whenever this one was admitted
    """

    tokens: Callable[[int, int], list[int]]
    block_ids: list[int] = field(default_factory=list[int])
    digests: list[bytes] = field(default_factory=list[bytes])
    num_published: int = 0
    num_found: int = sys.maxsize


class CacheManager:
    """Gives blocks to sequences, and finds those that hold what a sequence would compute.

    A block is published when its last token is *scheduled*, and may be found by the next admission, even one into the
    same step. It is read only after it is written because steps run in the order in which they were scheduled, and
    because within a step each layer writes the keys and values of the whole batch before it attends. Therefore every
    batch that was scheduled must be run, or else `reset` called.
    """

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching

    def admit(self, table: BlockTable, num_tokens: int, *, reserve: int, reuse: bool) -> int | None:
        """Fills an empty table with blocks for `num_tokens` tokens, or does nothing if too few blocks are free.

        reserve: blocks that must be left free
        reuse:   whether cached blocks may be taken; never that of the last token, which is always computed, so that
            there are logits to sample from

        Returns how many of the tokens have their keys and values in the blocks already, or None.
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
        num_idle = sum(not pool.is_held(block_id) for block_id in found)
        if num_fresh + num_idle + reserve > pool.num_free:
            return None
        pool.share(found)  # first, because allocating may evict what was found
        table.block_ids = found + [pool.allocate() for _ in range(num_fresh)]
        table.num_published = len(found)
        table.num_found = min(table.num_found, len(found))
        return len(found) * size

    def grow(self, table: BlockTable) -> int:
        """Appends a block, which the caller knows to be free, and returns it."""
        block_id = self.pool.allocate()
        table.block_ids.append(block_id)
        return block_id

    def publish(self, table: BlockTable, num_tokens: int) -> None:
        """Makes the full blocks of the leading `num_tokens` tokens findable: known tokens, scheduled to be computed."""
        num_full = num_tokens // self._block_size
        if num_full <= table.num_published or not self._enable_prefix_caching:
            return
        self._extend_digests(table, num_full)
        for index in range(table.num_published, num_full):
            self.pool.name(table.block_ids[index], table.digests[index])
        table.num_published = num_full

    def free(self, table: BlockTable) -> None:
        """Gives the blocks back; those published can be found until they are needed for something else."""
        self.pool.release(table.block_ids)
        table.block_ids = []

    def forget(self, table: BlockTable) -> None:
        """Makes the blocks that a sequence computed impossible to find, and publishes no more of them.

        Blocks given back before count too. Sequences that share such a block keep it.
        """
        for digest in table.digests[table.num_found : table.num_published]:
            self.pool.unname(digest)
        table.num_published = sys.maxsize

    def reset(self, tables: Iterable[BlockTable]) -> None:
        """Forgets all cached prefixes, at any time.

        tables: all there are; those with blocks keep them, and publish nothing until they are admitted again, because
            what they hold comes from before
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
