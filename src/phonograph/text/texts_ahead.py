"""Tokens of texts that are encoded together, in the threads of the tokenizer's backend, before each of them is used."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

_BASES = "transformers.tokenization_"
"""Beginning of the modules of transformers whose classes leave texts to the backend."""


class TextsAhead:
    """Tokens with special tokens, each of which is taken once, by the thread that encoded its text.

    Args:
        tokenizer: of transformers, or a `LightTokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, dict[str, list[int]]] = {}
        # Classes of some models change texts themselves. Without offsets, the backend takes a quarter less time.
        methods = [getattr(type(tokenizer), name, self.take) for name in ("__call__", "_encode_plus")]
        self._by_backend = all(getattr(one, "__module__", "").startswith(_BASES) for one in methods)
        self._by_backend &= not getattr(tokenizer, "split_special_tokens", False)

    def encode(self, texts: Sequence[str]) -> None:
        """Replace the tokens of this thread by those of some texts; by none if a text is not valid Unicode."""
        try:
            if self._by_backend:
                encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
                found: list[list[int]] = [one.ids for one in encodings]
            else:
                found = self._tokenizer(list(texts), add_special_tokens=True, return_attention_mask=False)["input_ids"]
        except (TypeError, UnicodeEncodeError):
            found = []
        self._found[get_ident()] = dict(zip(texts, found, strict=False))

    def take(self, text: str) -> list[int] | None:
        """Return the tokens of a text if they are here, once."""
        found = self._found.get(get_ident())
        return found.pop(text, None) if found else None
