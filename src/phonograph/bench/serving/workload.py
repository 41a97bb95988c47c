"""The requests of a serving benchmark: random prompts, lengths like ShareGPT's, or prompts from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phonograph.bench.cases import Lengths
from phonograph.bench.serving.lengths import sharegpt_like_lengths
from phonograph.errors import ConfigError
from phonograph.text.tokenizer import Tokenizer

Dataset = Literal["random", "sharegpt-like", "jsonl"]
PromptFormat = Literal["tokens", "text"]
Prompt = str | list[int] | list[dict[str, Any]]
"""A text, token ids, or the messages of a chat."""

_ROUNDS = 8
_FILLERS = 64
"""Tokens to try as the end of a text that lacks some."""
_OUTPUT_FIELDS = ("max_tokens", "output_len", "output_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRequest:
    """output_len: tokens that the answer may have, and has to have where the end of sequence is ignored."""

    prompt: Prompt
    output_len: int


def draw_lengths(
    dataset: Dataset, rng: random.Random, count: int, *, input_len: Lengths, output_len: Lengths
) -> list[tuple[int, int]]:
    """Lengths of the requests of a dataset that is made here; the ranges are those of `random`."""
    if dataset == "sharegpt-like":
        return sharegpt_like_lengths(rng, count)
    return list(zip(input_len.draw(rng, count), output_len.draw(rng, count), strict=True))


def random_prompts(tokenizer: Tokenizer, rng: random.Random, prompt_format: PromptFormat) -> Callable[[int], Prompt]:
    """Returns a function that makes a random prompt of so many tokens, none of them special.

    No two prompts share a prefix worth caching. A text never has more tokens than asked for, as this tokenizer counts
    without the special tokens that a server adds; it has fewer where `_FILLERS` endings give no text of that number.
    """
    known = [one for one in range(tokenizer.vocab_size) if tokenizer.piece(one) is not None]
    ids = [one for one in known if one not in tokenizer.special_token_ids]

    def tokens(count: int) -> list[int]:
        return rng.choices(ids, k=count)

    def text(count: int) -> str:
        made = _cut(tokenizer, _long_text(tokenizer, tokens, count), count)
        length = _length(tokenizer, made)
        # A text of nothing is no prompt, so its only token may be any of the vocabulary.
        for token_id in rng.sample(ids, min(len(ids), _FILLERS) if made else len(ids)):
            if length == count:
                break
            longer = made + _clean(tokenizer.decode([token_id]))
            if length < (with_token := _length(tokenizer, longer)) <= count:
                made, length = longer, with_token
        if not made:
            raise ConfigError("prompt_format", "text", f"no text has {count} tokens of this tokenizer; use tokens")
        return made

    return tokens if prompt_format == "tokens" else text


def _long_text(tokenizer: Tokenizer, tokens: Callable[[int], list[int]], count: int) -> str:
    """Returns a random text of `count` tokens or more, unless `_ROUNDS` additions in a row make it no longer.

    Decoded token ids rarely encode as themselves: neighbours merge, and bytes that are no character are left out.
    """
    made, length, fruitless = "", 0, 0
    while length < count and fruitless < _ROUNDS:
        made += _clean(tokenizer.decode(tokens(count - length)))
        before, length = length, _length(tokenizer, made)
        fruitless = fruitless + 1 if length <= before else 0
    return made


def _cut(tokenizer: Tokenizer, text: str, count: int) -> str:
    """Returns a beginning of the text that has at most `count` tokens, and with one character more has more.

    The number of tokens can fall where a character is added, so each beginning that is taken has been encoded.
    """
    low, high = 0, len(text)
    middle = high
    while low < high:
        if _length(tokenizer, text[:middle]) <= count:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return text[:low]


def _length(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def _clean(text: str) -> str:
    """Returns the text without the characters that stand for broken bytes."""
    return text.replace("\ufffd", "")


def read_requests(path: Path, *, output_len: int) -> list[ServingRequest]:
    """Requests from a file with one JSON object a line: `prompt` (text or token ids) or `messages`.

    max_tokens (or output_len, output_tokens) of a line goes before `output_len`.

    Raises:
        ConfigError: the file cannot be read, or a line is none of this.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError("dataset_path", str(path), f"cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 at byte {error.start}; convert it, as by iconv -f latin1 -t utf-8"
        raise ConfigError("dataset_path", str(path), problem) from None
    found = [_read_line(path, number, line, output_len) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError("dataset_path", str(path), "has no line with a prompt")
    return found


def _read_line(path: Path, number: int, line: str, output_len: int) -> ServingRequest:
    def wrong(problem: str) -> ConfigError:
        return ConfigError("dataset_path", str(path), f"line {number} {problem}")

    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise wrong(f"is no JSON: {error}") from None
    given = [name for name in ("prompt", "messages") if isinstance(entry, dict) and entry.get(name)]
    if len(given) != 1:
        raise wrong("must be an object with either prompt or messages")
    prompt = entry[given[0]]
    is_text = given[0] == "prompt" and isinstance(prompt, str)
    kind = dict if given[0] == "messages" else int
    if not is_text and not (isinstance(prompt, list) and all(isinstance(part, kind) for part in prompt)):
        raise wrong(
            f"has a {given[0]} that is neither a text nor a list of {'messages' if kind is dict else 'token ids'}"
        )
    length = next((entry[name] for name in _OUTPUT_FIELDS if entry.get(name) is not None), output_len)
    if not isinstance(length, int) or length < 1:
        raise wrong(f"wants {length!r} tokens; must be a whole number >= 1")
    return ServingRequest(prompt=prompt, output_len=length)
