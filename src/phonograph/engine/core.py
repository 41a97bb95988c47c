"""The synchronous core: a step is schedule, submit, take the results. Everything else in the engine is around it.

Where the runner allows it the results taken are those of an earlier step: while the device runs one, the host makes the
next, whose input tokens never leave the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from phonograph.core.batch import ScheduledBatch
from phonograph.core.request import Request
from phonograph.engine.metrics.step_record import StepRecord, record_of
from phonograph.errors import PhonographError
from phonograph.runner.steps import PendingStep, StepRunner
from phonograph.scheduling.scheduler import Scheduler


class EngineCore:
    """Scheduler and runner, joined. Not thread-safe: one thread drives it.

    on_step: called with each step whose results were taken
    """

    def __init__(self, scheduler: Scheduler, runner: StepRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.on_step: Callable[[StepRecord], None] | None = None
        self._in_flight: deque[tuple[ScheduledBatch, PendingStep, float]] = deque()
        self._last_taken = 0.0
        self._failed: BaseException | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: requests that have not ended, or steps whose results nobody took yet."""
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def step(self) -> list[Request]:
        """Submits the next step, takes the results of the oldest, and returns the requests that got a token.

        While the runner can have more steps in flight it submits only, and returns nothing; when nothing can be
        scheduled it takes results only.

        Raises:
            PhonographError: an earlier step failed half-way; what it left of cache and slots cannot be trusted.
        """
        if self._failed is not None:
            raise PhonographError(f"the engine stopped when a step failed ({self._failed!r}); make a new one")
        try:
            batch = self.scheduler.schedule()
            if batch.slots:
                began = time.monotonic()
                self._in_flight.append((batch, self.runner.submit(batch), began))
                if len(self._in_flight) <= self.runner.lookahead:
                    return []
            return self._take() if self._in_flight else []
        except BaseException as error:
            self._failed = error
            raise

    def settle(self) -> None:
        """Takes the steps still in flight if no request is left that waits for them, as after the last was aborted."""
        while self._in_flight and self._failed is None and not self.scheduler.has_unfinished:
            self.step()

    def _take(self) -> list[Request]:
        batch, pending, began = self._in_flight.popleft()
        output = pending.result()
        taken = time.monotonic()
        if self.on_step is not None:
            # Where steps overlap, one has the device to itself only once the one before it is done.
            self.on_step(record_of(batch, pending.decision, max(began, self._last_taken), taken))
        self._last_taken = taken
        return self.scheduler.update(batch, output)
