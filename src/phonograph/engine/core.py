"""The synchronous core: a step is schedule, run, take the results. Everything else in the engine is around it."""

from __future__ import annotations

from phonograph.errors import PhonographError
from phonograph.request import Request
from phonograph.runner.model_runner import ModelRunner
from phonograph.scheduler import Scheduler


class EngineCore:
    """Scheduler and runner, joined. Not thread-safe: one thread drives it."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._failed: BaseException | None = None

    def step(self) -> list[Request]:
        """Runs one step and returns the requests that got a token.

        Raises:
            PhonographError: an earlier step failed half-way; what it left of cache and slots cannot be trusted.
        """
        if self._failed is not None:
            raise PhonographError(f"the engine stopped when a step failed ({self._failed!r}); make a new one")
        try:
            batch = self.scheduler.schedule()
            if not batch.slots:
                return []
            output = self.runner.execute(batch)
            return self.scheduler.update(batch, output)
        except BaseException as error:
            self._failed = error
            raise
