"""Structured outputs of at least `min_tokens` tokens: those that end the output are masked, if others may follow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from phonograph.core.grammar import Grammar, Matcher
from phonograph.core.sampling_params import SamplingParams


def with_min_tokens(grammar: Grammar | None, params: SamplingParams, end_token_ids: Collection[int]) -> Grammar | None:
    """Return a grammar of structured outputs that also keeps to `min_tokens`.

    Args:
        grammar: constraint of the output, or None.
        params: sampling parameters.
        end_token_ids: tokens that end the output.
    """
    if grammar is None or params.structured_outputs is None or not params.min_tokens:
        return grammar
    return LongGrammar(grammar, params.min_tokens, tuple(end_token_ids))


class LongGrammar(NamedTuple):
    """A grammar whose outputs have `min_tokens` tokens, if it allows so many."""

    grammar: Grammar
    min_tokens: int
    end_token_ids: tuple[int, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.grammar.warnings

    def matcher(self) -> LongMatcher:
        return LongMatcher(self, self.grammar.matcher())


class LongMatcher:
    """Position in a grammar, after `num_tokens` tokens."""

    def __init__(self, long: LongGrammar, inner: Matcher, num_tokens: int = 0) -> None:
        self._long = long
        self._inner = inner
        self._num_tokens = num_tokens

    @property
    def ended(self) -> bool:
        return self._inner.ended

    def accept(self, token_id: int) -> None:
        self._inner.accept(token_id)
        self._num_tokens += 1

    def validate(self, token_ids: Sequence[int]) -> int:
        # A draft that ends the output early is never right or soon made again.
        early = token_ids[: max(self._long.min_tokens - self._num_tokens, 0)]
        ends = (place for place, token_id in enumerate(early) if token_id in self._long.end_token_ids)
        return self._inner.validate(token_ids[: next(ends, len(token_ids))])

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        self._num_tokens -= num_tokens

    def copy(self) -> LongMatcher:
        return LongMatcher(self._long, self._inner.copy(), self._num_tokens)

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        self._inner.fill(bitmask_RW, row)
        if self._num_tokens >= self._long.min_tokens:
            return
        mask_W = bitmask_RW[row].copy()
        words = mask_W.view(np.uint32)
        for token_id in self._long.end_token_ids:
            words[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
        if mask_W.any():
            bitmask_RW[row] = mask_W
