"""Interfaces between the engine and grammars, whatever library makes them: plain types, no torch."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class GrammarError(Exception):
    """A grammar that came to a limit of its library, or a token that it does not allow. It concerns one request."""


class Matcher(Protocol):
    """Position of one output in a grammar."""

    @property
    def ended(self) -> bool:
        """True once it has accepted an end-of-sequence token: nothing can follow."""
        ...

    def accept(self, token_id: int) -> None:
        """Takes the next token.

        Raises:
            GrammarError: the grammar does not allow the token, and nothing has changed; or it came to a limit.
        """
        ...

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        """Writes which tokens may come next into a row: int32 [rows, words], token t is bit t % 32 of word t // 32.

        Not to be called when it has ended.

        Raises:
            GrammarError: it came to a limit.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar. Requests share it, and its matchers do not change it.

    warnings: what of the request it does not hold, each a short text
    """

    @property
    def warnings(self) -> tuple[str, ...]: ...

    def matcher(self) -> Matcher:
        """Returns a matcher at the beginning of an output."""
        ...
