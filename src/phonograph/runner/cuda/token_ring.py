"""Ring of pinned rows that carries sampled tokens to the host, with one event per row."""

from __future__ import annotations

import numpy as np
import torch

from phonograph.kernels.triton.step.pinned_words import copy_words


class TokenRing:
    """Holds the tokens of `depth` steps, `max_rows` tokens each. A row is overwritten `depth` sends later.

    Args:
        depth: steps.
        max_rows: tokens of a step.
        units: int32 [3], counts of a step that its tokens bring along; see `MetadataBuilder`. None for none.
    """

    def __init__(self, *, depth: int, max_rows: int, units: torch.Tensor | None = None) -> None:
        self._units = units
        num_words = max_rows + (0 if units is None else len(units))
        self._pinned = torch.zeros((depth, num_words), dtype=torch.int32, pin_memory=True)
        self._rows = self._pinned.numpy()
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
    def latest(self) -> int:
        """Ticket of the last send."""
        return self._sent - 1

    def read(self, ticket: int) -> np.ndarray:
        """Wait for the tokens sent under `ticket` and return them. The row is reused, so copy what must be kept."""
        assert self._sent - len(self._events) <= ticket < self._sent, "these tokens are overwritten"
        place = ticket % len(self._events)
        self._events[place].synchronize()
        return self._rows[place]

    def units(self, ticket: int) -> tuple[int, int]:
        """Return the counts of units that came with tokens that were read; zeros if there are none.

        The third count, of tiles of shared prefixes, becomes `shared_tiles`.
        """
        if self._units is None:
            return 0, 0
        shared, own, self.shared_tiles = self._rows[ticket % len(self._events), -3:].tolist()
        return shared, own
