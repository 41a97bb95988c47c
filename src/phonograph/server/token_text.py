"""What single tokens are as text and as bytes, for log-probabilities: a token may be half a character."""

from __future__ import annotations

import re
from functools import cached_property

from phonograph.engine.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Looks tokens up, each once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token_id: int) -> str:
        """The token's text; where it is no whole characters, its bytes as OpenAI writes them: `bytes:\\xe2\\x80`."""
        return self._look_up(token_id)[0]

    def bytes(self, token_id: int) -> bytes:
        """Its UTF-8 bytes; those of the tokens of a text make up the text."""
        return self._look_up(token_id)[1]

    def _look_up(self, token_id: int) -> tuple[str, bytes]:
        if token_id not in self._known:
            data = self._bytes(token_id)
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._known[token_id] = text, data
        return self._known[token_id]

    def _bytes(self, token_id: int) -> bytes:
        piece = self._tokenizer.piece(token_id)
        if piece is None:  # a vocabulary padded beyond the tokenizer's
            return b""
        byte = _BYTE.fullmatch(piece)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        # Beside another token: a decoder may take the space from the beginning of a text.
        text = self._decode([self._anchor, token_id]).removeprefix(self._decode([self._anchor]))
        if "\ufffd" in text and all(character in _BYTE_OF for character in piece):
            return bytes(_BYTE_OF[character] for character in piece)
        return text.encode("utf-8", "replace")

    @cached_property
    def _anchor(self) -> int:
        return self._tokenizer.encode("a", add_special_tokens=False)[-1]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write for bytes: printable ones for themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
