"""Prompt lookup: the tokens behind an earlier occurrence of the latest ones (Saxena 2023, "Prompt Lookup Decoding")."""

from __future__ import annotations

import numpy as np


class NgramProposer:
    """Drafts what followed the longest earlier occurrence of a sequence's last tokens, of equal ones the earliest.

    Args:
        shortest: fewest last tokens that must occur earlier.
        longest: most last tokens that are compared.
    """

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        """Return up to `most` tokens that may follow `token_ids`, none if nothing occurred earlier."""
        ends = np.flatnonzero(token_ids[:-1] == token_ids[-1])
        found = ends[:0]
        for length in range(1, self._longest + 1):
            if not len(ends):
                break
            if length >= self._shortest:
                found = ends
            behind = ends - length
            ends = ends[(behind >= 0) & (token_ids[behind] == token_ids[-1 - length : len(token_ids) - length])]
        if not len(found):
            return found
        start = int(found[0]) + 1
        return token_ids[start : start + most]
