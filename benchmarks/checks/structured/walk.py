"""Random walk through the masks of a grammar: a text that the grammar allows, as a weak model would write it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from phonograph.core.grammar import GrammarError, Matcher

_CLOSING_BYTES = frozenset(b'"}]')
_END_SHARE = 0.5
"""Probability of the end of the output where the grammar allows it."""
_CLOSING_SHARES = 0.03, 0.1, 0.3
"""Probabilities of a token that closes a string, object or array where there is one; a walk has one of them."""
_LATE_CLOSING_SHARE = 0.9
"""The same in the last half of a walk."""


class Walk(NamedTuple):
    """Text of one walk.

    ended:   the text ended with a token of its own, within the limit
    problem: an error of the grammar, such as a mask without tokens; empty if there was none
    fill_us: CPU time of each mask
    """

    text: bytes
    ended: bool
    problem: str
    fill_us: list[float]


class Walker:
    """Walks of one vocabulary. Tokens are drawn uniformly from the mask, except that closing tokens are preferred.

    tokens: bytes of each token, by id
    eos:    ids that end an output
    size:   rows of the model's logits
    """

    def __init__(self, tokens: Sequence[bytes], eos: Collection[int], size: int) -> None:
        self._tokens = tokens
        self._size = size
        self._eos = np.zeros(size, bool)
        self._eos[list(eos)] = True
        self._closing = np.array([bool(token) and _CLOSING_BYTES.issuperset(token) for token in tokens[:size]])
        self._closing.resize(size)
        self._mask_RW = np.zeros((1, -(-size // 32)), np.int32)

    def walk(self, matcher: Matcher, rng: np.random.Generator, max_tokens: int) -> Walk:
        """Walk from the beginning of an output until it ends, or until `max_tokens` tokens."""
        text, fill_us = bytearray(), list[float]()
        closing_share = float(rng.choice(_CLOSING_SHARES))
        for position in range(max_tokens):
            try:
                start = time.thread_time_ns()
                matcher.fill(self._mask_RW, 0)
                fill_us.append((time.thread_time_ns() - start) / 1000)
                token = self._drawn(rng, _LATE_CLOSING_SHARE if 2 * position > max_tokens else closing_share)
                if token is None:
                    return Walk(bytes(text), False, "the mask allows no token", fill_us)
                matcher.accept(token)
            except GrammarError as error:
                return Walk(bytes(text), False, str(error), fill_us)
            if self._eos[token]:
                return Walk(bytes(text), True, "", fill_us)
            text += self._tokens[token]
        return Walk(bytes(text), False, "", fill_us)

    def _drawn(self, rng: np.random.Generator, closing_share: float) -> int | None:
        allowed = np.unpackbits(self._mask_RW.view(np.uint8), bitorder="little")[: self._size].view(bool)
        ends = np.flatnonzero(allowed & self._eos)
        if len(ends) and rng.random() < _END_SHARE:
            return int(ends[0])
        choices = np.flatnonzero(allowed & ~self._eos)
        if rng.random() < closing_share:
            closing = np.flatnonzero(allowed & self._closing)
            choices = closing if len(closing) else choices
        if not len(choices):
            return int(ends[0]) if len(ends) else None
        return int(rng.choice(choices))
