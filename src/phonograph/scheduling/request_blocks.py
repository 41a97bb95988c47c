"""The blocks of requests: which they need for a step, which are promised, and what a batch appends to block tables."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from math import gcd
from typing import NamedTuple, TypedDict

from phonograph.core.batch import BlockAppend, StateCopy
from phonograph.core.blocks import blocks_for, most_tokens, pages_for_request
from phonograph.core.kv_group import KVGroup
from phonograph.core.limits import Limits
from phonograph.core.request import Request
from phonograph.kv_cache.block_events import BlockEvents
from phonograph.kv_cache.checkpoints import CheckpointCounts, CheckpointPool
from phonograph.kv_cache.manager import CacheManager
from phonograph.kv_cache.tables import SequenceTable
from phonograph.scheduling.draft_depths import DraftDepths
from phonograph.scheduling.prompt_tails import PromptTails


class Checkpoints(NamedTuple):
    """Checkpoints of states for the prefix cache.

    Attributes:
        num_checkpoints: places for them.
        interval: tokens between those of a prompt, a multiple of the block sizes; 0 for none but that at its end.
    """

    num_checkpoints: int
    interval: int = 0


class BatchCopies(TypedDict):
    """Arguments of `ScheduledBatch`."""

    copies: list[tuple[int, int]]
    restored: list[StateCopy]
    saved: list[StateCopy]


class RequestBlocks:
    """Block tables of the scheduler's requests, by request id, over one cache for all KV groups.

    Attributes:
        step: a decode may need blocks only when one of its tokens has a position that is a multiple of this, with
            `ahead` added.
        ahead: tokens behind those of its steps for which a request has blocks.
    """

    def __init__(
        self,
        limits: Limits,
        groups: Sequence[KVGroup],
        drafts: DraftDepths | None,
        checkpoints: Checkpoints | None,
        events: BlockEvents | None,
        num_blocks: int,
        *,
        enable_prefix_caching: bool,
    ) -> None:
        self._caches, self._checkpoints = enable_prefix_caching, checkpoints
        self._restored: list[StateCopy] = []
        self._saved: list[StateCopy] = []
        self.groups = tuple(groups)
        self._draft_caches = None if drafts is None else drafts.caches
        most_drafts = 0 if drafts is None else drafts.most
        self.cache = CacheManager(
            groups,
            num_blocks=num_blocks,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            checkpoints=None if checkpoints is None else CheckpointPool(checkpoints.num_checkpoints),
            events=events,
        )
        self.tables: dict[str, SequenceTable] = {}
        # The state at the end of a prompt is not kept, only that at its last block.
        copies_tails = enable_prefix_caching and checkpoints is None
        sizes = {group.block_size for group in groups}
        # The end of a prompt is in no block of an encoder.
        copies_tails = copies_tails and not any(group.encoder_len for group in groups)
        # Blocks of one size end together.
        self.tails = PromptTails(self.tables, min(sizes) if copies_tails and len(sizes) == 1 else None)
        self._sources: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self.step = gcd(*(group.block_size for group in groups))
        self.ahead = limits.lookahead_tokens
        self._limits = limits
        # The most blocks that a decode takes in a step, by window.
        self._step_blocks: Counter[int | None] = Counter()
        for group in groups:
            if group.encoder_len:
                continue
            self._step_blocks[group.window] += blocks_for(1 + most_drafts, group.block_size)
        self._slides = any(group.window is not None for group in groups)
        self._main_group = next((index for index, group in enumerate(groups) if group.window is None), 0)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request that fits alone; its last token needs no block."""
        limits = self._limits

        def pages(num_tokens: int) -> int:
            whole = min(num_tokens + self.ahead, max(num_tokens, limits.max_len - 1))
            return pages_for_request(self.groups, whole, limits.max_num_batched_tokens) if num_tokens else 0

        return 1 + most_tokens(self.cache.pool.num_blocks, pages, limits.max_len - 1)

    def add(self, request: Request) -> None:
        """Give a request empty block tables."""
        self.tables[request.request_id] = self.cache.make_table(
            request.tokens, request.prompt_len, request.prefix_salt, request.encoder_len
        )

    def admit(self, request: Request, decodes: Collection[Request], *, budget: int, reuse: bool) -> int | None:
        """Admit a request beside running decodes to a step with room for `budget` tokens; see `CacheManager.admit`.

        `extend` comes next; it copies a tail.
        """
        num_tokens = request.num_tokens
        if self._limits.whole_prompts and num_tokens > budget:
            return None
        # Each sequence may soon need further blocks. Without these in reserve, admission would cause preemption.
        growth = self.growth(decodes)
        reserve = growth + self._step_blocks.total() if decodes else 0
        ahead = min(self.ahead, request.max_len - 1 - num_tokens)
        table = self.tables[request.request_id]
        num_cached = self.cache.admit(table, num_tokens, reserve=reserve, reuse=reuse, ahead=ahead)
        request.encoded = table.encoded
        if self._draft_caches is not None and num_cached is not None:
            for one in table.groups:
                self._draft_caches.taken(one.block_ids[one.num_published :])
            shared = chain.from_iterable(one.block_ids[: one.num_published] for one in table.groups)
            self._draft_caches.admit(request, shared, len(decodes))
        self._sources = [] if num_cached is None or not reuse else self.tails.block_ids(request, num_cached)
        return num_tokens - 1 if self._sources else num_cached

    @property
    def checkpoint_counts(self) -> CheckpointCounts:
        """Counts of checkpoints; zeros without any."""
        return CheckpointCounts() if self.cache.checkpoints is None else self.cache.checkpoints.counts

    def chunk(self, request: Request, budget: int, *, is_new: bool) -> int:
        """Return the tokens of the next chunk of a prompt, which reads and writes checkpoints of states, if any.

        A state is kept at the last block boundary of the prompt, at the end of a prefix that other sequences share with
        it, and every `Checkpoints.interval` tokens. A chunk has at most one, so that it may end before the budget does.

        Args:
            request: a running request with a slot.
            budget: tokens of the step that are left.
            is_new: this is its first chunk.
        """
        start = request.max_computed
        stop = min(request.num_tokens, start + budget)
        if self._checkpoints is None:
            return stop - start
        pool, table, offset = self.cache.checkpoints, self.tables[request.request_id], self._limits.max_num_seqs
        assert pool is not None
        if is_new and start:
            row = pool.read(self.cache.digest(table, start))
            self._restored.append(StateCopy(request.slot, offset + row, start))
        last = (request.num_tokens - 1) // self.cache.step * self.cache.step
        interval = self._checkpoints.interval
        between = range(start // interval * interval + interval, stop + 1, interval) if interval else ()
        ends = sorted(end for end in {table.num_matched, last, *between} if start < end <= stop)
        if len(ends) > 1:
            stop = ends[0]
        # A sequence that was reset publishes nothing.
        if ends and table.groups[0].num_published < sys.maxsize:
            row = pool.write(self.cache.digest(table, ends[0]))
            if row is not None:
                self._saved.append(StateCopy(request.slot, offset + row, ends[0]))
        return stop - start

    def place(self, request: Request, decodes: dict[int, Request]) -> dict[int, Request]:
        """Return the decodes by slot with one more, next to the one whose leading blocks it shares for longest.

        Attention may read such blocks once for neighbours. Results do not depend on the order. Without a group of full
        attention, the blocks in the window of both count.
        """
        index, references = self._main_group, self.cache.pool.num_references
        table = self.tables[request.request_id].groups[index]
        if self.groups[index].window is None:
            most = bisect_left(table.held, True, key=lambda block_id: references(block_id) == 1)
        else:
            # Others may have freed the first ones.
            most = max((at for at, one in enumerate(table.held, table.first + 1) if references(one) > 1), default=0)
        if not most:
            decodes[request.slot] = request
            return decodes
        items = [*decodes.items()]
        place, best = len(items), 0
        # After the last of several: two that share more stay neighbours.
        for after in range(len(items), 0, -1):
            if best == most:
                break
            other = self.tables[items[after - 1][1].request_id].groups[index]
            if (shared := table.num_shared(other)) > best:
                place, best = after, shared
        items.insert(place, (request.slot, request))
        return dict(items)

    def makes_drafts(self, requests: Iterable[Request]) -> bool:
        """Return True if the draft model's passes end a step of these requests."""
        return self._draft_caches is not None and any(request.whole_drafts for request in requests)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes and tails; see `CacheManager.reset`."""
        self.tails.clear()
        self.cache.reset(self.tables.values())

    def publish(self, request: Request) -> SequenceTable:
        """Put the full blocks whose tokens are scheduled and known into the prefix cache; return the block tables."""
        table = self.tables[request.request_id]
        if not self._caches:
            return table
        before = [one.num_published for one in table.groups] if self._draft_caches is not None else ()
        self.cache.publish(table, request.num_computed)
        if self._draft_caches is not None:
            for one, start in zip(table.groups, before, strict=True):
                self._draft_caches.filled(request, one.block_ids[start : one.num_published])
        return table

    def free(self, request: Request) -> None:
        """Take all blocks from a request; its full blocks stay in the prefix cache."""
        self.tails.drop(request)
        self.cache.free(self.publish(request))

    def free_behind(self, requests: Iterable[Request]) -> None:
        """Publish the full blocks of requests, and free those that their next step does not read.

        A decode frees blocks at block boundaries, and once after its prompt, whose chunk may be much longer than a
        block.
        """
        if self._slides:
            for request in requests:
                self.cache.free_behind(self.publish(request), request.min_computed)

    def extend(self, request: Request, num_tokens: int, appends: list[BlockAppend], *, is_new: bool = False) -> None:
        """Take the blocks for the leading `num_tokens` tokens and those ahead, after those behind windows are freed.

        No token of the last position is computed, so it has no block.

        Args:
            request: a running request.
            num_tokens: its tokens that are computed with the next step.
            appends: gets the new blocks, or all blocks of a request that starts.
            is_new: the request starts.
        """
        table = self.publish(request)
        if self._slides:
            self.cache.free_behind(table, request.min_computed)
        fresh = self.cache.extend(table, min(num_tokens + self.ahead, request.max_len - 1), request.slot)
        if self._draft_caches is not None:
            for one in fresh:
                self._draft_caches.taken(one.block_ids)
        if is_new:
            fresh = [
                BlockAppend(slot=request.slot, start=one.first, block_ids=one.held, group=group)
                for group, one in enumerate(table.groups)
            ]
            if self._sources:
                targets = [one.block_ids[request.num_computed // self.step] for one in table.groups]
                self._copies += zip(self._sources, targets, strict=True)
        appends += fresh

    def take_copies(self) -> BatchCopies:
        """Return what a batch copies: pages before it, from and to, and checkpoints that it reads and writes."""
        copies = BatchCopies(copies=self._copies, restored=self._restored, saved=self._saved)
        self._copies, self._restored, self._saved = [], [], []
        if self.cache.checkpoints is not None:
            self.cache.checkpoints.end_step()
        return copies

    def suffices(self, num_decodes: int, prefilling: Request | None) -> bool:
        """Return True if enough blocks are free whatever the decodes need, without a look at each of them."""
        most_promised = 0 if prefilling is None else self.cache.most_promised
        return self.cache.pool.num_free >= num_decodes * self._step_blocks.total() + most_promised

    def needs(self, decodes: Iterable[Request], depths: Iterable[int]) -> dict[str, int]:
        """Free what is behind the windows of decodes; return the blocks that each needs, if any, by request id.

        Args:
            decodes: running requests past their prompts.
            depths: drafts of each in the next step.
        """
        needs: dict[str, int] = {}
        for request, depth in zip(decodes, depths, strict=False):
            last = request.max_computed + depth + self.ahead
            if last % self.step <= depth:
                self.free_behind([request])
                table = self.tables[request.request_id]
                needs[request.request_id] = self.cache.num_missing(table, min(last + 1, request.max_len - 1))
        return needs

    def num_unpromised(self, prefilling: Request | None) -> int:
        """Return the number of free blocks, less those that are promised to the prompt in progress."""
        num_free = self.cache.pool.num_free
        if prefilling is None or not self._slides:
            return num_free
        return num_free - self.cache.promised(self.tables[prefilling.request_id], prefilling.num_tokens)

    def growth(self, decodes: Collection[Request]) -> int:
        """Return the blocks that decodes may soon need.

        Those of a step for each in each group. Past the window a sequence frees as many blocks of a sliding group as it
        takes.
        """
        count = 0
        for window, num_blocks in self._step_blocks.items():
            below = decodes if window is None else [one for one in decodes if one.min_computed < window]
            count += num_blocks * len(below)
        return count
