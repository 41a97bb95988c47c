"""The whole command in processes of its own: what a user starts, what kills it, and what is left then."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

SHORT = {"prompt": "Hi", "max_tokens": 5}
LONG = {"prompt": "Tom", "max_tokens": 8000, "ignore_eos": True}


class Process:
    """`phonograph serve demo` with more flags, started; what it says on stderr is kept."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "phonograph", "serve", "demo", "--max-num-seqs", "4"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PHONOGRAPH_")}
        self.process = subprocess.Popen(
            [*command, "--enforce-eager", *([] if "--port" in flags else ["--port", "0"]), *flags],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    @property
    def said(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        """Return the address of the server, waited for."""
        wait_for(lambda: "serving demo at" in self.said or self.process.poll() is not None)
        found = re.search(r"serving demo at (http://\S+)/v1", self.said)
        assert found, self.said
        return found[1]

    @property
    def engine_pid(self) -> int:
        """The child that has torch loaded, and so by far the most memory of all."""
        children = psutil.Process(self.process.pid).children()
        return max(children, key=lambda child: child.memory_info().rss).pid

    def exit_code(self) -> int:
        code = self.process.wait(120)
        self._reader.join(5)
        return code


def wait_for(holds: Callable[[], Any], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def make(*flags: str) -> Process:
        started.append(Process(*flags))
        return started[-1]

    yield make
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(30)


def stream_to_its_end(url: str, into: list[str], body: dict[str, Any]) -> threading.Thread:
    """Read a stream in a thread, which has begun."""

    def read() -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as response:
            into.extend(response.iter_lines())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    wait_for(lambda: into)
    return thread


def start_with_progress(start: Callable[..., Process], *flags: str) -> Process:
    """Start a server whose port answers with the progress of the start until it serves."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start("--port", str(port), *flags)
    phases: list[str] = []

    def serves() -> bool:
        assert server.process.poll() is None, server.said
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=30)
        except httpx.ConnectError:  # its server is not imported yet
            assert not phases
            return False
        if answer.status_code == 503:
            assert answer.headers["retry-after"] == "1" and answer.json()["error"]["code"] == "engine_starting"
            phases.append(answer.json()["starting"]["phase"])
        return answer.status_code == 200

    wait_for(serves, 120)
    assert phases[0] == "imports" and set(phases) <= {"imports", "weights", "graphs"}
    return server


def test_the_death_of_the_engine_ends_requests_and_the_server(start: Callable[..., Process]) -> None:
    server = start("--disable-uvicorn-access-log")
    url, lines, answers = server.url, [], []
    streaming = stream_to_its_end(url, lines, LONG)
    waiting = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=LONG, timeout=60))
    )
    waiting.start()
    time.sleep(0.2)
    engine = server.engine_pid
    os.kill(engine, signal.SIGKILL)
    streaming.join(10)
    waiting.join(10)
    assert [httpx.get(f"{url}/{path}").status_code for path in ("health", "ping", "ready")] == [503] * 3
    assert lines[-2] == "data: [DONE]" and "SIGKILL" in lines[-4] and '"error"' in lines[-4]
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "engine_died"
    assert server.exit_code() == 1
    assert "the engine's process ended by SIGKILL" in server.said and "Traceback" not in server.said
    assert not psutil.pid_exists(engine)


def test_a_terminated_server_finishes_running_requests_within_the_grace_period(start: Callable[..., Process]) -> None:
    server = start("--shutdown-timeout", "3")
    url, short, long = server.url, [], []
    threads = [stream_to_its_end(url, short, {**LONG, "max_tokens": 20}), stream_to_its_end(url, long, LONG)]
    engine = server.engine_pid
    # As a service manager does: every process of the group gets the signal.
    os.kill(engine, signal.SIGTERM)
    server.process.terminate()
    wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503)
    # A probe for liveness must not end the answers in progress.
    assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/ping").status_code == 200
    refused = httpx.post(f"{url}/v1/completions", json=LONG)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
    for thread in threads:
        thread.join(20)
    assert '"finish_reason":"length"' in "".join(short) and "error" not in "".join(short)
    assert "shut down before the answer was complete" in long[-4]
    assert server.exit_code() == 0, server.said
    assert server.process.stdout is not None
    accesses = server.process.stdout.read()
    assert "POST /v1/completions" in accesses and "/health" not in accesses
    assert not psutil.pid_exists(engine)


def test_the_engine_ends_with_a_server_that_is_killed() -> None:
    """However far its start has come. A server without HTTP starts sooner, and dies the same."""
    program = """if __name__ == "__main__":
    import asyncio
    from phonograph.config.engine_config import EngineConfig
    from phonograph.engine.process.process_client import ProcessClient

    async def start():
        process = ProcessClient(EngineConfig(model="demo", enforce_eager=True))
        print(process.pid, flush=True)
        await asyncio.sleep(60)

    asyncio.run(start())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        engine = psutil.Process(int(server.stdout.readline()))
        server.kill()
    wait_for(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-model-len", "9999999"], "max_model_len=9999999: exceeds the model's context length of 8192"),
        (
            ["--chat-template", "absent.jinja"],
            "chat_template='absent.jinja': is neither a template nor a readable file",
        ),
    ],
)
def test_a_start_that_fails_is_one_line(start: Callable[..., Process], flags: list[str], says: str) -> None:
    server = start(*flags)
    assert server.exit_code() == 2
    assert says in server.said and "Traceback" not in server.said


def test_a_port_in_use_is_found_before_the_engine_starts(start: Callable[..., Process]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = start("--port", port)
        assert server.exit_code() == 2
        assert f"port={port}: cannot be bound on 127.0.0.1" in server.said and "starting" not in server.said


def test_progress_of_the_start_then_thousands_of_idle_connections(start: Callable[..., Process]) -> None:
    server = start_with_progress(start, "--header-timeout", "600", "--body-timeout", "600")
    address = ("127.0.0.1", int(server.url.rsplit(":")[-1]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = (1 << 20) if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(room, max(soft, 2_500)), hard))
    silent: list[socket.socket] = []
    try:
        # More than the 1024 files that a process may have by default, fewer where the system allows a process fewer.
        while len(silent) < min(2_000, room - 500):
            silent.append(socket.create_connection(address))
            if len(silent) % 2:
                silent[-1].sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 10\r\n\r\n{")
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(httpx.post, f"{server.url}/v1/completions", json=SHORT, timeout=20) for _ in range(8)]
            assert [one.result().status_code for one in asked] == [200] * 8
        assert psutil.Process(server.process.pid).num_fds() > len(silent)
    finally:
        for connection in silent:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_for(lambda: psutil.Process(server.process.pid).num_fds() < 200)
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0 and "Traceback" not in server.said
