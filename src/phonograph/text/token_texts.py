"""`TokenTexts`: text of single tokens, for log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phonograph.text.tokenizer import Tokenizer


class TokenTexts:
    """Text and bytes of single tokens as part of a text, not as its start. A token may be part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        r"""Return the token's text, or its bytes in OpenAI's form (`bytes:\xe2`) if they are not whole characters."""
        if token_id not in self._texts:
            data = self.bytes(token_id)
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._texts[token_id] = text
        return self._texts[token_id]

    def bytes(self, token_id: int) -> bytes:
        """Return the token's UTF-8 bytes. The bytes of consecutive tokens form the text."""
        return self._token_bytes.next(token_id) or b""
