"""Vocabulary of a model as grammars need it: the bytes of each token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phonograph.errors import RequestError

_PROBE = 'The {"key": [1.5e-3, "naïve 日本 \U0001f600"]}\n\tx = y;  end'


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id. Ids without a token, such as padding rows of the logits, are never allowed.

    Attributes:
        tokens: bytes that each token adds to a text; for special tokens their names.
        special: ids of tokens that are not text.
        eos: ids that end an output.
        size: rows of the model's logits.
    """

    tokens: Sequence[bytes]
    special: frozenset[int]
    eos: tuple[int, ...]
    size: int

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, size: int, eos: Iterable[int]) -> Vocabulary:
        """Read the vocabulary of a `phonograph.text.tokenizer.Tokenizer`.

        The bytes come from the tokenizer's decoder, token by token. Libraries misread the files of tokenizers that were
        converted from other formats.

        Raises:
            RequestError: the bytes of a text's tokens are not the bytes of the text.
        """
        source, special = tokenizer.token_bytes, frozenset(tokenizer.special_token_ids)
        tokens = [source.next(token_id) or b"" for token_id in range(size)]
        ids = tokenizer.encode(_PROBE, add_special_tokens=False)
        joined = b"".join(tokens[one] for one in ids if one < size).decode("utf-8", "replace")
        if joined.strip() != tokenizer.decode(ids).strip():
            problem = f"the tokenizer's tokens, decoded one by one, give {joined[:60]!r} for the text {_PROBE!r}"
            raise RequestError("structured_outputs", "...", f"{problem}; choose another with --tokenizer")
        return cls(tokens, special, tuple(eos), size)
