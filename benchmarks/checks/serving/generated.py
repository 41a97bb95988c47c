"""A model folder that a server can start from with nothing but a config.json: random weights and a tokenizer made here.

Every token but the special ones is text of its own (a word of syllables, or a printable character), so that each step
of a stream shows, whichever server streams it, and any two servers read and write the same.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from phonograph.errors import ModelError

_SPACE, _NEWLINE = "\u0120", "\u010a"
"""As a byte-level tokenizer writes them."""
_VOWELS = "aeiou"
_CONSONANTS = [letter for letter in string.ascii_lowercase if letter not in _VOWELS]


def make_model_folder(config: Path, folder: Path) -> Path:
    """Write config.json and a tokenizer with as many tokens as the model has; return the folder.

    config: a folder with a config.json

    Raises:
        ModelError: it cannot be read, or has no vocabulary that this can fill.
    """
    source = config / "config.json"
    try:
        text = source.read_text(encoding="utf-8")
        settings: dict[str, Any] = json.loads(text)
        vocab_size = int(settings["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{source} is no configuration of a model with a vocab_size: {error!r}") from error
    special = _special_tokens(settings)
    tokenizer = make_tokenizer(vocab_size, special)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text, encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    named = {
        f"{name}_token": special[token_id]
        for name in ("bos", "eos", "pad")
        if (token_id := _first(settings.get(f"{name}_token_id"))) is not None
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": settings.get("max_position_embeddings"),
        "clean_up_tokenization_spaces": False,
        **named,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return folder


def make_tokenizer(vocab_size: int, special: dict[int, str]) -> Tokenizer:
    """Return a byte-level BPE of exactly so many tokens, the same each time. Text outside of ASCII has none of them.

    special: tokens that have to have these ids

    Raises:
        ModelError: so many words cannot be made, or a special token has an id outside of the vocabulary.
    """
    words = _words()
    vocab: dict[str, int] = {}
    merges: list[tuple[str, str]] = []
    for token_id in range(vocab_size):
        if token_id in special:
            vocab[special[token_id]] = token_id
            continue
        word, parts = next(words, (None, None))
        if word is None:
            raise ModelError(f"vocab_size={vocab_size} is more than the words that can be made")
        vocab[word] = token_id
        if parts is not None:
            merges.append(parts)
    if len(merges) < 1 or len(vocab) != vocab_size or not set(special) <= set(range(vocab_size)):
        raise ModelError(f"vocab_size={vocab_size} is too small for every character, or for the ids {sorted(special)}")
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(content, special=True) for content in special.values()])
    return tokenizer


def _words() -> Iterator[tuple[str, tuple[str, str] | None]]:
    """Tokens with the two that each is merged from. A word grows from its space on, so that text has one reading."""
    printable = (chr(code) for code in range(ord("!"), ord("~") + 1))
    for character in (_SPACE, _NEWLINE, *printable):
        yield character, None
    syllables = [first + second for first, second in itertools.product(_CONSONANTS, _VOWELS)]
    for syllable in syllables:
        yield syllable, (syllable[0], syllable[1])
    stems = [_SPACE]
    for _ in range(3):
        grown = [(stem, syllable) for stem, syllable in itertools.product(stems, syllables)]
        for stem, syllable in grown:
            yield stem + syllable, (stem, syllable)
        stems = [stem + syllable for stem, syllable in grown]


def _special_tokens(settings: dict[str, Any]) -> dict[int, str]:
    ids: set[int] = set()
    for name in ("bos", "eos", "pad"):
        value = settings.get(f"{name}_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return {token_id: f"<|special_{token_id}|>" for token_id in sorted(ids)}


def _first(value: int | list[int] | None) -> int | None:
    return value[0] if isinstance(value, list) else value
