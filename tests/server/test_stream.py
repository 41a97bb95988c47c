"""Streams that write themselves: clients that do not read, chunks that cannot be written, and calls that fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.process.calls import Call, Delta, Prompt, Sample
from phonograph.files.model_files import model_path
from phonograph.server.http.api_errors import invalid
from phonograph.server.http.error_count import ERRORS, ErrorCount, ErrorCounts
from phonograph.server.http.stream import SERVERS_SEND, EventStream
from phonograph.server.openai.answers import ChunkStream
from phonograph.server.openai.protocol import CompletionBody
from phonograph.text.tokenizer import Tokenizer


class Client:
    """Takes what is sent, at the pace that `reads` allows: cleared, `send` waits as a server's does."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ended = False
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Message) -> None:
        if not self.reads.is_set():
            await self.reads.wait()
        if message["type"] == "http.response.body":
            self.pieces.append(message["body"])
            self.ended = not message["more_body"]

    def texts(self) -> list[list[str]]:
        """Return the texts of the chunks, by piece."""
        return [
            [
                json.loads(event[6:])["choices"][0]["text"]
                for event in piece.decode().split("\n\n")
                if event.startswith("data: {") and '"choices"' in event
            ]
            for piece in self.pieces
        ]


class Answer:
    def __init__(self) -> None:
        self.head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
        self.broken = False

    def whole(self) -> dict[str, Any]:
        raise AssertionError("it is a stream")

    def usage(self) -> dict[str, Any]:
        raise AssertionError("usage was not requested")

    def choices(self, sample: Sample, delta: Delta) -> list[dict[str, Any]]:
        if self.broken:
            raise ValueError("cannot be written")
        return [{"index": sample.index, "text": delta.text}] if delta.token_ids else []


class Bench:
    def __init__(self) -> None:
        tokenizer = Tokenizer.load(model_path("demo"))
        self.ids = tokenizer.encode("Tom has twelve apples", add_special_tokens=False)
        self.words = [tokenizer.decode([token_id]) for token_id in self.ids]
        self.sample = Sample(0, tokenizer, SamplingParams(max_tokens=50), [])
        self.prompt = Prompt(0, [1], [self.sample], num_growing=1)
        self.ends: list[Call] = []
        self.call = Call([self.prompt], streams=True, end=self.ends.append)
        self.client, self.answer = Client(), Answer()
        writer = ChunkStream(self.answer, self.call, CompletionBody(prompt="x", stream=True))
        self.stream = EventStream(self.call, writer, {}, {})
        self.errors = ErrorCounts()
        self._next = 0

    def grow(self, count: int = 1, *, last: bool = False) -> None:
        """As a report does."""
        ids = self.ids[self._next : self._next + count]
        self._next += count
        self.sample.grow(ids, None, "length" if last else None, None)
        self.call.touch(self.prompt, self.sample)
        if self.call.on_change is not None:
            self.call.on_change()

    async def run(self) -> None:
        async def wrapped(message: Message) -> None:
            assert message["type"] == "http.response.start", "chunks take the short way"
            await self.client.send(message)

        async def receive() -> Message:
            raise AssertionError("nothing is received")

        extensions = {SERVERS_SEND: self.client.send, ERRORS: self.errors}
        await self.stream({"type": "http", "extensions": extensions}, receive, wrapped)


def in_loop(body: Callable[[Bench, asyncio.Task[None]], Awaitable[None]]) -> None:
    async def run() -> None:
        bench = Bench()
        task = asyncio.create_task(bench.run())
        await asyncio.sleep(0)
        await body(bench, task)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_each_report_is_written_at_once() -> None:
    async def body(bench: Bench, task: asyncio.Task[None]) -> None:
        for count in range(1, 4):
            bench.grow()
            assert len(bench.client.pieces) == count, "no turn of the event loop was needed"
        bench.grow(last=True)
        await task
        assert bench.client.texts() == [[word] for word in bench.words[:4]] + [[]]
        assert bench.client.ended and bench.client.pieces[-1] == b"data: [DONE]\n\n" and bench.ends == [bench.call]

    in_loop(body)


@pytest.mark.parametrize("last", [False, True])
def test_a_client_that_does_not_read_gets_the_rest_in_one_piece(last: bool) -> None:
    async def body(bench: Bench, task: asyncio.Task[None]) -> None:
        bench.client.reads.clear()
        bench.grow()  # stops half-way
        await asyncio.sleep(0)
        bench.grow()
        bench.grow(last=last)
        assert bench.client.pieces == []
        bench.client.reads.set()
        await asyncio.sleep(0.01)
        if not last:
            assert bench.client.texts() == [[bench.words[0]], ["".join(bench.words[1:3])]]
            bench.grow(last=True)
        await task
        assert "".join(text for piece in bench.client.texts() for text in piece) == bench.sample.text
        assert bench.client.pieces[-1] == b"data: [DONE]\n\n" and bench.client.ended

    in_loop(body)


def test_text_from_before_the_stream_is_sent_first() -> None:
    async def run() -> None:
        bench = Bench()
        bench.grow(2)
        task = asyncio.create_task(bench.run())
        await asyncio.sleep(0)
        bench.grow(last=True)
        await task
        assert bench.client.texts() == [["".join(bench.words[:2])], [bench.words[2]], []]

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_chunk_that_cannot_be_written_ends_its_call_alone() -> None:
    async def body(bench: Bench, task: asyncio.Task[None]) -> None:
        bench.grow()
        bench.answer.broken = True
        bench.grow()  # does not raise in the reader of reports
        await task
        assert b"internal_error" in bench.client.pieces[-1] and bench.client.pieces[-1].endswith(b"data: [DONE]\n\n")
        assert bench.client.ended and bench.ends == [bench.call]
        assert (bench.errors.refused, bench.errors.failed) == (0, 1)

    in_loop(body)


@pytest.mark.parametrize("reads", [True, False])
def test_an_error_follows_the_text_that_was_sent(reads: bool) -> None:
    async def body(bench: Bench, task: asyncio.Task[None]) -> None:
        if not reads:
            bench.client.reads.clear()
        bench.grow()
        bench.call.fail(invalid("x", "it failed"))
        await asyncio.sleep(0.01)
        assert task.done() == reads
        bench.client.reads.set()
        await task
        assert bench.client.texts()[0] == [bench.words[0]] and b"it failed" in bench.client.pieces[-1]
        assert bench.client.ended

    in_loop(body)


def test_a_cancelled_stream_closes_its_call() -> None:
    async def body(bench: Bench, task: asyncio.Task[None]) -> None:
        bench.client.reads.clear()
        bench.grow()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bench.ends == [bench.call] and bench.call.on_change is None

    in_loop(body)


@pytest.mark.parametrize(
    ("method", "status", "expected"),
    [("POST", 200, (0, 0)), ("POST", 422, (1, 0)), ("POST", 503, (0, 1)), ("POST", 499, (0, 0)), ("GET", 401, (0, 0))],
)
def test_answers_with_an_error_are_counted(method: str, status: int, expected: tuple[int, int]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status})

    counts, client = ErrorCounts(), Client()
    asyncio.run(ErrorCount(app, counts)({"type": "http", "method": method}, client.send, client.send))  # type: ignore[arg-type]
    assert (counts.refused, counts.failed) == expected


def test_an_exception_of_the_application_is_counted() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("a bug")

    counts, client = ErrorCounts(), Client()
    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(ErrorCount(app, counts)({"type": "http", "method": "POST"}, client.send, client.send))  # type: ignore[arg-type]
    assert (counts.refused, counts.failed) == (0, 1)
