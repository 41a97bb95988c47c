"""Steps of a runner with several KV groups by hand: pages behind windows are freed, poisoned and given to others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from phonograph.core.batch import BlockAppend, NewSequence, ScheduledBatch
from phonograph.core.blocks import blocks_for
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.build import Engine


@dataclass(slots=True)
class Hand:
    """A sequence: its tokens, those computed, and its pages by group and entry, freed ones included."""

    slot: int
    tokens: list[int]
    prompt_len: int
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list[list[int]])
    first_live: list[int] = field(default_factory=list[int])
    logprobs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    pending: list[BlockAppend] = field(default_factory=list[BlockAppend])
    is_new: bool = True


class GroupDriver:
    """Runs sequences greedily. Memory that no sequence may read is NaN.

    Args:
        engine: engine whose runner is driven, without its scheduler.
        chunk: largest query of a step.
        seed: of the order in which pages are given out.
    """

    def __init__(self, engine: Engine, *, chunk: int, seed: int = 0) -> None:
        self.runner, self.groups, self.chunk = engine.core.runner, engine.plan.kv.groups, chunk
        self.vocab_size = engine.plan.model.vocab_size
        self.caches = self.runner._program.attention._kv_caches
        generator = torch.Generator().manual_seed(seed)
        self.free = torch.randperm(engine.plan.memory.num_blocks, generator=generator).tolist()
        self.owners: Counter[int] = Counter()
        self.free_slots = list(range(engine.plan.limits.max_num_seqs))
        self.freed_slots: list[int] = []
        self.most_live: Counter[int] = Counter()
        """Most pages of one sequence at a time, by group."""
        for cache in self.caches:
            cache.fill_(torch.nan)

    def add(self, prompt: list[int], parent: Hand | None = None) -> Hand:
        """Add a sequence. With a parent, it begins with the parent's computed tokens, whose pages it shares."""
        hand = Hand(self.free_slots.pop(0), list(prompt), len(prompt))
        if parent is None:
            hand.tables, hand.first_live = [[] for _ in self.groups], [0] * len(self.groups)
        else:
            hand.computed = parent.computed
            assert prompt[: hand.computed] == parent.tokens[: hand.computed]
            assert all(hand.computed % group.block_size == 0 for group in self.groups)
            hand.tables = [list(table) for table in parent.tables]
            hand.first_live = list(parent.first_live)
            for group, (table, first) in enumerate(zip(hand.tables, hand.first_live, strict=True)):
                self.owners.update(table[first:])
                hand.pending.append(BlockAppend(slot=hand.slot, start=first, block_ids=table[first:], group=group))
        return hand

    def end(self, hand: Hand) -> None:
        """Free a sequence's slot and pages. The slot's block tables keep their entries."""
        for table, first in zip(hand.tables, hand.first_live, strict=True):
            self._release(table[first:])
        self.free_slots.append(hand.slot)
        self.freed_slots.append(hand.slot)

    def step(self, *hands: Hand) -> None:
        """Run a step of these sequences: a chunk of a prompt, or the last token."""
        queries = {hand.slot: min(self.chunk, len(hand.tokens) - hand.computed) for hand in hands}
        order = sorted(hands, key=lambda hand: queries[hand.slot])
        query_lens = [queries[hand.slot] for hand in order]
        batch = ScheduledBatch(
            slots=[hand.slot for hand in order],
            query_lens=query_lens,
            context_lens=[hand.computed for hand in order],
            samples=[hand.computed + queries[hand.slot] == len(hand.tokens) for hand in order],
            num_decodes=query_lens.count(1),
            num_tokens=sum(query_lens),
            new=[self._new(hand) for hand in order if hand.is_new],
            appends=[append for hand in order for append in self._appends(hand, queries[hand.slot])],
            freed=self.freed_slots,
        )
        self.freed_slots = []
        output = self.runner.submit(batch).result()
        assert not output.failures
        sampled = dict(zip(output.slots, output.token_ids, strict=True))
        for hand in order:
            hand.computed += queries[hand.slot]
            hand.is_new = False
            if hand.slot in sampled:
                hand.tokens += sampled[hand.slot]
                scores = torch.full((self.vocab_size,), torch.nan, dtype=torch.float64)
                (row,) = output.logprobs[hand.slot]
                scores[row.token_ids] = torch.tensor(row.logprobs, dtype=torch.float64)
                hand.logprobs.append(scores)
            self._free(hand)

    def _new(self, hand: Hand) -> NewSequence:
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, logprobs=self.vocab_size)
        return NewSequence(
            slot=hand.slot,
            request_id=str(hand.slot),
            token_ids=list(hand.tokens),
            prompt_len=hand.prompt_len,
            num_computed=hand.computed,
            params=params,
        )

    def _appends(self, hand: Hand, query_len: int) -> list[BlockAppend]:
        appends, hand.pending = hand.pending, []
        for group, (kv, table) in enumerate(zip(self.groups, hand.tables, strict=True)):
            count = blocks_for(hand.computed + query_len, kv.block_size) - len(table)
            if count > 0:
                ids = [self.free.pop() for _ in range(count)]
                self.owners.update(ids)
                shared = next((append for append in appends if append.group == group), None)
                if shared is None:
                    appends.append(BlockAppend(slot=hand.slot, start=len(table), block_ids=ids, group=group))
                else:
                    shared.block_ids.extend(ids)
                table.extend(ids)
            live = len(table) - hand.first_live[group]
            self.most_live[group] = max(self.most_live[group], live)
        return appends

    def _free(self, hand: Hand) -> None:
        """Free the blocks that no later token attends to, and poison them."""
        for group, (kv, table) in enumerate(zip(self.groups, hand.tables, strict=True)):
            if kv.window is None:
                continue
            first = max(0, hand.computed + 1 - kv.window) // kv.block_size
            self._release(table[hand.first_live[group] : first])
            hand.first_live[group] = max(first, hand.first_live[group])

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self.owners[page] -= 1
            if not self.owners[page]:
                # The oldest free page is given out last, so that some stay poisoned for long.
                self.free.insert(0, page)
                for cache in self.caches:
                    cache[:, page] = torch.nan
