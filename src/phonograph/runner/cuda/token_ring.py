"""Ring of pinned rows that carries sampled tokens to the host, with one event per row.

A step that ends with the passes of a draft model also sends the tokens before these, to a row that a tag completes.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from phonograph.kernels.triton.step.pinned_words import copy_words, send_words

_TAGS = 1 << 30
"""Number of tags, which are positive int32 words."""


class TokenRing:
    """Holds the tokens of `depth` steps, `max_rows` tokens each. A row is overwritten `depth` sends later.

    The kernels of a step write its early row, so that it is overwritten when the step `depth` later runs. The host
    submits that step after it has read this one.

    Args:
        depth: steps.
        max_rows: tokens of a step.
        units: int32 [3], counts of a step that its tokens bring along; see `MetadataBuilder`. None for none.
        early_words: words of the results that `send_early` sends.
    """

    def __init__(self, *, depth: int, max_rows: int, units: torch.Tensor | None = None, early_words: int = 0) -> None:
        self._units, self._early_words = units, early_words
        num_units = 0 if units is None else len(units)
        self._pinned = torch.zeros((depth, max_rows + num_units), dtype=torch.int32, pin_memory=True)
        self._early = torch.zeros((depth, early_words + num_units + 1), dtype=torch.int32, pin_memory=True)
        self._rows, self._early_rows = self._pinned.numpy(), self._early.numpy()
        self._events = [torch.cuda.Event() for _ in range(depth)]
        self._sent = 0
        self.shared_tiles = 0

    def send(self, tokens_N: torch.Tensor) -> int:
        """Start to copy int32 tokens [N] on the current stream; return the ticket to read them by."""
        ticket = self._sent
        self._sent += 1
        place = ticket % len(self._events)
        copy_words(tokens_N, self._pinned[place], tokens_N.shape[0], more=self._units)
        self._events[place].record()
        return ticket

    @property
    def early_row(self) -> tuple[int, int]:
        """Early row of the next send, and its tag, for the step's upload."""
        return self._place_and_tag(self._sent)

    def send_early(self, staging: torch.Tensor, results: torch.Tensor) -> None:
        """Launch the copy of the first words of `results` to the early row that the step's upload names."""
        send_words(staging, results[: self._early_words], self._early, more=self._units)

    @property
    def latest(self) -> int:
        """Ticket of the last send."""
        return self._sent - 1

    def read(self, ticket: int) -> np.ndarray:
        """Wait for the tokens sent under `ticket` and return them. The row is reused, so copy what must be kept."""
        assert self._sent - len(self._events) <= ticket < self._sent, "these tokens are overwritten"
        place = ticket % len(self._events)
        self._events[place].synchronize()
        return self._rows[place]

    def read_early(self, ticket: int) -> np.ndarray:
        """Wait for the early row of the step with `ticket`, and return it, or what `read` returns if it never comes."""
        place, tag = self._place_and_tag(ticket)
        row, event = self._early_rows[place], self._events[place]
        while row[-1] != tag:
            if event.query():
                return self.read(ticket)
            time.sleep(0)  # lets other threads run
        return row

    def units(self, ticket: int) -> tuple[int, int]:
        """Return the counts of units that came with tokens that were read; zeros if there are none.

        The third count, of tiles of shared prefixes, becomes `shared_tiles`.
        """
        if self._units is None:
            return 0, 0
        place, tag = self._place_and_tag(ticket)
        early = self._early_rows[place]
        units = early[-4:-1] if early[-1] == tag else self._rows[place, -3:]
        shared, own, self.shared_tiles = units.tolist()
        return shared, own

    def _place_and_tag(self, ticket: int) -> tuple[int, int]:
        return ticket % len(self._events), ticket % _TAGS + 1
