"""Texts and bytes of single tokens, for log-probabilities: a token may be half a character."""

from __future__ import annotations

from phonograph.text.tokenizer import Tokenizer


class TokenTexts:
    """Text and bytes of each token as a part of a text, not as its beginning."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Return the token's text, or its bytes in OpenAI's form (`bytes:\\xe2`) if they are no whole characters."""
        if token_id not in self._texts:
            data = self.bytes(token_id)
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._texts[token_id] = text
        return self._texts[token_id]

    def bytes(self, token_id: int) -> bytes:
        """Return the token's UTF-8 bytes; those of the tokens of a text make up the text."""
        return self._token_bytes.next(token_id) or b""
