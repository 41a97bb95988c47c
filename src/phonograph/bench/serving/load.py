"""Sends requests as they are due, keeps what comes back, and watches what that costs this process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import resource
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from phonograph.bench.records.results import BenchProgress
from phonograph.bench.serving.connection import Recording, Target, exchange
from phonograph.bench.serving.events import Reply, read_reply
from phonograph.errors import ConfigError, EndpointError

HELD_BYTES = 256 * 2**20
"""Bytes of answers that are kept to be read when the run is over; beyond them, answers are read as they end."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What was offered and what came of it.

    seconds:        from the first request to the end of the last answer
    cpu_seconds:    processor time of this process meanwhile: near `seconds`, it measured itself
    send_delay:     seconds by which the latest request was sent after it was due, waiting for room left out
    """

    replies: list[Reply]
    seconds: float
    cpu_seconds: float
    send_delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """How requests are sent: where to, with which headers, and with how much patience (seconds, or None)."""

    target: Target
    path: str
    headers: dict[str, str]
    timeout: float | None

    async def post(self, body: bytes) -> Recording:
        return await exchange(self.target, "POST", self.path, body, headers=self.headers, timeout=self.timeout)


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs on uvloop, which takes a quarter of the time of asyncio's own loop for a piece of a stream.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import uvloop
    except ImportError:
        raise ConfigError("bench serve", "uvloop", "not installed; pip install 'phonograph[bench]'") from None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def find_model(target: Target, headers: dict[str, str]) -> tuple[Target, dict[str, Any]]:
    """The target with the address that answered, and the first model of its /v1/models.

    Raises:
        EndpointError: there is no server, or it has no such list.
    """
    answer = await exchange(target, "GET", "/v1/models", b"", headers=headers, timeout=30)
    if answer.error is not None:
        raise EndpointError(f"{target.host}:{target.port}/v1/models: {answer.error}")
    try:
        (model, *_) = json.loads(answer.body)["data"]
        model["id"]
    except (ValueError, KeyError, TypeError):
        raise EndpointError(f"{target.host}:{target.port}/v1/models is no list of models") from None
    return dataclasses.replace(target, address=answer.peer or target.address), model


async def warm_up(client: Client, bodies: Sequence[bytes], max_concurrency: int | None) -> None:
    """Sends requests that are not counted, all at once.

    Raises:
        EndpointError: one of them fails, which the measured ones then would too.
    """
    load = await offer(client, bodies, [0.0] * len(bodies), max_concurrency=max_concurrency, progress=_silent)
    failed = [reply.error for reply in load.replies if reply.error is not None]
    if failed:
        raise EndpointError(
            f"{client.target.host}:{client.target.port}{client.path}: a request to warm up: {failed[0]}"
        )


async def offer(
    client: Client,
    bodies: Sequence[bytes],
    due: Sequence[float],
    *,
    max_concurrency: int | None,
    progress: BenchProgress,
) -> Load:
    """Sends each body when it is due, in seconds from now, at most so many at a time, and waits for all answers."""
    _allow_many_connections(len(bodies))
    room = asyncio.Semaphore(max_concurrency or len(bodies) or 1)
    recordings: list[Recording | Reply] = []
    delays = [0.0]
    held = 0
    cpu, start = time.process_time(), time.perf_counter()

    async def send(body: bytes) -> None:
        nonlocal held
        async with room:
            recording = await client.post(body)
        held += sum(map(len, recording.pieces))
        recordings.append(recording if held <= HELD_BYTES else read_reply(recording, start))
        progress("requests", len(recordings), len(bodies))

    async with asyncio.TaskGroup() as group:
        for body, seconds in zip(bodies, due, strict=True):
            wait = start + seconds - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            delays.append(time.perf_counter() - start - seconds)
            group.create_task(send(body))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    replies = [one if isinstance(one, Reply) else read_reply(one, start) for one in recordings]
    replies.sort(key=lambda reply: reply.start)
    return Load(replies=replies, seconds=seconds, cpu_seconds=cpu, send_delay=max(delays))


def _allow_many_connections(count: int) -> None:
    """Each takes a file descriptor, of which a process may have 1024 until it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def _silent(*_: object) -> None:
    pass
