"""Grammars of token ids, for samplers without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phonograph.core.grammar import GrammarError

VOCAB, END = 70, 69


class InTurn:
    """A grammar of one output: these tokens in turn, each one of several, then the end."""

    def __init__(self, *choices: Sequence[int]) -> None:
        self.choices = [*choices, [END]]
        self.place = 0

    def matcher(self) -> InTurn:
        return InTurn(*self.choices[:-1])

    @property
    def ended(self) -> bool:
        return self.place == len(self.choices)

    def accept(self, token_id: int) -> None:
        if token_id not in self.choices[self.place]:
            raise GrammarError(f"the token {token_id} is not allowed here")
        self.place += 1

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        bits = np.zeros(bitmask_RW.shape[1] * 32, np.uint8)
        bits[self.choices[self.place]] = 1
        bitmask_RW[row] = np.packbits(bits, bitorder="little").view(np.int32)
