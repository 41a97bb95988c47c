"""Parsing of recorded server-sent events into the metrics of one request."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from phonograph.bench.serving.connection import Recording


@dataclass(slots=True, kw_only=True)
class TimedSample:
    """One choice of an answer. Its times are seconds from the start of the request.

    times:  arrival of each chunk of output
    end:    arrival of its last chunk, with output or without
    tokens: its share of the answer's tokens by chunks of output, since `usage` counts all samples together
    text:   text of all chunks
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
        """Mean seconds of each token but the first; None if there is only one, or all came at once."""
        return (self.end - self.times[0]) / (self.tokens - 1) if self.tokens >= 2 and self.end > self.times[0] else None


@dataclass(slots=True, kw_only=True)
class Reply:
    """Answer to one request. Token counts are the server's (`usage`); a chunk may hold several tokens, or none.

    start:   seconds since the run began
    latency: seconds from `start` to the last chunk
    num_inputs: inputs that were embedded
    samples: choices in the order of their index; none if no token was generated
    error:   reason of a failed request
    """

    start: float
    latency: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_inputs: int = 0
    samples: list[TimedSample] = field(default_factory=list[TimedSample])
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from `start`, the connection included, to the first chunk of output, or None."""
        return min((sample.times[0] for sample in self.samples), default=None)

    @property
    def text(self) -> str:
        return "".join(sample.text for sample in self.samples)

    def count_tokens(self, output_tokens: int) -> None:
        """Set the number of output tokens, and divide them among the samples by chunks; exact if each is a chunk."""
        self.output_tokens = output_tokens
        for sample in self.samples:
            # A sample without text, such as an end of sequence alone, counts its last chunk.
            sample.times = sample.times or [sample.end]
        num_chunks = sum(len(sample.times) for sample in self.samples)
        for sample in self.samples:
            sample.tokens = output_tokens * len(sample.times) / num_chunks


class BrokenStream(Exception):
    """Error of a stream that is incomplete or reports an error."""


def read_reply(recording: Recording, run_start: float) -> Reply:
    """Parse a recorded stream of a completion or chat, embeddings or a transcript; a fault is the reply's `error`."""
    reply = Reply(start=recording.start - run_start, error=recording.error)
    if recording.error is not None:
        return reply
    try:
        (_read_object if recording.pieces[:1] and recording.pieces[0][:1] == b"{" else _read)(recording, reply)
    except BrokenStream as broken:
        reply.error = str(broken)
    except (KeyError, TypeError, AttributeError) as error:
        reply.error = f"an event is not in OpenAI's form ({type(error).__name__}: {error})"
    return reply


def chunks(recording: Recording) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the chunks of a stream, each with the arrival of its last byte.

    Raises:
        BrokenStream: a chunk is an error, or not a JSON object.
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
    finished = hears = False
    samples: dict[int, TimedSample] = {}
    for at, chunk in chunks(recording):
        usage = chunk.get("usage") or usage
        hears |= str(chunk.get("type") or chunk.get("object")).startswith(("transcript", "translation"))
        for choice in _choices(chunk):
            sample = samples.setdefault(choice.get("index", 0), TimedSample())
            text, is_output = _output_of(choice)
            sample.text += text
            sample.end = at - recording.start
            finished |= choice.get("finish_reason") is not None
            if is_output:
                sample.times.append(sample.end)
    if not finished:
        raise BrokenStream("the stream ended without a finish_reason")
    if hears:
        # A transcript may have no usage, or OpenAI's names.
        usage = usage or {}
        usage = {
            "prompt_tokens": usage.get("input_tokens", 0),
            "completion_tokens": usage.get("output_tokens", 0),
        } | usage
    if usage is None:
        raise BrokenStream("the stream has no usage: the server does not honour stream_options.include_usage")
    reply.prompt_tokens = usage["prompt_tokens"]
    reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reply.latency = max(sample.end for sample in samples.values())
    if usage["completion_tokens"] or hears:
        reply.samples = [samples[index] for index in sorted(samples)]
    reply.count_tokens(usage["completion_tokens"])


def _read_object(recording: Recording, reply: Reply) -> None:
    """Read embeddings, or a transcript that came at once, which has no counts of tokens."""
    answer = _decode(recording.body)
    reply.latency = recording.times[-1] - recording.start
    if "text" in answer:
        reply.samples = [TimedSample(times=[reply.latency], end=reply.latency, text=answer["text"])]
        return
    reply.num_inputs = len(answer["data"])
    reply.prompt_tokens = answer["usage"]["prompt_tokens"]


def _choices(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a chunk. OpenAI's events of a transcript have none; each is one."""
    kind = chunk.get("type")
    if "choices" not in chunk and kind in ("transcript.text.delta", "transcript.text.done"):
        return [{"text": chunk.get("delta"), "finish_reason": "stop" if kind == "transcript.text.done" else None}]
    return chunk.get("choices") or []


def _output_of(choice: dict[str, Any]) -> tuple[str, bool]:
    """Return the text of a chunk's choice, and True if the chunk stands for output.

    A chunk without text may be a token without a complete character. A chunk with only a role or a finish_reason is no
    output.
    """
    delta = choice.get("delta")
    if delta is None:
        text = choice.get("text") or ""
    else:
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    has_role = delta is not None and "role" in delta
    return text, bool(text) or not (has_role or choice.get("finish_reason") is not None)


def _events(times: Sequence[float], pieces: Sequence[bytes]) -> Iterator[tuple[float, bytes]]:
    """Yield the data of each event with the arrival of its last byte, without comments and other fields."""
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
        chunk = None
    if not isinstance(chunk, dict):
        raise BrokenStream(f"an event is not a JSON object: {data[:100].decode('utf-8', 'replace')}")
    return chunk
