"""Hostile bodies sent to a server of ours beside a stream: how long the stream stands still, and what is answered.

The largest gap between two chunks of the stream beside a body is set against the largest one at rest just before. Each
body is made and sent by a process of its own, so that this one reads the stream in time.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import psutil

from checks.processes import ServerProcess
from checks.serving.hostile_bodies import BODIES, COMPLETIONS

MOST_GAP = 0.150
"""Seconds by which the largest gap beside a body may exceed the largest at rest."""
MOST_SECONDS = 2.0
"""Seconds to an answer."""
MOST_GRAMMAR_GAP = 0.050
"""Seconds by which it may exceed that at rest while grammars are sent one after the other."""
MOST_MEMORY = 300 * 2**20
"""Bytes by which the HTTP process may have grown."""
ANSWER_SECONDS = 60.0
AFTER_SECONDS = 0.5
"""Time after an answer in which gaps still count."""
SAMPLE_SECONDS = 0.02
STREAM = {"prompt": "Tom", "max_tokens": 8000, "ignore_eos": True, "stream": True}
MIB = 2**20

Seen = dict[str, Any]


def try_bodies(
    server: ServerProcess,
    *,
    names: Iterable[str],
    repeats: int,
    rest_seconds: float,
    settle_seconds: float,
    progress: Callable[[str, Seen], None],
) -> Seen:
    """Send bodies one after the other; `problems` in the result names the bounds that were exceeded.

    repeats:        of each body; the median of the gaps counts
    rest_seconds:   in which the stream is watched alone before each body
    settle_seconds: from the last answer to the last look at the memory
    """
    url = urlsplit(server.url)
    address = (url.hostname or "", url.port or 0)
    process = psutil.Process(server.pid)
    problems: list[str] = []
    bodies: dict[str, Seen] = {}
    with _Stream(address) as stream, _Memory(process) as memory, _Sender(address) as sender:
        stream.wait_until_begun()
        before = process.memory_info().rss
        for name in names:
            tries: list[Seen] = []
            for _ in range(repeats):
                sender.prepare(name)
                rest = stream.largest_gap(time.monotonic(), rest_seconds)
                began = time.monotonic()
                memory.peak = 0
                answer = sender.send()
                gap = stream.largest_gap(began, time.monotonic() - began + AFTER_SECONDS)
                tries.append({"gap_at_rest": rest, "gap": gap, "peak": memory.peak, **answer})
            bodies[name] = _summary(tries)
            problems += [f"{name}: {problem}" for problem in problems_of(bodies[name])]
            progress(name, bodies[name])
    time.sleep(settle_seconds)
    after = process.memory_info().rss
    if after - before > MOST_MEMORY:
        problems.append(f"the HTTP process grew by {(after - before) / MIB:.0f} MiB")
    return {
        "repeats": repeats,
        "rss_mib": {
            "before": round(before / MIB),
            "most": max((body["peak_rss_mib"] for body in bodies.values()), default=0),
            f"{settle_seconds:g} s after": round(after / MIB),
        },
        "bodies": bodies,
        "problems": problems,
    }


def try_grammars(server: ServerProcess, *, seconds: float, rest_seconds: float) -> Seen:
    """Send the bodies with hostile grammars again and again; `problems` in the result names the exceeded bounds.

    rest_seconds: in which the stream is watched alone before
    """
    url = urlsplit(server.url)
    address = (url.hostname or "", url.port or 0)
    names = [name for name in BODIES if name.startswith("grammar: ")]
    answers: dict[str, int] = {}
    with _Stream(address) as stream, _Sender(address) as sender:
        stream.wait_until_begun()
        rest = stream.largest_gap(time.monotonic(), rest_seconds)
        began, count = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            sender.prepare(names[count % len(names)])
            status = str(sender.send()["status"])
            answers[status] = answers.get(status, 0) + 1
            count += 1
        gap = stream.largest_gap(began, 0.0)
    problems = [f"{count} answers with {status}" for status, count in answers.items() if status not in ("200", "400")]
    if gap - rest > MOST_GRAMMAR_GAP:
        problems.append(f"the stream stood still {(gap - rest) * 1e3:.1f} ms longer than at rest beside grammars")
    ends = {"gap_at_rest_ms": round(rest * 1e3, 1), "gap_ms": round(gap * 1e3, 1)}
    return {"seconds": seconds, "requests": count, "answers": answers, **ends, "problems": problems}


def _summary(tries: list[Seen]) -> Seen:
    last = tries[-1]
    return {
        "bytes": last["bytes"],
        "status": last["status"],
        "message": last["message"],
        "seconds": round(statistics.median(one["seconds"] for one in tries), 3),
        "gap_at_rest_ms": round(statistics.median(one["gap_at_rest"] for one in tries) * 1e3, 1),
        "gap_ms": round(statistics.median(one["gap"] for one in tries) * 1e3, 1),
        "gap_above_rest_ms": round(statistics.median(one["gap"] - one["gap_at_rest"] for one in tries) * 1e3, 1),
        "peak_rss_mib": round(max(one["peak"] for one in tries) / MIB),
    }


def problems_of(body: Seen) -> list[str]:
    """Return the bounds that a body exceeded."""
    problems: list[str] = []
    if body["gap_above_rest_ms"] > MOST_GAP * 1e3:
        problems.append(f"the stream stood still {body['gap_above_rest_ms']:g} ms longer than at rest")
    if body["seconds"] > MOST_SECONDS:
        problems.append(f"the answer took {body['seconds']:g} s")
    if body["status"] is None or not (body["status"] == 200 or 400 <= body["status"] < 500):
        problems.append(f"the answer was {body['status']}: {body['message']}")
    return problems


class _Stream:
    """A stream of tokens, begun again when it ends, with the time of each chunk."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._gaps: list[tuple[float, float]] = []
        self._stopped = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> _Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def wait_until_begun(self) -> None:
        assert self._begun.wait(ANSWER_SECONDS), "the stream did not begin"

    def largest_gap(self, start: float, seconds: float) -> float:
        """Wait until so many seconds after `start`; return the largest gap that ended or goes on since then."""
        time.sleep(max(0.0, start + seconds - time.monotonic()))
        gaps = [gap for end, gap in list(self._gaps) if end >= start]
        return max([*gaps, time.monotonic() - self._gaps[-1][0]])

    def _read(self) -> None:
        while not self._stopped.is_set():
            connection = http.client.HTTPConnection(*self._address, timeout=ANSWER_SECONDS)
            connection.request("POST", COMPLETIONS, json.dumps(STREAM), {"content-type": "application/json"})
            answer = connection.getresponse()
            last: float | None = None
            while not self._stopped.is_set() and (line := answer.readline()):
                if line.startswith(b"data:"):
                    now = time.monotonic()
                    # From one stream to the next is no gap between tokens.
                    self._gaps.append((now, now - last if last is not None else 0.0))
                    last = now
                    self._begun.set()
            connection.close()


class _Memory:
    """Samples the resident set of a process all the time. `peak` may be set back to 0."""

    def __init__(self, process: psutil.Process) -> None:
        self.peak = 0
        self._process = process
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> _Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, self._process.memory_info().rss)


class _Sender:
    """A process that makes bodies and sends them."""

    def __init__(self, address: tuple[str, int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_send_bodies, args=(end, address), daemon=True)

    def __enter__(self) -> _Sender:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def prepare(self, name: str) -> None:
        """Has the body made, and waits for it."""
        self._pipe.send(name)
        self._pipe.recv()

    def send(self) -> Seen:
        """Has the body sent, and waits for the answer."""
        self._pipe.send(None)
        return self._pipe.recv()


def _send_bodies(pipe: Connection, address: tuple[str, int]) -> None:
    """Send bodies, as the work of a process of its own."""
    while True:
        body = BODIES[pipe.recv()]
        content = body.make()
        headers = {"host": address[0], "content-type": "application/json", **body.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST {body.path} HTTP/1.1\r\n{lines}content-length: {len(content)}\r\n\r\n".encode()
        pipe.send(None)
        pipe.recv()
        pipe.send({"bytes": len(content), **_exchange(address, head + content)})


def _exchange(address: tuple[str, int], request: bytes) -> Seen:
    """Send a request and read the answer meanwhile, which may come before all of it was sent."""
    began = time.monotonic()
    with socket.create_connection(address, timeout=ANSWER_SECONDS) as connection:

        def send() -> None:
            with suppress(OSError):
                connection.sendall(request)

        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        try:
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            return {"status": None, "message": repr(error), "seconds": time.monotonic() - began}
        seconds = time.monotonic() - began
    sending.join(ANSWER_SECONDS)
    return {"status": answer.status, "message": _message(content), "seconds": seconds}


def _message(content: bytes) -> str:
    """Return the message of an error, or the beginning of a result."""
    try:
        return json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return content[:100].decode("utf-8", "replace")
