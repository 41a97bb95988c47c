"""What engine and runner say about grammars, whatever library makes them: plain types, no torch."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Matcher(Protocol):
    """Follows one output through a grammar."""

    @property
    def ended(self) -> bool:
        """Whether it has accepted an end-of-sequence token: nothing can follow."""
        ...

    def accept(self, token_id: int) -> bool:
        """Takes the next token; False, and no change, where the grammar does not allow it."""
        ...

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        """Writes which tokens may come next into a row: int32 [rows, words], token t is bit t % 32 of word t // 32.

        Not to be called when it has ended.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar. It is shared by requests, and not changed by its matchers."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an output."""
        ...
