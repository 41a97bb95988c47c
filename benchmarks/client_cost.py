"""Cost of the client of `phonograph bench serve`, measured with a server that computes nothing.

    python benchmarks/client_cost.py                                  # 256 streams: at once, and every 10 ms
    python benchmarks/client_cost.py --output benchmarks/results/client_cost.json

The server is a process of its own. It writes a chunk to every open stream, all as fast as it can or one every so many
milliseconds, as an engine's steps do, and puts the time into each. The difference to the client's times is the client's
delay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.result_files import output_file, write_result
from phonograph.bench.records.record import provenance
from phonograph.bench.serving import load
from phonograph.bench.serving.connection import Target
from phonograph.bench.serving.events import Reply

CHUNK = (
    'data: {"id":"cmpl-8f3a1c0d2b6e4f7a9c1d3e5f7a9b1c3d","object":"text_completion","created":1790000000,'
    '"model":"stub","choices":[{"index":0,"text":" %.6f","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)
END = (
    'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
    'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def http_chunk(text: str) -> bytes:
    data = text.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


class Stream(asyncio.Protocol):
    """One connection with one request, whose body says how many tokens it wants."""

    def __init__(self, streams: set[Stream]) -> None:
        self._streams = streams
        self._request = b""
        self._num_tokens = self._left = 0
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.discard(self)

    def data_received(self, data: bytes) -> None:
        self._request += data
        _, blank, body = self._request.partition(b"\r\n\r\n")
        if blank and body.endswith(b"}"):
            self._num_tokens = self._left = json.loads(body)["max_tokens"]
            self._transport.write(HEAD)
            self._streams.add(self)

    def step(self) -> None:
        self._transport.write(http_chunk(CHUNK % time.perf_counter()))
        self._left -= 1
        if not self._left:
            self._streams.discard(self)
            self._transport.write(http_chunk(END % self._num_tokens) + b"0\r\n\r\n")


async def serve(step_seconds: float) -> None:
    """Print the port, then serve until the process is ended."""
    streams: set[Stream] = set()
    server = await asyncio.get_running_loop().create_server(lambda: Stream(streams), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    due = time.perf_counter()
    while True:
        due = max(due + step_seconds, time.perf_counter())
        await asyncio.sleep(due - time.perf_counter() if streams else 0.001)
        for stream in list(streams):
            stream.step()


@contextmanager
def stub(step_seconds: float) -> Generator[Target]:
    """Run the server in a process of its own."""
    command = [sys.executable, __file__, "--stub", str(step_seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Target.parse(f"http://127.0.0.1:{int(process.stdout.readline())}")
        finally:
            process.kill()


def measure(*, num_streams: int, num_tokens: int, step_ms: float) -> dict[str, Any]:
    """One run. Microseconds are the client's processor time for a token: to receive it, and to read it afterwards."""
    body = json.dumps({"max_tokens": num_tokens}).encode()
    with stub(step_ms / 1e3) as target:
        client = load.Client(target=target, path="/v1/completions", headers={}, timeout=None)
        before = time.process_time()
        result = load.run(
            load.offer(client, [body] * num_streams, [0.0] * num_streams, max_concurrency=None, progress=_silent)
        )
        whole = time.process_time() - before
    assert all(reply.error is None for reply in result.replies), result.replies[0].error
    tokens = sum(reply.output_tokens for reply in result.replies)
    sent = [np.array(reply.text.split(), dtype=float) for reply in result.replies]
    late = np.concatenate([_arrivals(reply) - times for reply, times in zip(result.replies, sent, strict=True)])
    late_ms = (late - late.min()) * 1e3
    gaps = np.concatenate([sample.itls for reply in result.replies for sample in reply.samples]) * 1e3
    return {
        "streams": num_streams,
        "step_ms": step_ms,
        "tokens": tokens,
        "tokens_per_s": round(tokens / result.seconds),
        "receive_us": round(result.cpu_seconds / tokens * 1e6, 2),
        "read_us": round((whole - result.cpu_seconds) / tokens * 1e6, 2),
        "cpu_share": round(result.cpu_seconds / result.seconds, 3),
        **{f"late_{name}_ms": round(float(np.percentile(late_ms, at)), 3) for name, at in (("p50", 50), ("p99", 99))},
        "sent_p50_ms": round(float(np.median(np.concatenate([np.diff(times) for times in sent]))) * 1e3, 3),
        **{f"itl_{name}_ms": round(float(np.percentile(gaps, at)), 3) for name, at in (("p50", 50), ("p99", 99))},
    }


def _arrivals(reply: Reply) -> np.ndarray:
    (sample,) = reply.samples
    return reply.start + np.array(sample.times)


def _silent(*_: object) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[256])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[0.0, 10.0, 20.0])
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--stub", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stub is not None:
        load.run(serve(arguments.stub))
    origin = provenance()
    rows: list[dict[str, Any]] = []
    for num_streams in arguments.streams:
        for step_ms in arguments.step_ms:
            rows.append(measure(num_streams=num_streams, num_tokens=arguments.tokens, step_ms=step_ms))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.output is not None:
        write_result(arguments.output, origin, {"rows": rows})


if __name__ == "__main__":
    main()
