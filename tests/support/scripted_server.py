"""A server that answers each request with bytes somebody wrote, pauses between them, and breaks off where they end."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Script = list[bytes | float]
"""Bytes to send, and seconds to wait, in order; then the connection is closed."""

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
MODELS = {"data": [{"id": "scripted", "root": "demo", "owned_by": "test", "max_model_len": 4096}]}


def events(*chunks: Any) -> bytes:
    """Server-sent events of JSON objects."""
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)


def token(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


DONE = b"data: [DONE]\n\n"


def plain(*bodies: bytes | float) -> Script:
    """Return a whole answer with a length, in these pieces."""
    length = sum(len(piece) for piece in bodies if isinstance(piece, bytes))
    return [f"HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n".encode(), *bodies]


@dataclass
class ScriptedServer:
    """url: where it is; times and bodies: of the requests, in their order; peak: requests that were open at once."""

    url: str = ""
    times: list[float] = field(default_factory=list[float])
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    heads: list[bytes] = field(default_factory=list[bytes])
    open: int = 0
    peak: int = 0


@contextmanager
def scripted(script: Callable[[dict[str, Any]], Script]) -> Iterator[ScriptedServer]:
    """Serve until the end of the block; /v1/models is answered without the script."""
    seen = ScriptedServer()
    ready, done = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        body = await reader.readexactly(length)
        counted = not head.startswith(b"GET /v1/models ")
        steps = plain(json.dumps(MODELS).encode())
        if counted:
            seen.times.append(time.perf_counter())
            seen.heads.append(head)
            seen.bodies.append(json.loads(body))
            steps = script(seen.bodies[-1])
            seen.open += 1
            seen.peak = max(seen.peak, seen.open)
        try:
            for step in steps:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    writer.write(step)
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            seen.open -= counted
            writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        seen.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        loops.append(asyncio.get_running_loop())
        ready.set()
        await done.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield seen
    finally:
        loops[0].call_soon_threadsafe(done.set)
        thread.join(10)
