"""Sleeper of rank 0: all ranks sleep and wake up together, each with its part of the weights and of the KV cache."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from phonograph.engine.admission import SLEEP_TAGS
from phonograph.engine.process.ranks.rank_step import RankSleep, RankWakeUp
from phonograph.engine.startup.sleeper import Sleeper
from phonograph.errors import MemoryLimitError, ModelError, PhonographError, RankError

if TYPE_CHECKING:
    from phonograph.engine.process.ranks.rank_group import RankGroup


class LeadSleeper(Sleeper):
    """Sleeper of rank 0, whose verbs return when all ranks have executed them.

    If one rank has no memory or finds other files, the verb is undone on all ranks: a failed `wake_up` leaves all
    memory asleep. The error names the rank. Any other error ends the engine.
    """

    def __init__(self, group: RankGroup, *parts: Any) -> None:
        super().__init__(*parts)
        self._group = group

    def sleep(self, level: int) -> None:
        """Let all ranks sleep; see `Sleeper`."""
        awake = [tag for tag in SLEEP_TAGS if tag not in self.asleep]
        self._execute(RankSleep(level), undo=RankWakeUp(tuple(awake)))

    def wake_up(self, tags: Collection[str] = SLEEP_TAGS) -> None:
        """Wake all ranks up; see `Sleeper`."""
        self._execute(RankWakeUp(tuple(tags)), undo=RankSleep(self.level))

    def _execute(self, verb: RankSleep | RankWakeUp, undo: RankSleep | RankWakeUp) -> None:
        error = self._first_error(verb)
        if error is None:
            return
        if (second := self._first_error(undo)) is not None:
            self._group.fail(str(second))
            raise RankError(str(second)) from error
        raise error

    def _first_error(self, verb: RankSleep | RankWakeUp) -> PhonographError | None:
        with self._group.executing(verb) as errors:
            own = try_verb(self, verb, 0)
        return own or next(iter(errors), None)


def try_verb(sleeper: Sleeper, verb: RankSleep | RankWakeUp, rank: int) -> PhonographError | None:
    """Execute a verb on one rank.

    Args:
        sleeper: of the rank.
        verb: of all ranks.
        rank: number of the rank, which the error names.

    Returns:
        The error if there was too little memory, or if the weights cannot be read.
    """
    try:
        if isinstance(verb, RankSleep):
            Sleeper.sleep(sleeper, verb.level)
        else:
            Sleeper.wake_up(sleeper, verb.tags)
    except (MemoryLimitError, ModelError) as error:
        return type(error)(f"rank {rank}: {error}")
    return None
