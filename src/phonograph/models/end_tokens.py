"""End-of-sequence tokens in configuration files and in headers of GGUF files.

A model's end-of-sequence tokens are the union of `eos_token_id` in config.json, in generation_config.json and in the
tokenizer, as in vLLM and SGLang. Chat fine-tunes often name the token that ends a turn in only one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from phonograph.errors import ModelError, shortened
from phonograph.files.gguf_file import GgufFile
from phonograph.files.model_files import read_json

_END_TEXTS = (
    "<|im_end|> <|endoftext|> <|eot_id|> <|eom_id|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> </s> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <|fim_pad|> <fim-pad> "
    "<fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|> "
    "<\uff5cend\u2581of\u2581sentence\uff5c>"
)
"""Texts of tokens at which llama.cpp ends a text or a turn, whatever the header says (`src/llama-vocab.cpp`)."""
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def read_end_tokens(value: object, path: Path) -> tuple[int, ...]:
    """Read `eos_token_id` of the file `path`: null, a token id or a list of token ids.

    Raises:
        ModelError: the value is something else.
    """
    token_ids = cast("list[object]", value) if isinstance(value, list) else [] if value is None else [value]
    for token_id in token_ids:
        if type(token_id) is not int:  # which excludes booleans
            raise ModelError(
                f"{path}: eos_token_id={shortened(repr(value))}: must be a token id, a list of token ids or null"
                + (f", and {shortened(repr(token_id))} is not an integer" if isinstance(value, list) else "")
            )
    return cast("tuple[int, ...]", tuple(token_ids))


def model_end_tokens(value: object, path: Path) -> tuple[int, ...]:
    """Return the tokens of `eos_token_id` in config.json, `path`, and of generation_config.json next to it.

    Raises:
        ModelError: one of the files has something else than tokens.
    """
    tokens = read_generation(path).get("eos_token_id")
    return *read_end_tokens(value, path), *read_end_tokens(tokens, path.with_name("generation_config.json"))


def read_generation(path: Path) -> dict[str, Any]:
    """Return generation_config.json next to config.json, `path`; empty without it."""
    other = path.with_name("generation_config.json")
    return read_json(other) if other.is_file() else {}


def split_end_tokens(token_ids: Iterable[int], vocab_size: int) -> tuple[tuple[int, ...], str | None]:
    """Return the distinct ids within the vocabulary, and a note about the others, if any.

    The model cannot generate a token outside its vocabulary, so such an id has no effect.
    """
    distinct = list(dict.fromkeys(token_ids))
    known = tuple(token_id for token_id in distinct if 0 <= token_id < vocab_size)
    outside = [token_id for token_id in distinct if not 0 <= token_id < vocab_size]
    if not outside:
        return known, None
    names = shortened(", ".join(map(str, outside)))
    return known, f"eos_token_id {names} ignored: the model's token ids are 0 to {vocab_size - 1}"


def end_tokens_of_gguf(file: GgufFile) -> tuple[int, ...]:
    """Return the tokens that end a text or a turn: those that the header names, and those with known texts."""
    named = [file.values.get(f"tokenizer.ggml.{name}_token_id") for name in _END_KEYS]
    texts = file.values.get("tokenizer.ggml.tokens")
    ends = set(_END_TEXTS.split())
    found = {text: token for token, text in enumerate(texts) if text in ends} if isinstance(texts, list) else {}
    # In the format of gpt-oss this token only ends a message within an answer.
    if "<|return|>" in found and "<|call|>" in found:
        found.pop("<|end|>", None)
    return tuple(dict.fromkeys(token for token in (*named, *found.values()) if type(token) is int))
