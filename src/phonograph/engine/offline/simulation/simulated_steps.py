"""A runner whose steps take simulated time: the decisions are those of the dispatcher, the tokens are made up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import compress, count

from phonograph.core.batch import ScheduledBatch, StepOutput
from phonograph.engine.offline.simulation.shared_keys import SharedKeys
from phonograph.engine.offline.simulation.step_times import StepTimes, work_of
from phonograph.graphs.dispatch import Decision, Dispatcher
from phonograph.runner.runner import shape_of

OUTPUT_TOKENS = 1 << 62
"""First token that is made up. All are different, so that outputs share no prefix."""


@dataclass(slots=True)
class SimulatedClock:
    """Time of one engine in seconds, which only its steps and its waits move."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class SimulatedStep:
    """A step that ends at a known time; see `PendingStep`."""

    output: StepOutput
    decision: Decision
    ends: float
    clock: SimulatedClock

    def result(self) -> StepOutput:
        """Move the clock to the end of the step, and return its tokens."""
        self.clock.now = max(self.clock.now, self.ends)
        return self.output


class SimulatedStepRunner:
    """Runs steps in simulated time, one after the other, as a device does. See `StepRunner`.

    Args:
        dispatcher: chooses the graphs.
        times: time of each step.
        clock: clock of the engine.
        lookahead: steps that may be in flight beside the one whose result is awaited.
        shared_keys: counts keys that decodes attend once.
    """

    def __init__(
        self, dispatcher: Dispatcher, times: StepTimes, clock: SimulatedClock, lookahead: int, shared_keys: SharedKeys
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.lookahead = lookahead
        self._dispatcher = dispatcher
        self._times = times
        self._clock = clock
        self._shared_keys = shared_keys
        self._free_at = 0.0
        self._tokens = count(OUTPUT_TOKENS)

    def submit(self, batch: ScheduledBatch) -> SimulatedStep:
        self._clock.now += self._times.host_seconds(batch.num_reqs)
        decision = self._dispatcher.decide(shape_of(batch))
        self.counts[decision.label] += 1
        begins = max(self._clock.now, self._free_at)
        work = work_of(batch, decision)
        work = work._replace(decode_keys=work.decode_keys - self._shared_keys.saved(batch))
        self._free_at = begins + self._times.seconds(work)
        slots = list(compress(batch.slots, batch.samples))
        output = StepOutput(slots=slots, token_ids=[[next(self._tokens)] for _ in slots])
        return SimulatedStep(output, decision, self._free_at, self._clock)
