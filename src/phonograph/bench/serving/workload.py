"""Prompts of a serving benchmark: random ones, also for a trace, or those of a file."""

from __future__ import annotations

import bisect
import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from phonograph.bench.serving.settings import Prompt, ServingRequest
from phonograph.engine.offline.simulation.request_traces import HASHED_TOKENS, read_trace
from phonograph.errors import ConfigError, counted
from phonograph.text.tokenizer import Tokenizer

_ROUNDS = 8
"""Additions in a row that may leave a text as long as before."""
_ENDINGS = 64
"""Tokens to try as the end of a text that lacks some."""
_OUTPUT_FIELDS = ("max_tokens", "output_len", "output_tokens")


def _plain_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that are not special."""
    known = [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.piece(token_id) is not None]
    return [token_id for token_id in known if token_id not in tokenizer.special_token_ids]


def random_prompts(
    tokenizer: Tokenizer, rng: random.Random, prompt_format: Literal["tokens", "text"]
) -> Callable[[int], Prompt]:
    """Return a function that makes a random prompt of a number of tokens, none of them special.

    No two prompts share a prefix worth caching. A text never has more tokens than requested, counted without the
    special tokens that a server adds. It has fewer if `_ENDINGS` endings give no text of that number.
    """
    ids = _plain_ids(tokenizer)

    def tokens(count: int) -> list[int]:
        return rng.choices(ids, k=count)

    def length_of(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    def decode(token_ids: list[int]) -> str:
        # Without the characters that stand for broken bytes.
        return tokenizer.decode(token_ids).replace("\ufffd", "")

    def long_text(count: int) -> str:
        """Return a text of `count` tokens or more, unless `_ROUNDS` additions in a row make it no longer.

        Decoded token ids rarely encode as themselves: neighbours merge, and bytes that are no character are left out.
        """
        made, length, fruitless = "", 0, 0
        while length < count and fruitless < _ROUNDS:
            made += decode(tokens(count - length))
            before, length = length, length_of(made)
            fruitless = fruitless + 1 if length <= before else 0
        return made

    def text(count: int) -> str:
        made = long_text(count)
        if length_of(made) > count:
            # The number of tokens can fall where a character is added, but each length that is taken was counted.
            made = made[: bisect.bisect_right(range(len(made)), count, key=lambda end: length_of(made[:end])) - 1]
        length = length_of(made)
        # An empty text is not a prompt, so its only token may be any of the vocabulary.
        for token_id in rng.sample(ids, min(len(ids), _ENDINGS) if made else len(ids)):
            if length == count:
                break
            longer = made + decode([token_id])
            if length < (with_token := length_of(longer)) <= count:
                made, length = longer, with_token
        if not made:
            raise ConfigError(
                "prompt_format", "text", f"no text has {counted(count, 'token')} of this tokenizer; use tokens"
            )
        return made

    return tokens if prompt_format == "tokens" else text


def traced_requests(path: Path, tokenizer: Tokenizer, rng: random.Random) -> list[ServingRequest]:
    """Return the requests of a trace with random tokens; blocks of equal hashes are equal.

    Raises:
        ConfigError: the file cannot be read, or a line has another form.
    """
    try:
        trace = read_trace(path)
    except ConfigError as error:
        raise ConfigError("dataset_path", error.value, error.problem) from None
    ids = _plain_ids(tokenizer)
    blocks: defaultdict[int, list[int]] = defaultdict(lambda: rng.choices(ids, k=HASHED_TOKENS))

    def prompt(hash_ids: Sequence[int], length: int) -> list[int]:
        if not hash_ids:
            return rng.choices(ids, k=length)
        return [token for one in hash_ids for token in blocks[one]][:length]

    return [
        ServingRequest(prompt=prompt(one.hash_ids, one.input_len), output_len=one.output_len, due=one.arrival)
        for one in trace
    ]


def read_requests(path: Path, *, output_len: int) -> list[ServingRequest]:
    """Read requests from a file with one JSON object a line: `prompt` (text or token ids) or `messages`.

    max_tokens (or output_len, output_tokens) of a line overrides `output_len`.

    Raises:
        ConfigError: the file cannot be read, or a line has another form.
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
        raise wrong(f"is not JSON: {error}") from None
    fields = [name for name in ("prompt", "messages") if isinstance(entry, dict) and entry.get(name)]
    if len(fields) != 1:
        raise wrong("must be an object with either prompt or messages")
    (name,) = fields
    prompt = entry[name]
    kind, plural = (dict, "messages") if name == "messages" else (int, "token ids")
    is_text = name == "prompt" and isinstance(prompt, str)
    if not is_text and not (isinstance(prompt, list) and all(isinstance(part, kind) for part in prompt)):
        raise wrong(f"has a {name} that is neither a text nor a list of {plural}")
    length = next((entry[name] for name in _OUTPUT_FIELDS if entry.get(name) is not None), output_len)
    if not isinstance(length, int) or length < 1:
        raise wrong(f"wants {length!r} tokens; must be a whole number >= 1")
    return ServingRequest(prompt=prompt, output_len=length)
