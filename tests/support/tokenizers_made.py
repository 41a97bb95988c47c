"""Small tokenizers of every kind of decoder, with special tokens and an added token that is not special."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from phonograph.text.detokenizer import _BYTE_OF
from phonograph.text.tokenizer import Tokenizer

SPECIAL = ("<s>", "</s>")
THINK = "<think>"
PIECES = [
    "▁",
    "a",
    "b",
    "▁a",
    "▁b",
    "▁▁",
    "ab",
    ".",
    "é",
    "▁é",
    "\ufffd",
    "a\ufffd",
    "n't",
    "##a",
    "##b",
    "<0x41",
    "a</w>",
    "b</w>",
]


def byte_level(markers: tuple[str, ...] = (THINK,)) -> Tokenizer:
    """Tokens are bytes, and some that join the end of a character with the beginning of the next one.

    Args:
        markers: tokens that are added.
    """
    alphabet = {byte: character for character, byte in _BYTE_OF.items()}
    texts = [bytes([byte]) for byte in range(256)]
    texts += [b"\x98\x80\xf0\x9f", b"\xf0\x9f", b"\x98\x80", b" a", b"\xbd\xef", b"\xc3\xa9\xc3", b"ab", b"\xa9 "]
    pieces = ["".join(alphabet[byte] for byte in text) for text in texts]
    backend = Backend(models.BPE({piece: rank for rank, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _finish(backend, markers)


def byte_fallback(*, strips: bool = True) -> Tokenizer:
    """As Llama 2 and Mistral have it, or as Gemma does, which keeps the space at the beginning of a text."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + PIECES
    backend = Backend(models.BPE({piece: rank for rank, piece in enumerate(pieces)}, [("▁", "a")], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    return _finish(backend)


def with_decoder(decoder: Any) -> Tokenizer:
    """Words without bytes, joined by the decoder, or by spaces where there is none."""
    backend = Backend(models.WordLevel({piece: rank for rank, piece in enumerate(PIECES)}, "a"))
    if decoder is not None:
        backend.decoder = decoder
    return _finish(backend)


MAKERS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_unstripped": lambda: byte_fallback(strips=False),
    "metaspace": lambda: with_decoder(decoders.Metaspace(prepend_scheme="always")),
    "metaspace_never": lambda: with_decoder(decoders.Metaspace(prepend_scheme="never")),
    "word_piece": lambda: with_decoder(decoders.WordPiece()),
    "word_ends": lambda: with_decoder(decoders.BPEDecoder("</w>")),
    "none": lambda: with_decoder(None),
}


def _finish(backend: Backend, markers: tuple[str, ...] = (THINK,)) -> Tokenizer:
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in markers])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def make_pair_tokenizer(folder: Path, *, pairs: bool = True) -> None:
    """Write the tokenizer of an encoder: words w0 to w89 from token 4 on, and a separator unless `pairs` is False."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{number}" for number in range(90))]
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if pairs:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
        )
    # As the files of sentence-transformers have it.
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]").save_pretrained(folder)
