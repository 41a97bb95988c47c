"""Bytes of tokens for grammars, as the tokenizer's own decoder has them, for each kind of tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from sentencepiece_like import sentencepiece_like
from tokenizers import decoders
from tokenizers_made import MAKERS, SPECIAL, THINK, byte_fallback, byte_level

from phonograph.errors import RequestError
from phonograph.structured.vocabulary import Vocabulary
from phonograph.text.detokenizer import _BYTE_OF
from phonograph.text.tokenizer import Tokenizer


def with_decoder_sequence(*parts: Any) -> Tokenizer:
    """Return a byte-level tokenizer whose decoder is a sequence, as transformers makes it from a GGUF file."""
    tokenizer = byte_level()
    tokenizer.hugging_face.backend_tokenizer.decoder = decoders.Sequence([*parts])
    return Tokenizer(tokenizer.hugging_face)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "converted": lambda: with_decoder_sequence(decoders.ByteLevel(), decoders.Fuse()),
    "byte fallback": byte_fallback,
    "byte fallback that keeps the space": MAKERS["byte_fallback_unstripped"],
    "sentencepiece": sentencepiece_like,
}


def bytes_of(piece: str, *, is_byte_level: bool) -> bytes:
    """Return the bytes of a token as its file has it, by the rules of its kind."""
    if piece == THINK or piece in SPECIAL:
        return piece.encode()
    if is_byte_level:
        return bytes(_BYTE_OF[character] for character in piece)
    if len(piece) == 6 and piece.startswith("<0x"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_have_their_bytes(kind: str) -> None:
    tokenizer = KINDS[kind]()
    size = tokenizer.vocab_size + 5
    vocabulary = Vocabulary.of_tokenizer(tokenizer, size, [3])
    pieces = tokenizer.hugging_face.backend_tokenizer.get_vocab()
    right = [b""] * size
    for piece, token_id in pieces.items():
        right[token_id] = bytes_of(piece, is_byte_level=kind in ("byte level", "converted"))
    assert list(vocabulary.tokens) == right and vocabulary.size == size and vocabulary.eos == (3,)
    assert vocabulary.special == tokenizer.special_token_ids
    rng = random.Random(kind)
    for _ in range(50):
        token_ids = tokenizer.encode("a", add_special_tokens=False) + rng.choices(range(256), k=6)
        joined = b"".join(vocabulary.tokens[one] for one in token_ids)
        if (text := joined.decode("utf-8", "ignore")).encode() == joined:
            assert tokenizer.decode(token_ids).strip() == text.strip()


def test_a_tokenizer_whose_tokens_are_not_its_text_is_refused() -> None:
    """A decoder that changes what several tokens say together, which no token does by itself."""
    tokenizer = with_decoder_sequence(decoders.ByteLevel(), decoders.Replace("1.5", "2"))
    with pytest.raises(RequestError, match=r"the tokenizer's tokens, decoded one by one, give 'The .* --tokenizer"):
        Vocabulary.of_tokenizer(tokenizer, tokenizer.vocab_size, [0])
