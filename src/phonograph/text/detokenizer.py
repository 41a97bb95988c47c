"""Incremental detokenization: tokens become text one by one, in constant time each.

The text of a token depends on two things only: the token, and its position at the start of a text or after another
token, since many decoders drop the space at the start. The tokenizer's decoder is called once for both cases. The
results are kept as bytes, because a token may be a part of a character, and a stream decodes the joined bytes as UTF-8.
This works for any output. Decoding the whole text again, as `tokenizers.decoders.DecodeStream` does, fails on invalid
UTF-8, which changes earlier text.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice, takewhile
from typing import Any, cast

REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EACH_BYTE = "phonograph.each_byte"


_PER_TOKEN = frozenset({"ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"})
"""Decoders that treat each token by itself, apart from the start of a text, unless tokens are joined first."""
_JOINING = frozenset({"ByteLevel", "Fuse"})
_CONTEXT_TOKENS = 3
"""Tokens that can share an unfinished character with the next one: UTF-8 has at most 3 bytes before the last."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class TokenBytes:
    """Bytes of text that each token of a vocabulary adds.

    `errors` is the handler of invalid UTF-8, as in the tokenizer's decoder: with byte fallback each invalid byte
    becomes U+FFFD, else each invalid sequence.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        decoders = list(_decoder_types(backend.decoder))
        kinds = [kind for kind, _ in decoders]
        self.errors = _EACH_BYTE if "ByteFallback" in kinds else "replace"
        self._is_local = _is_local(decoders)
        self._first: dict[int, bytes | None] = {}
        self._next: dict[int, bytes | None] = {}

    def first(self, token_id: int) -> bytes | None:
        """Return the bytes of a token that begins a text; None if the vocabulary has no such token."""
        if token_id not in self._first:
            self._first[token_id] = self._read(token_id, None)
        return self._first[token_id]

    def next(self, token_id: int, previous: int | None = None) -> bytes | None:
        """Return the bytes of a token after `previous`; None if the vocabulary has no such token.

        Few decoders depend on `previous`; the default is a common token.
        """
        if not self._is_local and previous is not None:
            return self._read(token_id, previous)
        if token_id not in self._next:
            self._next[token_id] = self._read(token_id, self._usual)
        return self._next[token_id]

    def _read(self, token_id: int, previous: int | None) -> bytes | None:
        piece = cast("str | None", self._backend.id_to_token(token_id))
        if piece is None:
            return None
        if previous is None:
            text = self._decode([token_id])
        else:
            before = self._decode([previous])
            text = self._decode([previous, token_id])
            text = text[len(os.path.commonprefix((before, text))) :]  # noqa: RUF071 - texts, not paths
        if REPLACEMENT in text:
            byte = _BYTE_PIECE.fullmatch(piece)
            if byte is not None:
                return bytes([int(byte[1], 16)])
            if all(character in _BYTE_OF for character in piece):
                return bytes(_BYTE_OF[character] for character in piece)
        return text.encode("utf-8", "replace")

    @cached_property
    def _usual(self) -> int | None:
        """A token of whole characters, after which other tokens are decoded."""
        ids: Iterable[int] = self._backend.encode("a", add_special_tokens=False).ids[::-1]
        for token_id in (*ids, *sorted(self._backend.get_vocab().values())):
            text = self._decode([token_id])
            if text and REPLACEMENT not in text:
                return token_id
        return None

    def _decode(self, token_ids: list[int]) -> str:
        return cast("str", self._backend.decode(token_ids, skip_special_tokens=False))


class TokenStream:
    """Text of one output, decoded token by token. Bytes of an unfinished character wait for the rest.

    Args:
        token_bytes: bytes of each token.
        special: special tokens of the vocabulary.
        hidden: special tokens that are omitted from the text.
        after: tokens before the output. Their text continues in the output unless a special token ends it. If the
            output completes an unfinished character at their end, that character is part of the output.
    """

    def __init__(
        self, token_bytes: TokenBytes, special: Collection[int], *, hidden: Collection[int], after: Sequence[int]
    ) -> None:
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._previous: int | None = None
        self._characters = codecs.getincrementaldecoder("utf-8")(token_bytes.errors)
        same_text = takewhile(lambda token_id: token_id not in special, reversed(after))
        known = islice((one for one in same_text if token_bytes.next(one) is not None), _CONTEXT_TOKENS)
        for token_id in reversed(list(known)):
            self._characters.decode(token_bytes.next(token_id, self._previous) or b"")
            self._previous = token_id
        unfinished: bytes = self._characters.getstate()[0]
        self._before = unfinished.decode("utf-8", token_bytes.errors)

    def push(self, token_id: int) -> str:
        """Return the text that is complete with this token."""
        if token_id in self._hidden:
            return ""
        previous, source = self._previous, self._token_bytes
        data = source.first(token_id) if previous is None else source.next(token_id, previous)
        if data is None:
            return ""
        self._previous = token_id
        return self._without_prompt(self._characters.decode(data))

    def finish(self) -> str:
        """Return the text of the waiting bytes, at the end of the output."""
        return self._without_prompt(self._characters.decode(b"", True))

    def _without_prompt(self, text: str) -> str:
        """Remove the replacement characters of the prompt's unfinished character from the first text."""
        if text and self._before:
            text, self._before = text.removeprefix(self._before), ""
        return text


def _decoder_types(decoder: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield type and settings of each part of a decoder, in order."""
    if decoder is None:
        return
    parts: list[dict[str, Any]] = [json.loads(decoder.__getstate__())]
    while parts:
        part = parts.pop(0)
        if part["type"] == "Sequence":
            parts[:0] = part["decoders"]
        else:
            yield part["type"], part


def _is_local(decoders: list[tuple[str, dict[str, Any]]]) -> bool:
    """Return True if a token's text depends only on the token, and on whether it begins the text."""
    joined = False
    for kind, settings in decoders:
        if kind not in _PER_TOKEN:
            return False
        if joined and not (kind == "Fuse" or (kind == "Strip" and not settings["stop"])):
            return False
        joined |= kind in _JOINING
    return True


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level vocabularies.

    Printable bytes stand for themselves; the others are numbered from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
