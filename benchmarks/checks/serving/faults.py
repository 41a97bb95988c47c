"""Faults that a server of ours has to survive: clients that leave or do not read, signals, its engine's death.

Each experiment returns what it saw and, under `problems`, what was not as it has to be; none means that it passed.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import psutil

from checks.processes import ServerProcess, gpu_memory_mib
from checks.serving.scrape import read_metrics
from phonograph.bench.serving.connection import Recording, Target, exchange
from phonograph.bench.serving.events import read_reply

STEPS_TO_BLOCKS = 2
"""Steps with aborted streams that may begin once all aborts are counted: one in flight, and one queued behind it."""
MOST_LEAVERS = 32
SHORT_LEN = 200
LEAVER_LEN = 400
WAIT_SECONDS = 60.0
FREE_MIB = 512
"""By how much the GPU's memory may differ from what it was before the server, once it is gone."""

Seen = dict[str, Any]


async def try_disconnect(target: Target, *, prompt_len: int = 1024, output_len: int = 900) -> Seen:
    """Many streams are cut at once while one goes on; their blocks have to be back within two steps of the abort.

    The one that stays is shorter at its end than one of the others at its beginning, so that blocks tell them apart.
    """
    facts = (await _graphs(target, last=0))["engine"]
    block_size, count = facts["kv_block_size"], min(MOST_LEAVERS, facts["max_num_seqs"] - 1)
    problems: list[str] = []

    def lens(scale: int) -> list[tuple[int, int]]:
        return [(16, output_len * scale)] + [(prompt_len * scale, output_len * scale)] * count

    (stays, *leavers), scale = await start_together(target, lens, problems)
    output_len *= scale
    try:
        before = await _metrics(target)
        cut, cut_at = time.perf_counter(), time.time()
        for leaver in leavers:
            leaver.cancel()
        await asyncio.gather(*leavers, return_exceptions=True)
        bound = -(-(16 + output_len) // block_size)
        told_at: float | None = None
        while True:
            now = await _metrics(target)
            if told_at is None and now["aborted"] - before["aborted"] == count:
                told_at = time.time()
            if now["usage"] * facts["kv_blocks"] <= bound + 0.5:
                break
            if time.perf_counter() - cut > WAIT_SECONDS:
                problems.append(f"after {WAIT_SECONDS:g} s {now['usage'] * facts['kv_blocks']:.0f} blocks are in use")
                break
        milliseconds = (time.perf_counter() - cut) * 1e3
        steps = [step for step in (await _graphs(target, last=256))["steps"] if step["time"] > cut_at]
        reply = read_reply(await stays, 0.0)
    finally:
        for task in (stays, *leavers):
            task.cancel()
    after = await _until(target, lambda found: found["engine"]["running"] == 0, problems, "all requests are gone")
    # Not the steps between two answers of /metrics: of those there may be many while this process waits for a core.
    taken = sum(step["decodes"] > 1 for step in steps if told_at is not None and step["time"] > told_at)
    if taken > STEPS_TO_BLOCKS:
        problems.append(f"blocks came back {taken} steps after the abort")
    if reply.error is not None or reply.output_tokens != output_len:
        problems.append(f"the stream that stayed has {reply.output_tokens} tokens, {reply.error}")
    if after["engine"]["kv_blocks_used"]:
        problems.append(f"{after['engine']['kv_blocks_used']} blocks are in use without a request")
    if now["aborted"] - before["aborted"] != count:
        problems.append(f"{now['aborted'] - before['aborted']:g} of {count} requests were counted as aborted")
    return {
        "streams_cut": count,
        "blocks_before": round(before["usage"] * facts["kv_blocks"]),
        "blocks_after": round(now["usage"] * facts["kv_blocks"]),
        "steps_from_abort_to_blocks": taken,
        "steps_from_cut_to_blocks_at_most": int(now["steps"] - before["steps"]),
        "steps_with_cut_streams_after_cut": sum(step["decodes"] > 1 for step in steps),
        "ms_from_cut_to_blocks": round(milliseconds, 1),
        "problems": problems,
    }


async def try_drain(server: ServerProcess, target: Target, *, idle_mib: int | None) -> Seen:
    """Send SIGTERM: short requests complete, new ones are refused, long ones end with an error, and the exit code is
    0."""
    longest = await _max_model_len(target)
    problems: list[str] = []
    streams, scale = await start_together(target, lambda scale: [(16, SHORT_LEN * scale), (16, longest - 64)], problems)
    short_len = SHORT_LEN * scale
    began = time.perf_counter()
    server.terminate()
    statuses: list[int | None] = []
    while (status := await asyncio.to_thread(server.health, "/ready")) == 200 and time.perf_counter() - began < 5:
        await asyncio.sleep(0.01)
    statuses.append(status)
    refused = await _post(target, output_len=4)
    short, long = [read_reply(one, 0.0) for one in await asyncio.gather(*streams)]
    code = await asyncio.to_thread(server.wait)
    seconds = time.perf_counter() - began
    if statuses != [503] or refused.status != 503:
        problems.append(f"while it drained, /ready said {statuses[0]} and a request got {refused.status}")
    if short.error is not None or short.output_tokens != short_len:
        problems.append(f"the short stream has {short.output_tokens} of {short_len} tokens, {short.error}")
    if long.error is not None and "shut down" not in long.error:
        problems.append(f"the long stream ended with: {long.error}")
    if code != 0:
        problems.append(f"exit code {code}")
    freed = await _until_freed(idle_mib, problems)
    return {
        "seconds": round(seconds, 2),
        "exit_code": code,
        "long_stream": long.error or "complete",
        **freed,
        "problems": problems,
    }


async def try_kill(server: ServerProcess, target: Target, *, idle_mib: int | None) -> Seen:
    """kill -9 of the engine: open requests end with an error, /health says 503, the process ends, memory is free."""
    length = await _max_model_len(target) - 64
    streamed = asyncio.create_task(_post(target, output_len=length))
    whole = asyncio.create_task(_post(target, output_len=length, stream=False))
    problems: list[str] = []
    await _until(target, lambda found: _decodes(found) == 2, problems, "both requests decode")
    used_mib = gpu_memory_mib()
    engine = engine_of(server)
    began = time.perf_counter()
    engine.send_signal(signal.SIGKILL)
    recording, answer = await asyncio.gather(streamed, whole)
    milliseconds = (time.perf_counter() - began) * 1e3
    health = await asyncio.to_thread(server.health)
    code = await asyncio.to_thread(server.wait)
    seconds = time.perf_counter() - began
    reply = read_reply(recording, 0.0)
    if reply.error is None or "SIGKILL" not in reply.error:
        problems.append(f"the stream ended with: {reply.error}")
    if answer.status != 503:
        problems.append(f"the request without a stream got {answer.status}: {answer.error}")
    if health != 503:
        problems.append(f"/health said {health}")
    if code in (0, None):
        problems.append(f"exit code {code}")
    freed = await _until_freed(idle_mib, problems)
    return {
        "ms_to_errors": round(milliseconds, 1),
        "seconds_to_exit": round(seconds, 2),
        "exit_code": code,
        "stream_error": reply.error,
        "gpu_mib_before": used_mib,
        **freed,
        "problems": problems,
    }


async def try_leavers(target: Target, *, count: int = 200, at_once: int = 64, seed: int = 0) -> Seen:
    """Streams are cut at random times, before their first token or after it; nothing of them may be left."""
    rng, room = random.Random(seed), asyncio.Semaphore(at_once)
    problems: list[str] = []

    async def leave(seconds: float) -> Recording | None:
        async with room:
            stream = asyncio.create_task(_post(target, prompt_len=rng.randrange(1, 400), output_len=LEAVER_LEN))
            done, _ = await asyncio.wait([stream], timeout=seconds)
            stream.cancel()
            return stream.result() if done else None

    began = time.perf_counter()
    ended = await asyncio.gather(*(leave(rng.uniform(0, 2)) for _ in range(count)))
    cut = time.perf_counter()
    wrong = [one.error for one in ended if one is not None and one.error is not None]
    problems += [f"{len(wrong)} streams failed before they were cut: {wrong[0]}"] if wrong else []
    await _until(target, lambda found: _idle(found["engine"]), problems, "nothing is left of the streams")
    return {
        "streams": count,
        "cut": sum(one is None for one in ended),
        "seconds": round(cut - began, 1),
        "seconds_to_idle": round(time.perf_counter() - cut, 2),
        "problems": problems,
    }


async def try_slow_readers(target: Target, *, count: int = 16, output_len: int = 400, seconds: float = 5) -> Seen:
    """Clients that do not read their answers delay no other client, and get all of an answer when they read it."""
    problems: list[str] = []
    body = {"prompt": "Tom", "max_tokens": output_len, "ignore_eos": True, "stream": True, "logprobs": 5}
    content = json.dumps(body).encode()
    request = target.head("POST", "/v1/completions", len(content), {"connection": "close"}) + content
    readers: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        for _ in range(count):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, (target.address, target.port))
            # The reader takes twice its limit from the socket, and then no more until it is read.
            readers.append(await asyncio.open_connection(sock=client, limit=1024))
            readers[-1][1].write(request)
        neighbour = read_reply(await _post(target, output_len=SHORT_LEN), 0.0)
        if neighbour.error is not None or neighbour.output_tokens != SHORT_LEN:
            problems.append(f"the stream beside them has {neighbour.output_tokens} tokens, {neighbour.error}")
        await asyncio.sleep(seconds)
        answers = [await asyncio.wait_for(reader.read(), WAIT_SECONDS) for reader, _ in readers]
    finally:
        for _, writer in readers:
            writer.close()
    whole = sum(b"data: [DONE]" in answer and b'"finish_reason":"length"' in answer for answer in answers)
    if whole != count:
        problems.append(f"{count - whole} of {count} slow clients did not get all of their answer")
    await _until(target, lambda found: _idle(found["engine"]), problems, "nothing is left of the streams")
    return {"clients": count, "bytes_each": round(sum(map(len, answers)) / count), "problems": problems}


async def try_stop(server: ServerProcess, target: Target, *, count: int = 8, seconds: float = 5) -> Seen:
    """SIGSTOP of the engine, and SIGCONT: /health answers meanwhile, a client may leave, and all others go on."""
    problems: list[str] = []
    (leaver, *streams), scale = await start_together(
        target, lambda scale: [(16, 2 * SHORT_LEN * scale)] * (count + 1), problems
    )
    output_len = 2 * SHORT_LEN * scale
    engine = engine_of(server)
    engine.send_signal(signal.SIGSTOP)
    try:
        began = time.perf_counter()
        status = await asyncio.to_thread(server.health)
        milliseconds = (time.perf_counter() - began) * 1e3
        leaver.cancel()
        waits = asyncio.create_task(_post(target, output_len=4))
        await asyncio.sleep(seconds)
    finally:
        engine.send_signal(signal.SIGCONT)
    replies = [read_reply(one, 0.0) for one in await asyncio.gather(*streams, waits)]
    if status != 200 or milliseconds > 1e3:
        problems.append(f"/health said {status} after {milliseconds:.0f} ms")
    for reply, expected in zip(replies, [output_len] * count + [4], strict=True):
        if reply.error is not None or reply.output_tokens != expected:
            problems.append(f"a stream has {reply.output_tokens} of {expected} tokens, {reply.error}")
    await _until(target, lambda found: _idle(found["engine"]), problems, "nothing is left of the streams")
    return {"streams": count, "stopped_seconds": seconds, "health_ms": round(milliseconds, 1), "problems": problems}


async def start_together(
    target: Target, lens: Callable[[int], list[tuple[int, int]]], problems: list[str]
) -> tuple[list[asyncio.Task[Recording]], int]:
    """Start streams and wait until one step decodes all of them; return them and the scale of their lengths.

    `lens(scale)` gives the tokens of each prompt and output. A busy machine may look for the step only after a short
    stream has ended: all are then started again with a larger scale.
    """
    for scale in (1, 2, 4, 8):
        streams = [asyncio.create_task(_post(target, prompt_len=a, output_len=b)) for a, b in lens(scale)]
        await _until(
            target,
            lambda found, these=streams: _decodes(found) == len(these) or any(one.done() for one in these),
            problems,
            f"all {len(streams)} streams decode",
        )
        ended = [one.result() for one in streams if one.done()]
        if problems or not ended:
            break
        if scale == 8 or any(one.error for one in ended):
            problems.append(f"streams ended before all decoded: {[one.error or 'complete' for one in ended]}")
            break
        for one in streams:
            one.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await _until(target, lambda found: _idle(found["engine"]), problems, "nothing is left of the streams")
    return streams, scale


async def _post(target: Target, *, prompt_len: int = 16, output_len: int, stream: bool = True) -> Recording:
    prompt = random.choices(range(100, 500), k=prompt_len)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": output_len, "ignore_eos": True, "temperature": 0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return await exchange(target, "POST", "/v1/completions", json.dumps(body).encode(), headers={}, timeout=300)


async def _get(target: Target, path: str) -> bytes:
    answer = await exchange(target, "GET", path, b"", headers={}, timeout=30)
    return answer.body


async def _graphs(target: Target, *, last: int) -> dict[str, Any]:
    return json.loads(await _get(target, f"/v1/graphs?last={last}"))


async def _max_model_len(target: Target) -> int:
    return json.loads(await _get(target, "/v1/models"))["data"][0]["max_model_len"]


async def _metrics(target: Target) -> dict[str, float]:
    """Return the used part of the KV cache, steps and aborted requests, of one answer of /metrics."""
    found = await read_metrics(target)
    return {
        "usage": found["vllm:kv_cache_usage_perc"],
        # Counters that nothing has been counted in yet may be absent.
        "steps": found.get("phonograph:steps_total", 0.0),
        "aborted": found.get("vllm:request_success_total abort", 0.0),
    }


def _idle(engine: dict[str, Any]) -> bool:
    return not (engine["running"] or engine["waiting"] or engine["kv_blocks_used"])


def _decodes(found: dict[str, Any]) -> int:
    """Sequences that the latest step decoded."""
    return found["steps"][-1]["decodes"] if found["steps"] and found["engine"]["running"] else 0


async def _until(
    target: Target, holds: Callable[[dict[str, Any]], bool], problems: list[str], what: str
) -> dict[str, Any]:
    """Wait for a condition of /v1/graphs; a timeout is a problem."""
    until = time.perf_counter() + WAIT_SECONDS
    while not holds(found := await _graphs(target, last=1)):
        if time.perf_counter() > until:
            problems.append(f"waited {WAIT_SECONDS:g} s in vain until {what}")
            break
        await asyncio.sleep(0.005)
    return found


def engine_of(server: ServerProcess) -> psutil.Process:
    """Return the child with the most memory, which is the one that has loaded torch."""
    return max(psutil.Process(server.pid).children(), key=lambda child: child.memory_info().rss)


async def _until_freed(idle_mib: int | None, problems: list[str]) -> Seen:
    """Return the seconds until the GPU's memory is free again; empty without a GPU."""
    if idle_mib is None:
        return {}
    began = time.perf_counter()
    while (used := await asyncio.to_thread(gpu_memory_mib) or 0) > idle_mib + FREE_MIB:
        if time.perf_counter() - began > WAIT_SECONDS:
            problems.append(f"{used} MiB of the GPU are in use, {idle_mib} before the server")
            break
        await asyncio.sleep(0.2)
    return {"gpu_mib_after": used, "seconds_to_free": round(time.perf_counter() - began, 2)}
