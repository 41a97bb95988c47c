"""Containment of work for single sequences: an exception in it fails one slot of the step, and the step goes on.

Work that a step does for one sequence runs through `SlotFailures`. It covers (tests/engine/test_containment.py injects
an exception into each):

- loading a slot: sampling parameters, penalties, bias, the matcher of a grammar and the replay of its output, token ids
- masks of grammars, filled on the host for rows of the host's sampler and for rows that the device masks
- matchers that take the sampled token
- choosing a token on the host, for rows that no kernel samples
- counting a token for penalties
- log-probabilities of sampled tokens and of prompt tokens

Work for the batch as a whole (inputs, attention metadata, the forward pass, sampling on the device) is not here: an
exception there, and any error of the device, ends the engine.
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
    """The failures of one step, by slot. The first of a slot stays."""

    def __init__(self) -> None:
        self.by_slot: dict[int, SlotFailure] = {}

    def run(
        self, slot: int, part: str, work: Callable[Arguments, object], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> bool:
        """Calls `work` for the sequence in a slot; returns False if it raised.

        Raises:
            torch.AcceleratorError: the device failed, which concerns every sequence.
        """
        try:
            work(*args, **kwargs)
        except torch.AcceleratorError:
            raise
        except GrammarError as error:  # the request's own doing
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
        """Calls `work` with all rows at once or, if that raises, with each row alone.

        rows:  rows of a batch, which `work` takes
        slots: of the batch, by row
        work:  changes nothing before it raises, so that it can run again

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
                log.warning("%s of %d rows failed (%s); it is done row by row", part, len(rows), cause_text(error))
        for row in rows:
            self.run(slots[row], part, work, [row])
