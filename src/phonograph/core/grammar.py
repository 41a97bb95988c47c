"""Protocols of grammars, independent of the library and without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class GrammarError(Exception):
    """A grammar reached a limit of its library, or does not allow a token. The error concerns one request."""


class Matcher(Protocol):
    """Position of one output in a grammar."""

    @property
    def ended(self) -> bool:
        """True after an end-of-sequence token: nothing can follow."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by one token.

        Raises:
            GrammarError: the grammar does not allow the token, and the position is unchanged; or a limit is reached.
        """
        ...

    def validate(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens the grammar allows one after another from here. Nothing changes."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens, including an end-of-sequence token."""
        ...

    def copy(self) -> Matcher:
        """Return an independent matcher at the same position."""
        ...

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        """Write the mask of allowed tokens into a row: int32 [rows, words], token t is bit t % 32 of word t // 32.

        Must not be called after the end.

        Raises:
            GrammarError: a limit is reached.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar. Requests share it; its matchers do not change it.

    `warnings` lists the constraints that it does not enforce, each as a short text.
    """

    @property
    def warnings(self) -> tuple[str, ...]: ...

    def matcher(self) -> Matcher:
        """Return a matcher at the start of an output."""
        ...
