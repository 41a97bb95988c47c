"""End-of-sequence tokens in configuration files.

A model's end-of-sequence tokens are the union of `eos_token_id` in config.json, in generation_config.json and in the
tokenizer, as in vLLM and SGLang. Chat fine-tunes often name the token that ends a turn in only one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from phonograph.errors import ModelError, shortened
from phonograph.files.model_files import read_json


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
