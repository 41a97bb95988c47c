"""Incremental detokenization: tokens become text one by one, in constant time each.

The text of a token depends on two things only: the token begins a text or follows another one, since many decoders drop
the space at the beginning of a text. The tokenizer's own decoder is asked once for both, and the answers are kept as
bytes, because a token may be a part of a character. A stream joins the bytes and decodes UTF-8. This cannot fail,
whatever the model generates; incremental decoding by the whole text, as in `tokenizers.decoders.DecodeStream`, fails
where a text changes in hindsight, which broken bytes cause.
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
"""Decoders that treat each token by itself, apart from the beginning of a text, as long as tokens are not joined."""
_JOINING = frozenset({"ByteLevel", "Fuse"})
_CONTEXT_TOKENS = 3
"""Tokens that can share an unfinished character with the next one: UTF-8 has at most 3 bytes before its last."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class TokenBytes:
    """Bytes of text that each token of a vocabulary adds.

    errors: handler for broken UTF-8 in the way of the tokenizer's own decoder: with byte fallback each broken byte
            becomes U+FFFD, else each broken sequence does
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
        """Return the bytes of a token that begins a text. None: the vocabulary has no such token."""
        if token_id not in self._first:
            self._first[token_id] = self._read(token_id, None)
        return self._first[token_id]

    def next(self, token_id: int, previous: int | None = None) -> bytes | None:
        """Return the bytes of a token that follows `previous`. None: the vocabulary has no such token.

        Few decoders need `previous`; by default it is a token that most texts may contain.
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
        """A token with whole characters, behind which the others are decoded."""
        ids: Iterable[int] = self._backend.encode("a", add_special_tokens=False).ids[::-1]
        for token_id in (*ids, *sorted(self._backend.get_vocab().values())):
            text = self._decode([token_id])
            if text and REPLACEMENT not in text:
                return token_id
        return None

    def _decode(self, token_ids: list[int]) -> str:
        return cast("str", self._backend.decode(token_ids, skip_special_tokens=False))


class TokenStream:
    """Text of one output, made token by token; bytes of an unfinished character wait for their rest.

    special:       special tokens of the vocabulary
    skips_special: leave them out of the text
    after:         tokens before the output. Their text goes on with the output unless a special token ends it. An
                   unfinished character at their end is part of the output if the output completes it, else of neither.
    """

    def __init__(
        self, token_bytes: TokenBytes, special: Collection[int], *, skips_special: bool, after: Sequence[int]
    ) -> None:
        self._token_bytes = token_bytes
        self._hidden: Collection[int] = special if skips_special else ()
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
        """Return the text of the bytes that still wait, at the end of the output."""
        return self._without_prompt(self._characters.decode(b"", True))

    def _without_prompt(self, text: str) -> str:
        """Remove the replacement characters of the prompt's unfinished character from the first text."""
        if text and self._before:
            text, self._before = text.removeprefix(self._before), ""
        return text


def _decoder_types(decoder: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the type and the settings of each part of a decoder, in order."""
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
    """Return True if a token's text depends on nothing but the token and whether it begins the text."""
    joined = False
    for kind, settings in decoders:
        if kind not in _PER_TOKEN:
            return False
        if joined and not (kind == "Fuse" or (kind == "Strip" and not settings["stop"])):
            return False
        joined |= kind in _JOINING
    return True


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte for each character of byte-level vocabularies: printable ones stand for themselves, others are
    counted from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
