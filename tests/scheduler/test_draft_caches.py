"""A draft model inside the steps: an engine that gains nothing rests, and what its draft model lacks is not used."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scheduling import add, make_scheduler, request

from phonograph.core.batch import ScheduledBatch, StepOutput
from phonograph.core.request import Request
from phonograph.scheduling.draft_budget import RESTS, DraftBudget
from phonograph.scheduling.scheduler import Scheduler
from phonograph.speculation.device_drafts import DeviceDrafts

K = 4
SLOTS = 4
PLAIN, PASSES = 1.0, 0.4
"""Seconds of a step, and of the draft model's passes behind it."""


def seconds_of(batch: ScheduledBatch) -> float:
    return PLAIN + PASSES * batch.makes_drafts + 0.01 * (batch.num_decode_tokens - batch.num_decodes)


class Engine:
    """Scheduler and simulated steps, whose drafts are accepted with a probability by request."""

    def __init__(
        self,
        accepts: Callable[[Request], float],
        *,
        adaptive: bool = True,
        slots: int = SLOTS,
        timed: Sequence[int] = (1, SLOTS),
        **sizes: object,
    ) -> None:
        self.budget = DraftBudget([K] * (slots + 1), max_num_seqs=slots, adaptive=adaptive, in_steps=True)
        for number in timed:  # when the engine starts
            for drafts, seconds in ((0, PLAIN), (K * number, PLAIN + PASSES + 0.01 * K * number)):
                self.budget.costs.learn(number, drafts, seconds)
        drafts = DeviceDrafts(self.budget, max_num_logits=slots * (1 + K), slow_masks=np.zeros(slots), in_steps=True)
        wanted = {"max_num_seqs": slots, "num_blocks": 400, "max_num_batched_tokens": 64, "max_model_len": 256}
        self.slots = slots
        self.scheduler: Scheduler = make_scheduler(drafts=drafts, **{**wanted, **sizes})
        self.accepts, self.rng = accepts, random.Random(5)
        self.seconds, self.tokens, self.num_added = 0.0, 0, 0
        self.batches: list[ScheduledBatch] = []

    def add(self, **params: object) -> Request:
        self.num_added += 1
        prompt = params.pop("prompt", None) or [1000 + self.num_added] * 8
        one = request(str(self.num_added), prompt=prompt, **{"max_tokens": 60, "ignore_eos": True, **params})
        add(self.scheduler, one)
        return one

    def step(self) -> ScheduledBatch:
        whole = {one.request_id for one in self.scheduler._running if one.whole_drafts}
        before = {one.slot: one for one in self.scheduler._running}
        batch = self.scheduler.schedule()
        running = {one.slot: one for one in self.scheduler._running} | before
        runs: list[list[int]] = []
        for slot, length in [*zip(batch.slots, batch.query_lens, strict=True)][: batch.num_decodes]:
            assert length == 1 or (batch.makes_drafts and running[slot].request_id in whole), "drafts that no step made"
            kept = 0
            while kept < length - 1 and self.rng.random() < self.accepts(running[slot]):
                kept += 1
            runs.append([7] * (1 + kept))
        runs += [[7]] * sum(batch.samples[batch.num_decodes :])
        output = StepOutput(
            slots=[slot for slot, one in zip(batch.slots, batch.samples, strict=True) if one], token_ids=runs
        )
        lasts = seconds_of(batch)
        self.seconds, self.tokens = self.seconds + lasts, self.tokens + sum(map(len, runs))
        self.scheduler.drafts.learn(batch, output, lasts)
        self.scheduler.update(batch, output)
        self.batches.append(batch)
        return batch

    def run(self, steps: int) -> float:
        """Keep all slots busy; return tokens a second."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(steps):
            while len(self.scheduler._requests) < self.slots:
                self.add()
            self.step()
        return (self.tokens - tokens) / (self.seconds - seconds)


def test_drafts_in_vain_cost_a_hundredth() -> None:
    engine = Engine(lambda _: 0.0)
    first = engine.run(600)
    later = engine.run(2400)
    assert first > 0.97 * SLOTS / PLAIN and later > 0.985 * SLOTS / PLAIN
    tried = sum(batch.makes_drafts for batch in engine.batches[600:])
    assert 0 < tried < 200, "trials go on"
    assert dict(engine.budget.counts.choices)[RESTS] > 2000


@pytest.mark.parametrize("slots", [2, 3, 6, 8, 12])
@pytest.mark.parametrize("probability", [0.05, 0.1, 0.15, 0.2])
def test_few_right_drafts_of_batches_that_were_not_timed(slots: int, probability: float) -> None:
    """The engine starts with drafts, so that no plain step of this size is known."""
    engine = Engine(lambda _: probability, slots=slots, timed=(1, 4, 16))
    assert engine.run(1500) > 0.97 * slots / PLAIN


@pytest.mark.parametrize("probability", [0.7, 1.0])
def test_drafts_that_gain_are_always_made(probability: float) -> None:
    engine, fixed = (Engine(lambda _: probability, adaptive=adaptive) for adaptive in (True, False))
    assert engine.run(600) > 0.95 * fixed.run(600) > 1.3 * SLOTS / PLAIN
    assert all(batch.makes_drafts for batch in engine.batches)


def test_an_engine_wakes_up() -> None:
    """Requests that start while it rests have no drafts to their end; those that start later have."""
    accepts = {"now": 0.0}
    engine = Engine(lambda _: accepts["now"])
    engine.run(600)
    accepts["now"] = 0.9
    engine.run(600)
    assert engine.run(600) > 1.5 * SLOTS / PLAIN


def test_what_a_rest_leaves_out_is_not_shared() -> None:
    engine = Engine(lambda _: 0.0)
    whole = engine.add(prompt=[*range(100, 124)])
    while engine.step().makes_drafts:
        assert whole.whole_drafts
    assert not whole.whole_drafts and len(whole.output_token_ids) < 16
    while not whole.finished:
        engine.step()
    engine.budget.makes_drafts = True
    prompt, output = whole.prompt_token_ids, whole.output_token_ids
    of_prompt, of_both, late = (engine.add(prompt=one) for one in ([*prompt, 5], prompt + output, [*range(200, 224)]))
    engine.step()
    assert of_prompt.num_cached_tokens == 24 and of_both.num_cached_tokens > 60
    assert (of_prompt.whole_drafts, of_both.whole_drafts, late.whole_drafts) == (True, False, True)


def test_a_tail_without_keys_of_the_draft_model_is_not_copied_for_drafts() -> None:
    """A prompt in no full block, whose first request has no drafts."""
    engine, prompt = Engine(lambda _: 1.0), [*range(100, 104)]
    plain = engine.add(prompt=prompt, speculate=False)
    engine.step()
    another, whole = engine.add(prompt=prompt, speculate=False), engine.add(prompt=prompt)
    batch = engine.step()
    assert (batch.query_lens[1:], len(batch.copies)) == ([1, 4], 1)
    assert [one.whole_drafts for one in (plain, another, whole)] == [False, False, True]
    # The request that computed the end has it for others.
    late = engine.add(prompt=prompt)
    assert engine.step().copies and late.whole_drafts


def test_blocks_with_new_contents_are_whole() -> None:
    """All blocks were filled without drafts, and are taken anew."""
    engine = Engine(lambda _: 0.0, num_blocks=20, max_model_len=64)
    engine.budget.makes_drafts = False
    for _ in range(4):
        one = engine.add(max_tokens=40)
        while not one.finished:
            engine.step()
    engine.budget.makes_drafts = True
    first, again = engine.add(prompt=[7] * 3 + [8] * 30, max_tokens=2), None
    while not first.finished:
        engine.step()
    again = engine.add(prompt=[7] * 3 + [8] * 30, max_tokens=2)
    engine.step()
    assert again.num_cached_tokens >= 28 and again.whole_drafts


def test_requests_without_drafts_let_the_engine_rest() -> None:
    engine = Engine(lambda _: 1.0)
    plain = engine.add(speculate=False, max_tokens=5)
    assert not any(engine.step().makes_drafts for _ in range(3))
    drafting = engine.add(max_tokens=20)
    assert engine.step().makes_drafts and drafting.whole_drafts and not plain.whole_drafts
