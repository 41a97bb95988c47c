"""The scheduler: selects the sequences of each step, their token counts, slots and blocks.

Continuous batching with chunked prefill under one token budget. In each step every running sequence that is past its
prompt gets one token, and drafts where a proposer has some. Then the prompt in progress gets a chunk of the remaining
budget. Then waiting requests are admitted in order of rank, while slots, blocks and budget last, so that only the last
one stays in progress. If blocks are short for the decodes, the running sequence of the worst rank loses its blocks and
waits again with its output.

Blocks come from one pool for all KV groups. A sequence gets the blocks of all its known tokens at admission in a full
group. In a sliding group it gets those of a chunk with the chunk, after those behind the window are freed. So admission
asks for the blocks of the largest chunk too. What the prompt in progress has not taken yet is *promised* to it: decodes
preempt rather than take it. Later a sequence needs a block in each group in which its last block is full. If blocks are
short, drafts are left out before a sequence is preempted.

Every request ends:

1. A running sequence that is not preempted computes a token or more in each step. The budget has a token for every
   sequence, which drafts leave to it. Preemption frees the blocks that decodes need. A chunk's blocks are promised, and
   always free: to take a block makes the promise smaller by one, to free an own block larger by one, and to free a
   shared block, which may stay in use, leaves it. Nothing is admitted while a prompt is in progress, so its own blocks
   stay its own.
2. The running sequence of the best rank is preempted only if it runs alone. Alone it always fits, and is admitted: all
   blocks in use are its own, at most `pages_for_request` of its tokens, which bounds `context_len`.
3. When it ends, another sequence has the best rank. A waiting request is overtaken only by requests of better rank.

One prompt is in progress at a time, so prompts with a common beginning compute it once: the next finds the blocks of
the one before. The end of equal prompts, which is in no full block, is copied (`prompt_tails`).

Steps may overlap. `schedule` counts a step as computed at once, so it can be called again before `update` has brought
that step's tokens, which are then only on the device. Updates come in the order of the schedules. Slot and blocks of a
request whose last token is in flight are free for the next step, because steps run in order. For the same reason a
block behind a window may be written by the step whose schedule frees it: all steps that read it come before.

A step with drafts accepts one token or more. Until it is updated, a request has two bounds of its computed tokens. It
gets blocks up to the upper bound. Blocks behind a window are freed, and the end is foreseen, by the lower bound alone.
Blocks are published when all their tokens are known. A runner writes nothing at and after position `max_len` - 1, and
what it computes after the end of a request is dropped.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from itertools import compress, islice, repeat
from operator import attrgetter
from typing import Literal

from phonograph.core.batch import BlockAppend, DraftCounts, NewSequence, ScheduledBatch, StepOutput
from phonograph.core.kv_group import KVGroup
from phonograph.core.limits import Limits
from phonograph.core.request import FinishReason, Request, RequestState
from phonograph.errors import RequestError
from phonograph.kv_cache.block_events import BlockEvents
from phonograph.scheduling.check_prompt import check_prompt
from phonograph.scheduling.draft_depths import DraftDepths, granted_depths
from phonograph.scheduling.request_blocks import Checkpoints, RequestBlocks
from phonograph.scheduling.scheduler_stats import SchedulerStats
from phonograph.scheduling.step_results import (
    correct_bounds,
    take_failures,
    take_logprobs,
    take_prompts,
    take_tokens,
)

_RANK = attrgetter("rank")


class Scheduler:
    """Owner of the requests from `add` until they end. One thread drives it.

    Batches run in their order. Each with sequences must be passed to `update`, in the same order. A batch without
    sequences (nothing can run, or all that runs is in flight) needs neither.

    Args:
        limits: what runs at once. A step has a token for every running sequence.
        groups: KV groups of the model.
        num_blocks: KV blocks, each of any group.
        enable_prefix_caching: reuse the blocks of prompts that begin alike.
        policy: "fcfs" serves by arrival; "priority" by priority, then arrival.
        drafts: chooses the drafts of each decode; None for none. The engine tells it the results.
        checkpoints: of states, for the prefix cache of a model whose layers have them.
        events: records what enters and leaves the prefix cache; None for nothing.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        groups: Sequence[KVGroup],
        num_blocks: int,
        enable_prefix_caching: bool = True,
        policy: Literal["fcfs", "priority"] = "fcfs",
        drafts: DraftDepths | None = None,
        checkpoints: Checkpoints | None = None,
        events: BlockEvents | None = None,
    ) -> None:
        assert limits.max_num_batched_tokens >= limits.max_num_seqs
        self.limits = limits
        self.groups, self.num_blocks = tuple(groups), num_blocks
        self.policy = policy
        self.drafts, self.events = drafts, events
        self._blocks = RequestBlocks(
            limits, groups, drafts, checkpoints, events, num_blocks, enable_prefix_caching=enable_prefix_caching
        )
        self.context_len = self._blocks.longest_request  # the model's context, or what the blocks hold
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # sorted by rank
        # Running sequences: the decodes by slot, and the sequence whose prompt is in progress.
        self._decoding: dict[int, Request] = {}
        self._prefilling: Request | None = None
        self._last_scheduled: list[Request] = []  # their last token is in the latest batch or an earlier one
        self._prefilled: list[Request] = []  # the end of their prompt is in the latest batch
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._freed: list[int] = []  # since the last batch
        self._in_flight: deque[tuple[ScheduledBatch, list[Request]]] = deque()
        self._num_added = self._num_preemptions = self._prefix_queries = self._prefix_hits = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot."""
        return len(self._waiting)

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._requests) - self.num_waiting,
            num_waiting=self.num_waiting,
            blocks_used=self._blocks.cache.pool.num_used,
            num_blocks=self.num_blocks,
            num_preemptions=self._num_preemptions,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            drafts=DraftCounts() if self.drafts is None else self.drafts.counts,
            checkpoints=self._blocks.checkpoint_counts,
        )

    @property
    def _running(self) -> list[Request]:
        return [*self._decoding.values(), *([self._prefilling] if self._prefilling else [])]

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestError: as `check_request`.
        """
        self.check_request(request)
        request.max_len = min(request.prompt_len + (request.params.max_tokens or self.context_len), self.context_len)
        request.rank = (request.priority if self.policy == "priority" else 0, request.arrival, self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        self._blocks.add(request)
        insort(self._waiting, request, key=_RANK)

    def check_request(self, request: Request) -> None:
        """Check that a request can be added.

        Raises:
            RequestError: its prompt is empty or too long, or its id is in use.
        """
        if request.request_id in self._requests:
            raise RequestError("request_id", request.request_id, "is in use by a request that has not ended")
        check_prompt(request.prompt_len, self.limits, context_len=self.context_len)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; return False if the id is unknown (it has ended already)."""
        return self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> bool:
        """End a request for a reason outside the scheduler, such as a stop string; return False as `abort`."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason, stop_reason)
        return request is not None

    def fail(self, request_id: str) -> bool:
        """End a request whose work failed, in any state; return False as `abort`.

        The blocks that it computed are removed from the prefix cache, because their contents may be wrong.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._blocks.cache.forget(self._blocks.tables[request_id])
        self._finish(request, "abort", None)
        return True

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running sequences continue, but what they compute is not found by others."""
        self._blocks.reset_prefix_cache()

    def preempt_all(self) -> None:
        """Take slots and blocks from all running requests, which are computed again later. No step is in flight."""
        assert not self._in_flight, "tokens of a step in flight would be lost"
        for request in self._running:
            self._preempt(request)

    def schedule(self) -> ScheduledBatch:
        """Return the next step. For running decodes the cost is a short loop, with more to do at block boundaries."""
        self._release_ending()
        self._blocks.free_behind(one for one in self._prefilled if one.state is RequestState.RUNNING)
        self._prefilled.clear()
        self._blocks.tails.begin_batch()
        depths, may_admit = self._make_room()
        slots = list(self._decoding)
        requests = list(self._decoding.values())
        contexts = [request.max_computed for request in requests]
        appends: list[BlockAppend] = []
        block_step, ahead = self._blocks.step, self._blocks.ahead
        for request, depth in zip(requests, depths, strict=False):
            request.max_computed += depth
            self._blocks.extend(request, request.max_computed + 1, appends)
        for request in requests:
            most = request.max_computed
            if (most + ahead) % block_step == 0:
                self._blocks.extend(request, most + 1, appends)
            request.max_computed = most + 1
            request.min_computed = least = request.min_computed + 1
            if least + 1 == request.max_len:
                self._last_scheduled.append(request)
        num_decodes, num_decode_tokens = len(slots), len(slots) + sum(depths)
        query_lens = [1 + depth for depth in depths] or [1] * num_decodes
        samples = [True] * num_decodes
        budget, complete = self.limits.max_num_batched_tokens - num_decode_tokens, True
        new: list[NewSequence] = []
        prefills: list[tuple[Request, int, int, bool]] = []
        while budget and complete:
            request = self._prefilling
            is_new = request is None
            if request is None:
                request = self._admit(budget) if may_admit else None
                if request is None:
                    break
                new.append(request.new_sequence())
            context = request.max_computed
            query_len = self._blocks.chunk(request, budget, is_new=is_new)
            budget -= query_len
            self._blocks.extend(request, context + query_len, appends, is_new=is_new)
            request.min_computed = request.max_computed = context + query_len
            self._blocks.publish(request)
            complete = context + query_len == (num_tokens := request.num_tokens)
            if complete:
                self._prefilling = None
                self._decoding = self._blocks.place(request, self._decoding)
                self._prefilled.append(request)
                if num_tokens + 1 == request.max_len:
                    self._last_scheduled.append(request)
                else:
                    self._blocks.tails.computes(request)
            prefills.append((request, context, query_len, complete))

        # Prefills of one token come first: many backends take them together with decodes of one token.
        for request, context, query_len, complete in sorted(prefills, key=lambda prefill: prefill[2] > 1):
            slots.append(request.slot)
            query_lens.append(query_len)
            contexts.append(context)
            samples.append(complete)
            requests.append(request)
        if not slots:
            return ScheduledBatch()
        batch = ScheduledBatch(
            slots=slots,
            query_lens=query_lens,
            context_lens=contexts,
            samples=samples,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_tokens=self.limits.max_num_batched_tokens - budget,
            new=new,
            appends=appends,
            freed=self._freed,
            makes_drafts=self._blocks.makes_drafts(requests),
            **self._blocks.take_copies(),
        )
        self._freed = []
        self._in_flight.append((batch, requests))
        return batch

    def update(self, batch: ScheduledBatch, output: StepOutput) -> list[Request]:
        """Take the tokens of the oldest batch in flight, and end the requests that are complete.

        Returns:
            The requests that failed, then those that got tokens, each in batch order; those that ended are `finished`.
        """
        scheduled, requests = self._in_flight.popleft()
        assert scheduled is batch, "batches must be updated in the order in which they were scheduled"
        assert output.slots == list(compress(batch.slots, batch.samples)), "an output is not that of its batch"
        pooled = take_prompts(batch, requests, output) if output.prompt_logprobs or output.pooled else ()
        news = take_failures(batch, requests, output) if output.failures else []
        for request in news:
            self.fail(request.request_id)
        if batch.num_decode_tokens > batch.num_decodes:
            self._last_scheduled += correct_bounds(batch, requests, output)
        scored = take_logprobs(batch, requests, output) if output.logprobs else ()
        news += take_tokens(batch, requests, output, self._finish)
        for request in scored:
            del request.logprobs[len(request.output_token_ids) :]
        for request in pooled:
            if not request.finished:
                self._finish(request, "stop", None)
        return news

    def _release_ending(self) -> None:
        """Release slot and blocks of requests whose last token is in flight.

        This is done one step after that token was scheduled. Then, with one step in flight, all tokens that it computed
        are known, and all its full blocks can be found.
        """
        for request in self._last_scheduled:
            if request.state is RequestState.RUNNING:
                self._release(request)
                request.state = RequestState.ENDING
        self._last_scheduled.clear()

    def _make_room(self) -> tuple[list[int], bool]:
        """Leave drafts out and preempt until every decode can have the blocks it needs.

        Returns:
            The drafts of each decode, or an empty list if there are none; and True if no blocks were short.
        """
        blocks, decodes = self._blocks, self._decoding.values()
        depths: list[int] = []
        if self.drafts is not None and decodes:
            depths = granted_depths(self.drafts.choose(decodes), decodes, self.limits)
            if self.drafts.caches is not None:
                self.drafts.caches.begin(self._running)
        if blocks.suffices(len(decodes), self._prefilling):
            return depths, True
        needs = blocks.needs(decodes, depths or repeat(0))
        needed, were_short = sum(needs.values()), blocks.num_unpromised(self._prefilling) < blocks.growth(decodes)
        if any(depths) and needed > blocks.num_unpromised(self._prefilling):
            depths, were_short = [], True
            needed = sum((needs := blocks.needs(decodes, repeat(0))).values())
        while needed > blocks.num_unpromised(self._prefilling):
            victim = max(self._running, key=_RANK)
            needed -= needs.pop(victim.request_id, 0)
            self._preempt(victim)
            depths, were_short = [], True
        return depths, not were_short

    def _admit(self, budget: int) -> Request | None:
        """Give the first waiting request a slot and blocks, if there are enough for all its tokens."""
        if not self._waiting or not self._free_slots:
            return None
        request = self._waiting[0]
        resumed = request.state is RequestState.PREEMPTED
        if resumed and any(request in requests for _, requests in self._in_flight):
            return None  # some of its tokens are still unknown
        # Prompt logprobs need the logits of all prompt tokens; a preemption may have interrupted them.
        if unscored := request.unscored:
            request.prompt_logprobs.clear()
        reuse = not (unscored or request.params.skip_reading_prefix_cache)
        if reuse and self._blocks.tails.is_worth_waiting(request, islice(self._waiting, len(self._free_slots))):
            return None
        num_cached = self._blocks.admit(request, self._decoding.values(), budget=budget, reuse=reuse)
        if num_cached is None:
            return None
        del self._waiting[0]
        request.min_computed = request.max_computed = num_cached
        if not resumed:
            request.admit(num_cached)
            self._prefix_queries += request.prompt_len
            self._prefix_hits += num_cached
        request.state = RequestState.RUNNING
        request.slot = self._free_slots.pop()
        self._prefilling = request
        return request

    def _release(self, request: Request) -> None:
        """Take slot and blocks from a running request; its full blocks stay in the prefix cache."""
        self._blocks.free(request)
        request.min_computed = request.max_computed = 0
        if request is self._prefilling:
            self._prefilling = None
        else:
            del self._decoding[request.slot]
        self._free_slots.append(request.slot)
        self._freed.append(request.slot)
        request.slot = -1

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.preempt()
        insort(self._waiting, request, key=_RANK)
        self._num_preemptions += 1

    def _finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        if request.state is RequestState.RUNNING:
            self._release(request)
        elif request.state is not RequestState.ENDING:
            del self._waiting[bisect_left(self._waiting, request.rank, key=_RANK)]
        del self._requests[request.request_id], self._blocks.tables[request.request_id]
        request.state = RequestState.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
