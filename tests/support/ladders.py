"""A grammar for tests that need no library: what it allows depends on every token before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass
class Ladder:
    """Any of every seventh token, `length` times, from a place that all tokens before have moved; then the end."""

    length: int
    vocab: int
    end: int
    state: int = 1
    taken: int = 0
    ended: bool = False
    warnings: tuple[str, ...] = ()
    past: list[int] = field(default_factory=list, repr=False)

    def matcher(self) -> Ladder:
        return Ladder(self.length, self.vocab, self.end)

    def allowed(self) -> np.ndarray:
        bits = np.zeros(-(-self.vocab // 32) * 32, np.uint8)
        if self.taken == self.length:
            bits[self.end] = 1
        else:
            bits[self.state % 7 : self.vocab : 7] = 1
            bits[self.end] = 0
        return bits

    def accept(self, token_id: int) -> None:
        assert not self.ended and self.allowed()[token_id], "a token that the mask did not have"
        self.ended = token_id == self.end
        self.past.append(self.state)
        self.state = (self.state * 31 + token_id) % (1 << 30)
        self.taken += 1

    def validate(self, token_ids: Sequence[int]) -> int:
        there = replace(self, past=[])
        for place, token_id in enumerate(token_ids):
            if there.ended or not there.allowed()[token_id]:
                return place
            there.accept(token_id)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.state = self.past.pop()
        self.taken -= num_tokens
        self.ended = self.ended and not num_tokens

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        assert not self.ended
        bitmask_RW[row] = np.packbits(self.allowed(), bitorder="little").view(np.int32)
