"""The limits of request bodies themselves: what just fits is answered, and one byte or moment more is not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from phonograph.config.server_config import ServerConfig
from phonograph.server.http import body_guard
from phonograph.server.http.body_guard import BYTES_PER_SECOND, BodyGuard


class Exchange:
    """A guard around an application that keeps the body it gets."""

    def __init__(self, *, seconds: float = 0, **settings: Any) -> None:
        self.seconds = seconds
        self.bodies: list[bytes] = []
        self.guard = BodyGuard(self.application, ServerConfig(**settings))

    async def application(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append((await receive())["body"])
        await asyncio.sleep(self.seconds)
        self.queued = self.guard._num_bytes
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.answered = self.guard._num_bytes

    async def send(self, pieces: Sequence[bytes], *, length: int | str | None = None, wait: float = 0) -> list[Any]:
        """Send a body in pieces with pauses between, and return the messages of the answer."""
        headers = [] if length is None else [(b"content-length", str(length).encode())]
        messages: list[Any] = []
        arriving = iter(enumerate(pieces, start=1))

        async def receive() -> Any:
            await asyncio.sleep(wait)
            number, piece = next(arriving)
            return {"type": "http.request", "body": piece, "more_body": number < len(pieces)}

        async def send(message: Any) -> None:
            messages.append(message)

        await self.guard({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive, send)
        return messages

    def status(self, pieces: Sequence[bytes], **settings: Any) -> int:
        (started, *_) = asyncio.run(self.send(pieces, **settings))
        assert self.guard._num_bytes == 0
        return started["status"]


def text(size: int) -> bytes:
    """Return JSON of this many bytes."""
    return b'"' + b"a" * (size - 2) + b'"'


def test_a_body_of_exactly_the_largest_size_is_taken() -> None:
    one = Exchange(max_request_bytes=1000)
    for pieces, length in (([text(1000)], 1000), ([text(1000)], None), ([b" " * 999, b"1"], None)):
        assert one.status(pieces, length=length) == 200
        assert one.bodies.pop() == b"".join(pieces)
    for pieces, length in (([text(1001)], 1001), ([text(1001)], None), ([b" " * 1000, b"1"], None), ([b"1"], 1001)):
        assert one.status(pieces, length=length) == 413
    assert one.status([b"1"], length="-1") == one.status([b"1"], length="1x") == 413
    assert one.bodies == []


def test_a_large_body_has_the_time_that_the_minimum_rate_takes() -> None:
    """Its pieces come at about three times the minimum rate, for longer than `body_timeout`."""
    one = Exchange(body_timeout=0.15)
    half = BYTES_PER_SECOND // 8
    assert one.status([b" " * half] * 7 + [b"1"], wait=0.04) == 200
    assert one.status([b" " * 100] * 7 + [b"1"], wait=0.04) == 408


def test_bodies_that_just_fit_the_queue_are_taken() -> None:
    async def two(*sizes: int) -> list[int]:
        one = Exchange(max_queued_bytes=2000, seconds=0.05)
        answers = await asyncio.gather(*(one.send([text(size)]) for size in sizes))
        return [messages[0]["status"] for messages in answers]

    assert asyncio.run(two(1000, 1000)) == [200, 200]
    assert asyncio.run(two(1000, 1001)) == [200, 429]


def test_a_body_is_queued_until_its_answer_begins() -> None:
    one = Exchange()
    assert one.status([text(500), b" " * 3]) == 200
    assert (one.queued, one.answered) == (503, 0)


@pytest.mark.parametrize("cuts", [[20], [7, 13], [1] * 20])
def test_each_byte_is_counted_once_where_a_body_is_longer_than_a_piece(
    cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_guard, "PIECE", 4)
    body, starts = b"[" * 10 + b"]" * 10, [sum(cuts[:index]) for index in range(len(cuts))]
    pieces = [body[start : start + length] for start, length in zip(starts, cuts, strict=True)]
    assert Exchange(max_request_fields=10).status(pieces) == 200
    assert Exchange(max_request_fields=9).status(pieces) == 400


def test_the_answer_to_a_refused_body_ends_after_the_rest_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [text(20), *[b" " * 20] * 9]
    one = Exchange(max_request_bytes=30)
    messages = asyncio.run(one.send(pieces, wait=0.01))
    assert [message.get("more_body") for message in messages] == [None, True, False]
    assert dict(messages[0]["headers"])[b"connection"] == b"close"
    monkeypatch.setattr(body_guard, "LINGER_SECONDS", 0.05)
    assert asyncio.run(one.send(pieces * 99, wait=0.01))[-1]["more_body"] is False
    assert one.guard._num_bytes == 0
