"""From a recorded stream of server-sent events to one request's figures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from phonograph.bench.serving.connection import Recording


@dataclass(slots=True, kw_only=True)
class Sample:
    """One choice of an answer. Its times are seconds from the start of the request.

    times:  when each chunk of output came
    end:    when its last chunk came, with output or without
    tokens: its share of the answer's tokens by chunks of output, since `usage` counts all samples together
    text:   of all chunks
    """

    times: list[float] = field(default_factory=list[float])
    end: float = 0.0
    tokens: float = 0.0
    text: str = ""

    @property
    def itls(self) -> list[float]:
        """Seconds between neighbouring chunks of output."""
        return [late - early for early, late in itertools.pairwise(self.times)]

    @property
    def tpot(self) -> float | None:
        """Seconds for each token but the first, on average; None where there is no second one."""
        return (self.end - self.times[0]) / (self.tokens - 1) if self.tokens >= 2 else None


@dataclass(slots=True, kw_only=True)
class Reply:
    """One request's answer. Token counts are the server's (`usage`); a chunk may hold several tokens, or none.

    start:   seconds since the run began
    latency: seconds from `start` to the last chunk
    samples: the choices in the order of their index; none where no token was generated
    error:   why it counts as failed
    """

    start: float
    latency: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    samples: list[Sample] = field(default_factory=list[Sample])
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from `start`, the connection included, to the first chunk of output; None where none came."""
        return min((sample.times[0] for sample in self.samples), default=None)

    @property
    def text(self) -> str:
        return "".join(sample.text for sample in self.samples)


class BrokenStream(Exception):
    """The stream says, or shows, that the answer is not complete."""


def read_reply(recording: Recording, run_start: float) -> Reply:
    """Reads what a streamed completion or chat left. Whatever is missing from it is an error of the reply."""
    reply = Reply(start=recording.start - run_start, error=recording.error)
    if recording.error is not None:
        return reply
    try:
        _read(recording, reply)
    except BrokenStream as broken:
        reply.error = str(broken)
    except (KeyError, TypeError, AttributeError) as error:
        reply.error = f"an event is not in OpenAI's form ({type(error).__name__}: {error})"
    return reply


def chunks(recording: Recording) -> Iterator[tuple[float, dict[str, Any]]]:
    """The chunks of a stream, and when the last byte of each came.

    Raises:
        BrokenStream: one of them is an error, or no JSON object.
    """
    for at, data in _events(recording.times, recording.pieces):
        if data == b"[DONE]":
            break
        chunk = _decode(data)
        if chunk.get("error"):
            error = chunk["error"]
            raise BrokenStream(f"in the stream: {error.get('message', error) if isinstance(error, dict) else error}")
        yield at, chunk


def _read(recording: Recording, reply: Reply) -> None:
    usage: dict[str, Any] | None = None
    finished = False
    samples: dict[int, Sample] = {}
    for at, chunk in chunks(recording):
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices") or ():
            sample = samples.setdefault(choice.get("index", 0), Sample())
            text, is_output = _output_of(choice)
            sample.text += text
            sample.end = at - recording.start
            finished |= choice.get("finish_reason") is not None
            if is_output:
                sample.times.append(sample.end)
    if not finished:
        raise BrokenStream("the stream ended without a finish_reason")
    if usage is None:
        raise BrokenStream("the stream has no usage: the server does not honour stream_options.include_usage")
    reply.prompt_tokens = usage["prompt_tokens"]
    reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reply.output_tokens = usage["completion_tokens"]
    reply.latency = max(sample.end for sample in samples.values())
    if reply.output_tokens:
        reply.samples = [samples[index] for index in sorted(samples)]
        _divide_tokens(reply.samples, reply.output_tokens)


def _divide_tokens(samples: Sequence[Sample], output_tokens: int) -> None:
    """Gives each sample its share of the answer's tokens: its own number where each token is a chunk."""
    for sample in samples:
        # A sample whose tokens are no text, such as an end of sequence alone, has one chunk: that which ends it.
        sample.times = sample.times or [sample.end]
    num_chunks = sum(len(sample.times) for sample in samples)
    for sample in samples:
        sample.tokens = output_tokens * len(sample.times) / num_chunks


def _output_of(choice: dict[str, Any]) -> tuple[str, bool]:
    """Text of a chunk's choice, and whether the chunk stands for output.

    A chunk without text may be a token that makes no character yet. It is none where it only says who speaks, or that
    the answer has ended.
    """
    delta = choice.get("delta")
    if delta is None:
        text = choice.get("text") or ""
    else:
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    speaks = delta is not None and "role" in delta
    return text, bool(text) or not (speaks or choice.get("finish_reason") is not None)


def _events(times: Sequence[float], pieces: Sequence[bytes]) -> Iterator[tuple[float, bytes]]:
    """The data of each event, and when its last byte came. Comments and other fields have no data."""
    rest = b""
    for at, piece in zip(times, pieces, strict=True):
        *complete, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in complete:
            if data := _data(event):
                yield at, data
    if data := _data(rest):
        yield times[-1], data


def _data(event: bytes) -> bytes:
    return b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))


def _decode(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        raise BrokenStream(f"an event is no JSON: {data[:100].decode('utf-8', 'replace')}") from None
    if not isinstance(chunk, dict):
        raise BrokenStream(f"an event is no JSON object: {data[:100].decode('utf-8', 'replace')}")
    return chunk
