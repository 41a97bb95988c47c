"""Block tables of sequences, and the prefix cache: equal prefixes share their full blocks.

A full block is named by a digest of its tokens and of the block before it, so that a digest identifies everything from
the first token on. SHA-256 makes collisions infeasible even for a malicious user, so tokens are not compared again.
(Hash chains over blocks: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", 2023.)

Digests start from a salt, so that requests with unlike salts share nothing, and a digest belongs to one KV group. With
several groups a prefix can be used if each group has the blocks that the tokens after it read: a full group all, a
sliding group those of the last window. Blocks behind a window keep their digest while they are free. Most of them are
evicted first, because few prompts end there. Some are kept as long as other blocks:

- the window at the end of the prompt, and one block before it, for the next turn of a conversation and for an edited
  last turn;
- the window at the end of a prefix that other sequences share with this one. It is known when a full group has more of
  the prefix than the sliding groups have. (Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", 2025, keep
  states of hybrid models at branches for the same reason.)

The salt of a prompt with audio has a digest of the audio. Blocks of cross attention are named by it when a request gets
them, and a request that finds all of them is not encoded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from math import lcm

from phonograph.core.batch import BlockAppend
from phonograph.core.blocks import blocks_for, group_pages
from phonograph.core.kv_group import KVGroup
from phonograph.kv_cache.block_events import BlockEvents
from phonograph.kv_cache.block_pool import BlockPool
from phonograph.kv_cache.checkpoints import CheckpointPool
from phonograph.kv_cache.groups import BlockGroup, FullGroup, SlidingGroup
from phonograph.kv_cache.tables import FREED, SequenceTable


class CacheManager:
    """Allocator of blocks for sequences, with the prefix cache. One pool serves all KV groups.

    With `checkpoints`, a prefix ends at one of them.

    A block is published when its last token is known and scheduled, and may be found by the next admission, even into
    the same step. It is read only after it is written, because steps run in the order of their schedules, and each
    layer writes the keys and values of the whole batch before it attends. Therefore every scheduled batch must be run,
    or `reset` called.

    A block behind the window of a sequence is freed when the next step of that sequence is scheduled, not when the step
    that reads it for the last time is. So another sequence gets it in that next step at the earliest and writes it only
    after the earlier steps have read it, as steps run in order.

    `events` records what is published and what leaves the prefix cache, if there is one.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        num_blocks: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
        checkpoints: CheckpointPool | None = None,
        events: BlockEvents | None = None,
    ) -> None:
        self.checkpoints = checkpoints
        self.pool = BlockPool(num_blocks, events)
        self._events = events
        self._enable_prefix_caching = enable_prefix_caching
        self._groups: tuple[BlockGroup, ...] = tuple(
            FullGroup(group) if group.window is None else SlidingGroup(group, max_num_batched_tokens)
            for group in groups
        )
        self._sizes = [group.block_size for group in groups]
        # Cross attention has all of its blocks from the admission on.
        self._growing = [index for index, group in enumerate(groups) if not group.encoder_len]
        self._cross = [index for index, group in enumerate(groups) if group.encoder_len]
        self._most_encoded = max(group.encoder_len for group in groups)
        self._full = [index for index in self._growing if groups[index].window is None]
        self._sliding = [index for index in self._growing if groups[index].window is not None]
        # A prefix ends at a block's end in every group.
        self.step = lcm(*self._sizes)
        self.most_promised = sum(
            group_pages(group, sys.maxsize, max_num_batched_tokens) for group in groups if group.window is not None
        )
        """Limit of `promised`."""

    def make_table(
        self, tokens: Callable[[int, int], list[int]], prompt_len: int, salt: str | None, encoder_len: int = 0
    ) -> SequenceTable:
        """Return the empty block tables of a sequence; see `SequenceTable`. An `encoder_len` of 0 is all positions."""
        return SequenceTable(tokens, prompt_len, salt, self._sizes, encoder_len or self._most_encoded)

    def admit(self, table: SequenceTable, num_tokens: int, *, reserve: int, reuse: bool, ahead: int = 0) -> int | None:
        """Fill an empty table with cached blocks and those that full groups need, or do nothing if blocks are short.

        Blocks are short unless enough are free for all tokens in full groups, and in sliding groups for all chunks to
        come; see `promised`.

        Args:
            table: block tables of the sequence.
            num_tokens: known tokens.
            reserve: blocks that must stay free.
            ahead: tokens behind the known ones for which the table gets blocks too.
            reuse: take cached blocks. The last token's block is never taken, because sampling needs that token's
                logits.

        Returns:
            The number of tokens whose keys and values are in the blocks already, or None if blocks are short.
        """
        pool = self.pool
        if pool.num_free <= reserve:
            return None
        matched, num_cached = 0, 0
        if reuse and self._enable_prefix_caching:
            matched, num_cached = self._longest_prefix(table, num_tokens)
            if self.checkpoints is not None:
                num_cached = self._last_checkpoint(table, num_cached)
        found: list[tuple[BlockGroup, int, int, list[int]]] = []
        needed = reserve
        for index, group in enumerate(self._groups):
            length, first, most, keys = num_tokens + ahead, group.first_block(num_cached), 0, list[bytes]()
            if index in self._cross:
                length = table.encoder_len
                most = group.most_blocks(length, 0)
                keys = table.encoder_keys(index, most) if reuse and self._enable_prefix_caching else []
            elif num_cached:
                keys = table.keys(index, first, num_cached // group.block_size)
            block_ids = [block_id for key in keys if (block_id := pool.find(key)) is not None]
            if index in self._cross:
                table.encoded = len(block_ids) == most
                block_ids = block_ids if table.encoded else []
            found.append((group, length, first, block_ids))
            needed += group.most_blocks(length, first)
            if index not in self._sliding:
                needed -= sum(map(pool.is_used, block_ids))
        if needed > pool.num_free:
            return None
        for *_, block_ids in found:
            pool.share(block_ids)  # before allocation, which may evict found blocks
        for one, (group, length, first, block_ids) in zip(table.groups, found, strict=True):
            fresh = group.blocks_at_admission(length, num_cached) - first - len(block_ids)
            one.first = first
            one.block_ids = [FREED] * first + block_ids + [pool.allocate() for _ in range(fresh)]
            one.num_published = num_cached // group.block_size
        for index in self._cross if self._enable_prefix_caching and not table.encoded else ():
            block_ids = table.groups[index].block_ids
            for block_id, key in zip(block_ids, table.encoder_keys(index, len(block_ids)), strict=True):
                pool.name(block_id, key)
        table.num_found = min(table.num_found, num_cached)
        table.num_matched = matched
        if self._enable_prefix_caching:
            self._choose_kept(table, matched, num_cached)
        return num_cached

    def extend(self, table: SequenceTable, num_tokens: int, slot: int = -1) -> list[BlockAppend]:
        """Append the blocks that are missing for the leading `num_tokens` tokens; return them for the runner's slot.

        The caller has checked that enough are free.
        """
        appends: list[BlockAppend] = []
        for index in self._growing:
            one = table.groups[index]
            start = len(one.block_ids)
            missing = blocks_for(num_tokens, self._sizes[index]) - start
            if missing > 0:
                block_ids = [self.pool.allocate() for _ in range(missing)]
                one.block_ids += block_ids
                appends.append(BlockAppend(slot=slot, start=start, block_ids=block_ids, group=index))
        return appends

    def num_missing(self, table: SequenceTable, num_tokens: int) -> int:
        """Return the number of blocks that `extend` would append."""
        growing = ((len(table.groups[index].block_ids), self._sizes[index]) for index in self._growing)
        return sum(max(0, blocks_for(num_tokens, size) - count) for count, size in growing)

    def free_behind(self, table: SequenceTable, num_computed: int) -> None:
        """Free the blocks that no token after the first `num_computed` ones reads.

        Call it only when a step that begins there or later is scheduled: the step before may read these blocks.
        """
        for index in self._sliding:
            one = table.groups[index]
            for entry in range(one.first, self._groups[index].first_block(num_computed)):
                is_kept = any(entry in kept for kept in one.kept)
                self.pool.release([one.block_ids[entry]], evict_first=not is_kept)
                one.block_ids[entry] = FREED
                one.first = entry + 1

    def promised(self, table: SequenceTable, num_tokens: int) -> int:
        """Return the free blocks that a sequence may still take in sliding groups for its first `num_tokens` tokens.

        Blocks that it shares do not count as its own, because they may stay in use when it frees them. While it
        computes its prompt nothing else is admitted, so that it shares no further ones.
        """
        count = 0
        for index in self._sliding:
            one = table.groups[index]
            own = sum(self.pool.num_references(block_id) == 1 for block_id in one.held)
            count += max(0, self._groups[index].most_blocks(num_tokens, one.first) - own)
        return count

    def publish(self, table: SequenceTable, num_tokens: int) -> None:
        """Make the full blocks of the leading `num_tokens` tokens findable.

        The tokens are known and scheduled. Drafts are not known until a step has accepted them.
        """
        if not self._enable_prefix_caching:
            return
        for index in self._growing:
            one = table.groups[index]
            num_full = num_tokens // self._sizes[index]
            if num_full > one.num_published:
                start = max(one.num_published, one.first)
                for number, key in enumerate(table.keys(index, start, num_full), start):
                    is_new = self.pool.name(one.block_ids[number], key)
                    if is_new and self._events is not None:
                        parent = table.keys(index, number - 1, number)[0] if number else None
                        token_ids = table.token_ids(index, number, number + 1)
                        self._events.stored(index, key, parent, token_ids, table.salt)
                one.num_published = num_full

    def free(self, table: SequenceTable) -> None:
        """Release the blocks; published ones can be found until they are evicted, those that are kept last."""
        for one in table.groups:
            self.pool.release(one.held)
            one.block_ids, one.first = [], 0
        for index in self._sliding:
            for kept in table.groups[index].kept:
                for key in table.keys(index, kept.start, kept.stop):
                    self.pool.touch(key)

    def forget(self, table: SequenceTable) -> None:
        """Remove the blocks that a sequence computed from the prefix cache, and publish no more of them.

        Includes blocks that it released before. Sequences that share such a block keep it.
        """
        for index in self._cross if not table.encoded else ():
            for key in table.encoder_keys(index, len(table.groups[index].block_ids)):
                self.pool.unname(key)
        for index, (group, one) in enumerate(zip(self._groups, table.groups, strict=True)):
            num_published = 0 if index in self._cross else min(one.num_published, table.num_named(index))
            for key in table.keys(index, table.num_found // group.block_size, num_published):
                self.pool.unname(key)
                if self.checkpoints is not None:
                    self.checkpoints.remove(key)
            one.num_published = sys.maxsize

    def reset(self, tables: Iterable[SequenceTable]) -> None:
        """Forget all cached prefixes, at any time.

        Args:
            tables: all block tables. Those with blocks keep them, and publish nothing until they are admitted again,
                because their contents are older than the reset.
        """
        self.pool.forget()
        if self.checkpoints is not None:
            self.checkpoints.forget()
        for table in tables:
            for one in table.groups:
                one.num_published = sys.maxsize

    def _longest_prefix(self, table: SequenceTable, num_tokens: int) -> tuple[int, int]:
        """Return the tokens of the longest prefix in all full groups, and of the longest in all groups."""
        prefix = (num_tokens - 1) // self.step * self.step

        def is_cached(index: int) -> Callable[[int], bool]:
            keys = table.keys(index, 0, prefix // self._groups[index].block_size)
            return lambda block: self.pool.find(keys[block]) is not None

        for index in self._full:
            prefix = self._groups[index].longest_prefix(prefix, self.step, is_cached(index))
        matched = prefix
        lookups = [(self._groups[index], is_cached(index)) for index in self._sliding]
        before = -1
        while prefix != before:
            before = prefix
            for group, lookup in lookups:
                prefix = group.longest_prefix(prefix, self.step, lookup)
        return matched, prefix

    def _last_checkpoint(self, table: SequenceTable, prefix: int) -> int:
        """Return the tokens of the longest prefix, up to `prefix`, that ends at a checkpoint."""
        assert self.checkpoints is not None
        while prefix and not self.checkpoints.has(self.digest(table, prefix)):
            prefix -= self.step
        return prefix

    def digest(self, table: SequenceTable, num_tokens: int) -> bytes:
        """Return the digest of the leading tokens of a sequence, which end with a block."""
        (digest,) = table.keys(0, num_tokens // self._sizes[0] - 1, num_tokens // self._sizes[0])
        return digest

    def _choose_kept(self, table: SequenceTable, matched: int, num_cached: int) -> None:
        """Choose the windows that are kept: at the prompt's end, with a block before, and at the ends of prefixes."""
        end = (table.prompt_len - 1) // self.step * self.step
        for index in self._sliding:
            group = self._groups[index]
            spans = ((max(0, end - self.step), end), (matched, matched), (num_cached, num_cached))
            kept = [range(group.first_block(start), stop // group.block_size) for start, stop in spans]
            table.groups[index].kept = list(filter(None, kept))
