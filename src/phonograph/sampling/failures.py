"""Containment of errors: an exception in work for one sequence fails its slot, and the step continues.

Covered are loading a slot, masks and matchers of grammars, choosing a token on the host, penalties and
log-probabilities. Work for the whole batch (inputs, attention metadata, forward pass, sampling on the device) is not:
an exception there, and any error of the device, ends the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec

import torch

from phonograph.core.batch import SlotFailure
from phonograph.core.grammar import GrammarError
from phonograph.errors import cause_text

log = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")


class SlotFailures:
    """Failures of one step by slot. The first failure of a slot is kept."""

    def __init__(self) -> None:
        self.by_slot: dict[int, SlotFailure] = {}

    def run(
        self, slot: int, part: str, work: Callable[Arguments, object], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> bool:
        """Call `work` for the sequence in a slot; return False if it raised.

        Raises:
            torch.AcceleratorError: the device failed, which concerns every sequence.
        """
        try:
            work(*args, **kwargs)
        except torch.AcceleratorError:
            raise
        except GrammarError as error:  # The request caused it.
            self.by_slot.setdefault(slot, SlotFailure("grammar", str(error), no_token=True))
            return False
        except Exception as error:
            log.exception("slot %d: %s failed", slot, part)
            self.by_slot.setdefault(slot, SlotFailure(part, cause_text(error)))
            return False
        return True

    def run_rows(
        self, rows: Sequence[int], slots: Sequence[int], part: str, work: Callable[[Sequence[int]], object]
    ) -> None:
        """Call `work` with all rows at once or, if that raises, with each row alone.

        Args:
            rows: rows of a batch, the argument of `work`.
            slots: slots of the batch by row.
            part: name of the work in messages.
            work: changes nothing before it raises, so that it can be repeated.

        Raises:
            torch.AcceleratorError: the device failed, which concerns every sequence.
        """
        if len(rows) > 1:
            try:
                work(rows)
                return
            except torch.AcceleratorError:
                raise
            except Exception as error:
                log.warning("%s of %d rows failed (%s); repeating row by row", part, len(rows), cause_text(error))
        for row in rows:
            self.run(slots[row], part, work, [row])
