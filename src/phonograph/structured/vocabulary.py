"""Vocabulary of a model as grammars need it: the bytes of each token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from phonograph.errors import RequestError

_PROBE = 'The {"key": [1.5e-3, "naïve 日本 \U0001f600"]}\n\tx = y;  end'
_KEPT_TEXTS = 4096
"""Texts whose tokens are kept: names of properties come again and again."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id. Ids without a token, such as those that pad a model's rows of logits, are never allowed.

    tokens:  bytes that each token adds to a text; of special tokens their names
    special: ids of tokens that are no text
    eos:     ids that end an output
    size:    rows of the model's logits
    encode:  token ids whose bytes are those of a text within an output. Where a grammar leaves one text only, masks
             allow these tokens and no others
    """

    tokens: Sequence[bytes]
    special: frozenset[int]
    eos: tuple[int, ...]
    size: int
    encode: Callable[[str], Sequence[int]]

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, size: int, eos: Iterable[int]) -> Vocabulary:
        """Reads a `phonograph.engine.tokenizer.Tokenizer`.

        The bytes come from the tokenizer's own decoder, token by token, not from its file, which libraries misread for
        tokenizers that were converted from other formats.

        Raises:
            RequestError: the bytes of a text's tokens are not the bytes of the text.
        """
        source, special = tokenizer.token_bytes, frozenset(tokenizer.special_token_ids)
        tokens = [source.next(token_id) or b"" for token_id in range(size)]
        ids = tokenizer.encode(_PROBE, add_special_tokens=False)
        joined = _joined(tokens, ids).decode("utf-8", "replace")
        if joined.strip() != tokenizer.decode(ids).strip():
            problem = f"the tokenizer's tokens, read one by one, say {joined[:60]!r} for the text {_PROBE!r}"
            raise RequestError("structured_outputs", "...", f"{problem}; give another one with --tokenizer")

        @lru_cache(_KEPT_TEXTS)
        def encode(text: str) -> Sequence[int]:
            # Tokenizers that put a space before a text, and take it from the first token, do so behind a line too.
            data = text.encode("utf-8", "replace")
            for before in ("", "\n"):
                ids = tokenizer.encode(before + text, add_special_tokens=False)
                for start in range(len(ids)):
                    if _joined(tokens, ids[start:]) == data:
                        return ids[start:]
            return _longest_tokens(by_bytes(), data)

        @lru_cache(1)
        def by_bytes() -> dict[bytes, int]:
            return {data: one for one, data in enumerate(tokens) if data and one not in special}

        return cls(tokens, special, tuple(eos), size, encode)


def _joined(tokens: Sequence[bytes], ids: Sequence[int]) -> bytes:
    return b"".join(tokens[one] for one in ids if one < len(tokens))


def _longest_tokens(by_bytes: dict[bytes, int], data: bytes) -> list[int]:
    """Returns tokens of a text, each the longest at its place; those of bytes that no token has are left out."""
    longest, ids, place = max(map(len, by_bytes), default=0), list[int](), 0
    while place < len(data):
        ends = range(min(len(data), place + longest), place, -1)
        end = next((end for end in ends if data[place:end] in by_bytes), place + 1)
        ids += [by_bytes[data[place:end]]] if data[place:end] in by_bytes else []
        place = end
    return ids
