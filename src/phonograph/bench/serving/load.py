"""Load on a server: sends requests when they are due, keeps the answers, and measures the cost of this process."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import random
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
"""Bytes of answers that are kept to be parsed after the run; beyond them, answers are parsed as they end."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Answers of a run.

    seconds:     from the first request to the end of the last answer
    cpu_seconds: processor time of this process; near `seconds`, the client measured itself
    send_delay:  largest delay of a request behind its due time in seconds, without waits for max_concurrency
    """

    replies: list[Reply]
    seconds: float
    cpu_seconds: float
    send_delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Destination, headers and timeout (seconds, or None) of requests."""

    target: Target
    path: str
    headers: dict[str, str]
    timeout: float | None

    async def post(self, body: bytes) -> Recording:
        return await exchange(self.target, "POST", self.path, body, headers=self.headers, timeout=self.timeout)


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on uvloop, which is faster than asyncio's own loop.

    Raises:
        ConfigError: uvloop is not installed.
    """
    try:
        import uvloop
    except ImportError:
        raise ConfigError("bench serve", "uvloop", "not installed; pip install 'phonograph[bench]'") from None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def find_model(target: Target, headers: dict[str, str]) -> tuple[Target, dict[str, Any]]:
    """Return the target with the address that answered, and the first model of its /v1/models.

    Raises:
        EndpointError: there is no server, or it has no list of models.
    """
    answer = await exchange(target, "GET", "/v1/models", b"", headers=headers, timeout=30)
    if answer.error is not None:
        raise EndpointError(f"{target.host}:{target.port}/v1/models: {answer.error}")
    try:
        (model, *_) = json.loads(answer.body)["data"]
        model["id"]
    except (ValueError, KeyError, TypeError):
        raise EndpointError(f"{target.host}:{target.port}/v1/models is not a list of models") from None
    return dataclasses.replace(target, address=answer.peer or target.address), model


def arrival_times(rng: random.Random, count: int, *, rate: float, burstiness: float) -> list[float]:
    """Return the ascending due times of `count` requests in seconds from the start; all 0 at an infinite rate.

    The gaps are gamma-distributed with shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less comes in
    bursts, more is more even, infinity is a steady beat. The times are scaled so that the last is count / rate, as
    vLLM's benchmark does, which makes the offered rate exact.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = [1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1.0) for _ in range(count)]
    scale = count / rate / math.fsum(gaps)
    return list(itertools.accumulate(gap * scale for gap in gaps))


async def warm_up(client: Client, bodies: Sequence[bytes], max_concurrency: int | None) -> None:
    """Send requests that are not counted, all at once.

    Raises:
        EndpointError: a request fails, as the measured ones would.
    """
    due = [0.0] * len(bodies)
    load = await offer(client, bodies, due, max_concurrency=max_concurrency, progress=_no_progress)
    for reply in load.replies:
        if reply.error is not None:
            endpoint = f"{client.target.host}:{client.target.port}{client.path}"
            raise EndpointError(f"{endpoint}: a request to warm up: {reply.error}")


async def offer(
    client: Client,
    bodies: Sequence[bytes],
    due: Sequence[float],
    *,
    max_concurrency: int | None,
    progress: BenchProgress,
) -> Load:
    """Send each body when it is due, in seconds from now, at most `max_concurrency` at once; wait for all answers."""
    _allow_many_connections(len(bodies))
    room = asyncio.Semaphore(max_concurrency or len(bodies) or 1)
    recordings: list[Recording | Reply] = []
    delays = [0.0]
    num_bytes = 0
    cpu, start = time.process_time(), time.perf_counter()

    async def send(body: bytes) -> None:
        nonlocal num_bytes
        async with room:
            recording = await client.post(body)
        num_bytes += sum(map(len, recording.pieces))
        recordings.append(recording if num_bytes <= HELD_BYTES else read_reply(recording, start))
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


def _no_progress(*_: object) -> None: ...


def _allow_many_connections(count: int) -> None:
    """Raise the limit of open files, of which each connection takes one; the default is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
