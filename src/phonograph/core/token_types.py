"""Tokens of prompts with more than their ids.

The second text of a pair has type 1 in models that tell the two apart. A token and its type travel as one integer, so
that prompts, slots and steps need nothing more for them. Tokens of a decoder with an encoder have its input with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import numpy as np

TYPE_SHIFT = 30
"""Bits of a token id; those above are its type. An id of 32 bits has types 0 and 1."""
ID_MASK = (1 << TYPE_SHIFT) - 1


class TypedTokens(list[int]):
    """Tokens with their types."""

    @classmethod
    def of(cls, token_ids: Iterable[int], types: Iterable[int]) -> TypedTokens:
        """Return tokens with these types."""
        return cls(token_id | kind << TYPE_SHIFT for token_id, kind in zip(token_ids, types, strict=True))

    @property
    def plain(self) -> list[int]:
        """Token ids."""
        return [token & ID_MASK for token in self]


class EncoderTokens(list[int]):
    """Tokens of a prompt of a decoder, with the input of its encoder.

    Attributes:
        features: log-mel frames of audio, float32 [M, F], or token ids of text, int32 [P].
    """

    def __init__(self, token_ids: Iterable[int], features: np.ndarray) -> None:
        super().__init__(token_ids)
        self.features = features

    @property
    def digest(self) -> str:
        """Digest of the encoder's input."""
        return sha256(self.features.tobytes()).hexdigest()

    @property
    def plain(self) -> list[int]:
        """The token ids without the encoder's input."""
        return [*self]


def plain_ids(token_ids: list[int]) -> list[int]:
    """Return token ids without types and the input of an encoder, which they may have."""
    return token_ids.plain if isinstance(token_ids, TypedTokens | EncoderTokens) else token_ids
