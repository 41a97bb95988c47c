"""The synchronous core of the engine: schedule a step, submit it, take results.

If the runner allows steps in flight, the results are those of an earlier step: the host schedules the next step while
the device runs this one. Input tokens of the next step stay on the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from phonograph.core.batch import ScheduledBatch
from phonograph.core.request import Request
from phonograph.engine.metrics.step_record import StepRecord, record_of
from phonograph.errors import EngineUnavailable, PhonographError
from phonograph.runner.steps import PendingStep, StepRunner
from phonograph.scheduling.scheduler import Scheduler


class EngineCore:
    """Scheduler and runner. Not thread-safe: one thread drives it.

    clock: returns the time in seconds, of `time.monotonic` unless time is simulated
    expert_load: counters of experts on the device, by the index of a layer; see `Transformer`
    asleep: True while memory of weights or KV cache is given back, so that no step can run
    on_step: called with the record of each step whose results were taken
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        expert_load: Mapping[int, torch.Tensor] = MappingProxyType({}),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.expert_load = expert_load
        self.asleep = False
        self._clock = clock
        self.on_step: Callable[[StepRecord], None] | None = None
        self._in_flight: deque[tuple[ScheduledBatch, PendingStep, float]] = deque()
        self._last_taken = 0.0
        self._failed: BaseException | None = None

    @property
    def has_work(self) -> bool:
        """True if there are unfinished requests, or steps whose results were not taken."""
        return self.scheduler.has_unfinished or bool(self._in_flight)

    @property
    def in_flight(self) -> bool:
        """True while there are steps whose results were not taken."""
        return bool(self._in_flight)

    def check_awake(self) -> None:
        """Check that weights and KV cache are there.

        Raises:
            EngineUnavailable: they are not.
        """
        if self.asleep:
            raise EngineUnavailable("the engine sleeps; wake_up() lets it continue", "asleep")

    def step(self, *, schedules: bool = True) -> list[Request]:
        """Submit the next step, take the results of the oldest, and return the requests that got a token.

        While the runner accepts more steps in flight, it only submits and returns an empty list. If nothing can be
        scheduled, or without `schedules`, it only takes results. So it does while drafts need these.

        Raises:
            PhonographError: an earlier step failed, so that the state of cache and slots is unknown.
        """
        if self._failed is not None:
            raise PhonographError(f"the engine stopped when a step failed ({self._failed!r}); make a new one")
        try:
            schedules = schedules and len(self._in_flight) <= self._lookahead
            batch = self.scheduler.schedule() if schedules else ScheduledBatch()
            if batch.slots:
                began = self._clock()
                self._in_flight.append((batch, self.runner.submit(batch), began))
                if len(self._in_flight) <= self._lookahead:
                    return []
            return self._take() if self._in_flight else []
        except BaseException as error:
            self._failed = error
            raise

    @property
    def _lookahead(self) -> int:
        drafts = self.scheduler.drafts
        return 0 if drafts is not None and drafts.waits else self.runner.lookahead

    def settle(self) -> None:
        """Take the results of steps in flight if there are no unfinished requests, as after an abort."""
        while self._in_flight and self._failed is None and not self.scheduler.has_unfinished:
            self.step()

    def _take(self) -> list[Request]:
        batch, pending, began = self._in_flight.popleft()
        output = pending.result()
        taken = self._clock()
        # Of overlapping steps, one has the device to itself only after the one before it has ended.
        began = max(began, self._last_taken)
        if self.on_step is not None:
            self.on_step(record_of(batch, output, pending.decision, began, taken))
        if self.scheduler.drafts is not None:
            self.scheduler.drafts.learn(batch, output, taken - began)
        self._last_taken = taken
        return self.scheduler.update(batch, output)
