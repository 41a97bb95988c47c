"""Depth of speculation: the drafts that each decode verifies, so that speculation is never slower than without.

A step with drafts takes longer and yields more tokens. The budget knows how long steps of each size take
(`StepCosts`) and how probable it is that a draft is accepted (`DraftAcceptance`). Of all numbers of drafts, it takes
the one with the most expected tokens a second, none included. It gives them to the requests whose drafts are the most
probable to be accepted.

A request that has accepted no draft yet has the acceptance of others for a start. Its first drafts are few, and they
are made only while drafts have gained more time than they cost, a small share of all time aside. So in an engine whose
requests are short and accept nothing, few of them try.

A request whose drafts gain nothing for some steps *rests*: no drafts are made for it. Now and then a resting request
verifies drafts as a probe. Probes take at most a hundredth of the time: what a probe may cost is saved up from the
steps before, so that dear probes are rare. A request whose probe shows a gain wakes.

Where a draft model runs inside the steps, its passes take time in each of them, drafts verified or not. So the engine
itself rests there when no request gains: its steps make no drafts. Those of a request that starts later are a probe of
the engine, again within a hundredth of the time.

Everything is learnt from durations that the caller measures. There is no clock here, and no device: drafts may be kept
anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from phonograph.core.batch import DraftCounts, ScheduledBatch, StepOutput
from phonograph.core.request import Request
from phonograph.scheduling.draft_acceptance import DraftAcceptance
from phonograph.scheduling.draft_counter import DraftCounter
from phonograph.scheduling.step_costs import StepCosts, size_of

FIXED = "fixed"
NO_DRAFTS = "no drafts"
BATCH_SIZE = "batch size"
TIMING = "plain step, to time it"
GAIN = "gain"
NO_GAIN = "no gain"
PROBE = "probe"
RESTS = "the engine rests"

_PROBE_SHARE = 0.01
"""Time that probes may cost, of all time."""
_TRIAL_SHARE = 0.015
"""Time that the first drafts of requests may cost beyond what drafts gain, likewise."""
_SAVED_STEPS = 8
"""Most that is saved up for probes, in steps."""
_MOST_OWED = 50
"""Most that drafts made in vain may cost ahead, likewise."""
_STEPS_BEFORE_REST = 8
"""Steps in a row in which a request has drafts and none is verified, before it rests."""
_FIRST_REST, _LONGEST_REST = 16, 512
"""Steps until the probe of a resting request; they double after each probe in vain."""
_STEPS_WITHOUT_PLAIN = 8
"""Steps with drafts after which a plain one is timed again, by the number of those that were timed: 8 for the first,
16 after two, up to 128."""
_GAIN_TO_START, _GAIN_TO_STAY = 1.03, 1.01
"""Expected tokens a second with drafts, over those without, that a step with drafts must have after one without, and
after one with drafts. Smaller gains are within the noise of durations."""
_IDLE_STEPS = 2
"""Steps in a row that make drafts and verify none, before an engine rests."""
_TRIAL_RUNS = 6
"""Decodes that verify all drafts after an engine has rested."""
_FIRST_DRAFTS = 2
"""Most drafts of a request that has not accepted one."""
_STEPS_WITHOUT_DEEP = 16
"""Steps until all drafts are verified again where fewer gain more."""


class DepthChoice(NamedTuple):
    """Depths of a step, with their reason.

    Attributes:
        depths: drafts of each decode.
        reason: one of the constants of this module.
    """

    depths: list[int]
    reason: str


class DraftBudget:
    """Chooses the drafts of each step, and learns from the steps.

    Args:
        limits: most drafts of a decode, by the number of decodes.
        max_num_seqs: slots.
        adaptive: False verifies all drafts, up to the limits.
        costs: durations that are known already, such as those of replays at the start.
        in_steps: drafts are made at the end of the steps, so that one that makes none takes less time.

    Attributes:
        most: largest depth.
        makes_drafts: False while the engine rests.
    """

    def __init__(
        self,
        limits: Sequence[int],
        *,
        max_num_seqs: int,
        adaptive: bool = True,
        costs: StepCosts | None = None,
        in_steps: bool = False,
    ) -> None:
        self.most = max(limits)
        self.adaptive = adaptive
        self.makes_drafts = True
        self.costs = costs or StepCosts()
        self._in_steps = in_steps
        self._idle_steps = self._trial_runs = 0
        self._limits = limits
        self._acceptance = DraftAcceptance(max_num_seqs, self.most)
        self._owners = [""] * max_num_seqs
        self._steps_without = [0] * max_num_seqs  # steps in a row that had drafts and verified none
        # Of a resting slot: the length of its rest, and the step that may probe. 0 for a slot that is awake.
        self._rests = [0] * max_num_seqs
        self._probe_steps = [0] * max_num_seqs
        self._step = 0
        self._last_tried = [0] * max_num_seqs
        self._speculates = True
        self._next_deep = 0
        self._saved = 0.0  # seconds that probes may cost
        self._balance = 0.0  # seconds that drafts have gained, with the share of all that they may cost
        self._since_plain: dict[int, int] = {}  # steps with drafts since a plain one, by the size of the requests
        self._choices: Counter[str] = Counter()
        self._counter = DraftCounter(self.most)

    @property
    def counts(self) -> DraftCounts:
        """Counts since the start."""
        return self._counter.counts._replace(choices=tuple(self._choices.items()))

    def wants_drafts(self, slot: int) -> bool:
        """Return True if the next step may verify drafts of a slot, so that they are to be made."""
        return not self._rests[slot] or self._step >= self._probe_steps[slot]

    def try_again(self, number: int) -> None:
        """Let a resting engine make drafts if the time saved up pays for a trial.

        Args:
            number: decodes of the steps to come.
        """
        if self.makes_drafts:
            return
        plain, drafting = self.costs.estimate(number, np.array([0, number * self.most]))
        # Requests come together, or one by one.
        price = (_TRIAL_RUNS / number + 1 + _IDLE_STEPS) * float(drafting - plain)
        if price <= self._saved:  # `learn` takes what the trial costs
            self.makes_drafts, self._trial_runs, self._idle_steps = True, _TRIAL_RUNS, 0

    def choose(self, decodes: Collection[Request], available: Sequence[int]) -> DepthChoice:
        """Choose the depth of each decode.

        Args:
            decodes: running requests past their prompts.
            available: drafts that each has, or may have.
        """
        choice = self._choose(decodes, available)
        self._choices[choice.reason] += 1
        return choice

    def learn(self, batch: ScheduledBatch, output: StepOutput, seconds: float) -> None:
        """Take the result of a step, and its duration."""
        number, tokens = batch.num_decodes, batch.num_decode_tokens
        if self.adaptive and number == batch.num_reqs:
            if tokens > number or not batch.makes_drafts:
                self.costs.learn(number, tokens - number, seconds)
            saved, balance = _PROBE_SHARE * seconds, _TRIAL_SHARE * seconds
            if tokens > number or batch.makes_drafts:
                plain, drafting = self.costs.estimate(number, np.array([0, tokens - number])).tolist()
                gained = plain * sum(map(len, output.token_ids)) / number
                saved += gained - seconds if batch.makes_drafts else 0.0
                balance += gained - drafting
            self._saved = min(max(self._saved + saved, -_MOST_OWED * seconds), _SAVED_STEPS * seconds)
            self._balance = min(self._balance + balance, _SAVED_STEPS * seconds)
            size = size_of(number, 8)
            self._since_plain[size] = 1 + self._since_plain.get(size, 0) if tokens > number else 0
        if tokens == number:
            return
        runs = zip(batch.slots[:number], batch.query_lens, output.token_ids, strict=False)
        verified = [(slot, length - 1, len(run) - 1) for slot, length, run in runs if length > 1]
        slots, depths, accepted = np.array(verified).T
        self._counter.add(depths, accepted)
        if not self.adaptive:
            return
        self._acceptance.learn(slots, depths, accepted)
        for slot, _, kept in verified:
            self._last_tried[slot] = self._step
            if self._rests[slot]:
                self._end_probe(slot, number, kept)

    def _choose(self, decodes: Collection[Request], available: Sequence[int]) -> DepthChoice:
        self._step += 1
        number = len(decodes)
        for request in decodes:
            if self._owners[request.slot] != request.request_id:
                self._start(request.slot, request.request_id)
        if not self.makes_drafts:
            return DepthChoice([0] * number, RESTS)
        choice = self._choose_awake(decodes, available)
        if self._in_steps and self.adaptive and any(one.whole_drafts for one in decodes):
            self._idle_steps = 0 if any(choice.depths) else self._idle_steps + 1
            self.makes_drafts = self._idle_steps < _IDLE_STEPS
        return choice

    def _choose_awake(self, decodes: Collection[Request], available: Sequence[int]) -> DepthChoice:
        number = len(decodes)
        if not any(available):
            return DepthChoice([0] * number, NO_DRAFTS)
        limit = self._limits[number]
        if not limit:
            return DepthChoice([0] * number, BATCH_SIZE)
        if not self.adaptive:
            return DepthChoice([min(one, limit) for one in available], FIXED)
        if self._trial_runs > 0:
            self._trial_runs -= sum(map(bool, available))
            return DepthChoice([min(one, limit) for one in available], PROBE)
        since_plain = 0 if self._in_steps else self._since_plain.get(size_of(number, 8))
        num_timed = min(max(self.costs.num_plain_steps(number), 1), 16)
        if since_plain is None or since_plain >= _STEPS_WITHOUT_PLAIN * num_timed:
            self._since_plain[size_of(number, 8)] = 0
            return DepthChoice([0] * number, TIMING)
        slots = np.array([request.slot for request in decodes])
        most = np.minimum(available, limit)
        resting = np.array([self._rests[slot] > 0 for slot in slots])
        depths = self._divide(slots, np.where(resting, 0, most))
        self._rest_without_gain(slots, most, depths, resting)
        reason = GAIN if depths.any() else NO_GAIN
        if resting.any():
            probes = self._probe(slots, np.where(resting, most, 0), depths)
            if probes.any():
                depths, reason = depths + probes, PROBE
        return DepthChoice(depths.tolist(), reason)

    def _start(self, slot: int, owner: str) -> None:
        self._owners[slot] = owner
        self._acceptance.start(slot)
        self._rests[slot] = self._steps_without[slot] = 0
        self._last_tried[slot] = self._step

    def _divide(self, slots: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Return the depths with the most expected tokens a second.

        Args:
            slots: int [N].
            most: most drafts of each, int [N].
        """
        number, may_lose = len(slots), self._in_steps or self._balance > 0
        gains = self._acceptance.gains(slots, hopeful=may_lose)
        if not self._in_steps:  # else the passes of a draft model take time anyway
            first = np.minimum(most, _FIRST_DRAFTS if may_lose else 0)
            most = np.where(self._acceptance.has_accepted(slots), most, first)
        gains[np.arange(self.most) >= most[:, None]] = -1.0
        # Gains of a slot fall with the position, and equal ones keep their order, so that no position is skipped.
        order = np.argsort(-gains, axis=None, kind="stable")[: most.sum()]
        tokens = number + np.concatenate(([0.0], np.cumsum(gains.flat[order])))
        seconds = self.costs.estimate(number, np.arange(len(tokens)))
        rates = tokens / seconds
        best = int(rates.argmax())
        if rates[best] < rates[0] * (_GAIN_TO_STAY if self._speculates else _GAIN_TO_START):
            best = 0
        self._speculates = best > 0
        loss = float(seconds[-1] - tokens[-1] / rates[best])
        if best < len(order) and self._step >= self._next_deep and loss <= self._saved:
            self._saved -= loss
            self._next_deep = self._step + _STEPS_WITHOUT_DEEP
            best = len(order)
        return np.bincount(order[:best] // self.most, minlength=number)

    def _rest_without_gain(self, slots: np.ndarray, most: np.ndarray, depths: np.ndarray, resting: np.ndarray) -> None:
        tired: list[int] = []
        for slot, has, depth, rests in zip(slots.tolist(), most.tolist(), depths.tolist(), resting, strict=True):
            if rests or not has:
                continue
            self._steps_without[slot] = 0 if depth else self._steps_without[slot] + 1
            if self._steps_without[slot] >= _STEPS_BEFORE_REST:
                tired.append(slot)
        if tired:
            for slot, may_gain in zip(tired, self._may_gain(tired, len(slots)), strict=True):
                if not may_gain:
                    self._rest(slot, _FIRST_REST)

    def _may_gain(self, slots: Sequence[int], number: int) -> list[bool]:
        """Return True for each slot whose drafts yield more tokens than the time they take does without them.

        Drafts of many requests together may take less time each than those of one, so the least time counts.

        Args:
            slots: some slots.
            number: decodes of a step.
        """
        seconds = self.costs.estimate(number, np.arange(number * self.most + 1))
        price = ((seconds[1:] - seconds[0]) / np.arange(1, len(seconds))).min() * number / seconds[0]
        gains = self._acceptance.gains(np.array(slots))
        return ((np.cumsum(gains, axis=1) / np.arange(1, self.most + 1)).max(axis=1) > price).tolist()

    def _rest(self, slot: int, steps: int) -> None:
        self._rests[slot], self._probe_steps[slot] = steps, self._step + steps

    def _probe(self, slots: np.ndarray, most: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """Return the depths of probes, of as many resting slots as the time saved up pays for.

        Args:
            slots: int [N].
            most: drafts of each resting slot, int [N]; 0 for the others.
            depths: drafts of the others.
        """
        total = int(depths.sum())
        probes = np.zeros_like(most)
        for row in np.flatnonzero(most).tolist():
            slot = int(slots[row])
            if self._step < self._probe_steps[slot]:
                continue
            before, after = self.costs.estimate(len(slots), np.array([total, total + int(most[row])]))
            if after - before > self._saved:
                break
            self._saved -= after - before
            total += int(most[row])
            probes[row] = most[row]
            self._acceptance.fade(slot, self._step - self._last_tried[slot])
        return probes

    def _end_probe(self, slot: int, number: int, kept: int) -> None:
        """Wake a slot whose probe shows a gain, else let it rest again."""
        if self._may_gain([slot], number)[0]:
            self._rests[slot] = self._steps_without[slot] = 0
        elif kept:
            # What it gained pays for another one.
            self._saved += kept * float(self.costs.estimate(number, np.zeros(1))[0]) / number
            self._rest(slot, 1)
        else:
            self._rest(slot, min(2 * max(self._rests[slot], _FIRST_REST // 2), _LONGEST_REST))
