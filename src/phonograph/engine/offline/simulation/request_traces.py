"""Traces of requests for simulations: Mooncake's JSONL, BurstGPT's CSV, or drawn ones.

A trace has lengths and times, no texts. Tokens are made up: those of a Mooncake block follow from its hash, so that
equal blocks are equal prefixes; all others are different.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phonograph.errors import ConfigError

HASHED_TOKENS = 512
"""Tokens of a block with a hash in Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace.

    Attributes:
        number: place in the trace, from 0.
        arrival: seconds since the start of the trace.
        input_len: tokens of the prompt.
        output_len: tokens of the answer.
        hash_ids: hashes of the prompt's blocks of 512 tokens; empty without any.
        origin: line of the file, for errors; "" without one.
    """

    number: int
    arrival: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    origin: str = ""

    def token_ids(self) -> list[int]:
        """Return the made-up tokens of the prompt, which are no tokens of a vocabulary."""
        if not self.hash_ids:
            first = (self.number + 1) << 31
            return list(range(first, first + self.input_len))
        blocks = (range(-(one + 1) * HASHED_TOKENS, -one * HASHED_TOKENS) for one in self.hash_ids)
        return [token for block in blocks for token in block][: self.input_len]


def read_trace(path: Path) -> list[TracedRequest]:
    """Read a trace by the ending of its name: .jsonl (Mooncake) or .csv (BurstGPT).

    Requests of BurstGPT without an answer have failed, and are left out.

    Raises:
        ConfigError: the file has another form, times that fall or are negative, or lengths below 1.
    """
    readers: dict[str, Callable[[Path], Iterator[tuple[float, int, int, Sequence[int], str]]]] = {
        ".jsonl": _mooncake,
        ".csv": _burst_gpt,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError("trace", str(path), "must be a .jsonl file of Mooncake's form, or a .csv file of BurstGPT's")
    requests: list[TracedRequest] = []
    try:
        for arrival, input_len, output_len, hash_ids, origin in reader(path):
            problem = None
            if arrival < 0:
                problem = f"has the negative time {arrival:g}"
            elif requests and arrival < requests[-1].arrival:
                problem = f"has the time {arrival:g} s after {requests[-1].arrival:g} s; sort the rows by time"
            elif input_len < 1 or output_len < 1:
                problem = f"has {input_len} and {output_len} tokens; both must be 1 or more"
            elif hash_ids and len(hash_ids) * HASHED_TOKENS < input_len:
                problem = f"has {len(hash_ids)} hash_ids of {HASHED_TOKENS} tokens for {input_len} tokens"
            if problem is not None:
                raise ConfigError("trace", str(path), f"{origin} {problem}")
            requests.append(TracedRequest(len(requests), arrival, input_len, output_len, tuple(hash_ids), origin))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("trace", str(path), f"cannot be read: {error}") from None
    if not requests:
        raise ConfigError("trace", str(path), "has no request")
    return requests


def drawn_trace(
    num_prompts: int,
    request_rate: float,
    input_lens: Callable[[random.Random, int], Sequence[int]],
    output_lens: Callable[[random.Random, int], Sequence[int]],
    seed: int,
) -> list[TracedRequest]:
    """Draw requests with exponential gaps, or all at once for an infinite rate.

    Args:
        num_prompts: number of requests.
        request_rate: requests a second.
        input_lens: draws the tokens of the prompts.
        output_lens: draws the tokens of the answers.
        seed: of lengths and gaps.
    """
    rng = random.Random(seed)
    lens = zip(input_lens(rng, num_prompts), output_lens(rng, num_prompts), strict=True)
    arrival, requests = 0.0, list[TracedRequest]()
    for number, (input_len, output_len) in enumerate(lens):
        requests.append(TracedRequest(number, arrival, input_len, output_len))
        arrival += rng.expovariate(request_rate) if request_rate < float("inf") else 0.0
    return requests


def _mooncake(path: Path) -> Iterator[tuple[float, int, int, Sequence[int], str]]:
    """Yield time, lengths and hashes of `timestamp` (ms), `input_length`, `output_length` and `hash_ids`."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line)
                numbers = row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"])
                hash_ids = [int(one) for one in row.get("hash_ids") or ()]
            except (ValueError, TypeError, KeyError) as error:
                problem = f"line {number} must have timestamp, input_length and output_length: {error!r}"
                raise ConfigError("trace", str(path), problem) from None
            yield *numbers, hash_ids, f"line {number}"


def _burst_gpt(path: Path) -> Iterator[tuple[float, int, int, Sequence[int], str]]:
    """Yield time and lengths of the columns `Timestamp` (s), `Request tokens` and `Response tokens`."""
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                arrival = float(row["Timestamp"])
                lens = int(row["Request tokens"]), int(row["Response tokens"])
            except (ValueError, TypeError, KeyError) as error:
                problem = f"line {number} must have Timestamp, Request tokens and Response tokens: {error!r}"
                raise ConfigError("trace", str(path), problem) from None
            if lens[1]:
                yield arrival, *lens, (), f"line {number}"
