"""Answers of the port while the engine starts."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import httpx
import pytest

from phonograph.server.http.starting import MAX_HEAD, Starting


def answered(ask: Any) -> Any:
    """Return the result of `ask(starting, listener)`, run beside the responder."""

    async def run() -> Any:
        starting = Starting(16)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with starting.answering(listener):
                return await ask(starting, listener)

    return asyncio.run(run())


def url(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_every_path_says_how_far_the_start_is() -> None:
    async def ask(starting: Starting, listener: socket.socket) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url(listener)) as client:
            first = await client.get("/health")
            starting.progress("graphs", 3, 16)
            return [first, await client.post("/v1/completions", json={"prompt": "Hi"}), await client.head("/health")]

    first, second, head = answered(ask)
    for answer in (first, second, head):
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert first.json()["starting"] | {"seconds": 0} == {"phase": "imports", "done": 0, "total": 1, "seconds": 0}
    assert second.json()["starting"] | {"seconds": 0} == {"phase": "graphs", "done": 3, "total": 16, "seconds": 0}
    error = second.json()["error"]
    assert error["code"] == "engine_starting" and "the engine is starting: graphs, 3 of 16" in error["message"]
    assert head.content == b"" and int(head.headers["content-length"]) > 0


@pytest.mark.parametrize("method", ["HEAD", "POST"])
def test_a_client_that_sends_slowly_gets_its_answer(method: str) -> None:
    """The connection is not reset while a body arrives. The answer to HEAD has no body."""

    def send(address: tuple[str, int]) -> bytes:
        with socket.create_connection(address, timeout=10) as client:
            client.sendall(f"{method} /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n".encode())
            for _ in range(3):
                time.sleep(0.1)
                client.sendall(b"x" * 100_000)
            client.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: client.recv(1 << 16), b""))

    async def ask(_: Starting, listener: socket.socket) -> bytes:
        return await asyncio.to_thread(send, listener.getsockname())

    answer = answered(ask)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert answer.endswith(b"\r\n\r\n") == (method == "HEAD")


@pytest.mark.parametrize("data", [b"", b"GET / HT", b"x" * (2 * MAX_HEAD), b"\x16\x03\x01\x00\xff\r\n"])
def test_other_clients_are_answered_beside_one_that_sends_no_request(data: bytes) -> None:
    async def ask(starting: Starting, listener: socket.socket) -> httpx.Response:
        _, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(data)
        async with httpx.AsyncClient(base_url=url(listener)) as client:
            answer = await client.get("/health")
        writer.close()
        return answer

    assert answered(ask).status_code == 503


def test_connections_after_the_start_wait_for_the_server() -> None:
    async def run() -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with Starting(16).answering(listener):
                pass
            reader, writer = await asyncio.open_connection(*listener.getsockname())

            async def serve(_: asyncio.StreamReader, served: asyncio.StreamWriter) -> None:
                served.write(b"served")
                served.close()

            async with await asyncio.start_server(serve, sock=listener):
                found = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            return found

    assert asyncio.run(run()) == b"served"
