"""Keys, origins, sizes, queues, time: what a server refuses although the request is right."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import pytest
from servers import Server

LONG: dict[str, Any] = {"prompt": "Tom", "max_tokens": 1000, "ignore_eos": True, "temperature": 0}
ServeWith = Callable[..., Server]


@contextmanager
def streams_in_progress(server: Server, count: int) -> Iterator[None]:
    """So many long streams that have begun; they are cut at the end of the block."""
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=30))
        for _ in range(count):
            response = stack.enter_context(http.stream("POST", "/v1/completions", json={**LONG, "stream": True}))
            # Kept until the end: a response is closed with its iterator.
            pieces = response.iter_raw()
            next(pieces)
            stack.callback(pieces.close)  # pyright: ignore[reportAttributeAccessIssue]
        yield


def test_keys(serve_with: ServeWith) -> None:
    server = serve_with(api_key=["one", "zwei ß"])
    assert server.client(api_key="one").models.list().data
    for key in ("", "on", "one1", "two"):
        with pytest.raises(openai.AuthenticationError) as caught:
            server.client(api_key=key or "-").models.list()
        assert caught.value.code == "invalid_api_key"
    headers: list[Any] = [
        {},
        {"authorization": "one"},
        {"authorization": "Basic one"},
        {"authorization": b"Bearer \xff"},
    ]
    for header in headers:
        for path in ("/v1/models", "/tokenize", "/openapi.json", "/nope"):
            assert server.get(path, headers=header).status_code == 401
    assert server.get("/health").status_code == 200
    assert server.get("/v1/models", headers={"authorization": "bearer zwei ß".encode()}).status_code == 200


def test_origins(serve_with: ServeWith, server: Server) -> None:
    page = {"origin": "https://page.example", "access-control-request-method": "POST"}
    allowing = serve_with(allowed_origins=["https://page.example"], api_key=["k"])
    preflight = httpx.options(f"{allowing.url}/v1/completions", headers=page)
    assert preflight.headers["access-control-allow-origin"] == page["origin"]
    # A page can read why it was refused, too.
    assert allowing.get("/v1/models", headers=page).headers["access-control-allow-origin"] == page["origin"]
    other = allowing.get("/v1/models", headers={**page, "origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in server.get("/v1/models", headers=page).headers


def test_large_bodies(serve_with: ServeWith) -> None:
    server = serve_with(max_request_bytes=1000)
    assert server.post("/tokenize", {"prompt": "a" * 900}).status_code == 200
    for body in ({"content": b"a" * 1001}, {"content": (b"a" * 100 for _ in range(11))}):
        answer = httpx.post(f"{server.url}/tokenize", **body)  # pyright: ignore[reportArgumentType]
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
    # Refused by what the header says, before any of it is sent.
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":")[-1]))) as raw:
        raw.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_full_queue(serve_with: ServeWith, server: Server) -> None:
    """The engine runs 4 sequences; 2 more may wait."""
    full = serve_with(max_queued_requests=2)
    with streams_in_progress(full, 3):
        with pytest.raises(openai.RateLimitError) as caught:
            full.client().completions.create(model="demo", prompt="Hi", n=4)
        assert caught.value.code == "queue_full" and caught.value.response.headers["retry-after"] == "1"
        assert full.post("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 1}).status_code == 200
        # Another server on the same engine has room.
        assert server.post("/v1/completions", {"prompt": "Hi", "n": 4, "max_tokens": 1}).status_code == 200
    server.wait_until_idle()
    assert full.post("/v1/completions", {"prompt": "Hi", "n": 6, "max_tokens": 1}).status_code == 200
    never = full.post("/v1/completions", {"prompt": "Hi", "n": 7})
    assert never.status_code == 400 and "takes 6 at most" in never.json()["error"]["message"]


def test_time_is_up(serve_with: ServeWith, server: Server) -> None:
    hasty = serve_with(request_timeout=0.5)
    answer = hasty.post("/v1/completions", LONG)
    assert answer.status_code == 504 and "0.5 s" in answer.json()["error"]["message"]
    lines = hasty.post("/v1/completions", {**LONG, "n": 2, "stream": True}).text.splitlines()
    assert "not complete within" in lines[-4] and lines[-2] == "data: [DONE]"
    server.wait_until_idle()
    assert hasty.post("/v1/completions", {"prompt": "Tom", "max_tokens": 2}).status_code == 200


def test_clients_that_go_away_leave_nothing(server: Server) -> None:
    """Streams that are cut after their first chunk, and requests whose clients disconnect."""
    for count in (1, 4):
        with streams_in_progress(server, count):
            assert server.engine.num_open == count
        server.wait_until_idle()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={**LONG, "n": 3}, timeout=0.5)
    before = server.engine.num_steps
    server.wait_until_idle()
    assert server.engine.num_steps - before < 100, "it did not run to its end"


def test_a_client_that_reads_slowly_delays_no_other(server: Server) -> None:
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", int(server.url.rsplit(":")[-1])))
        body = b'{"prompt": "Tom", "max_tokens": 300, "ignore_eos": true, "stream": true, "logprobs": 20, "n": 2}'
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        slow.sendall(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        assert slow.recv(100).startswith(b"HTTP/1.1 200")
        assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 5}).status_code == 200
        # The engine does not wait for the reader: what it made waits in the server.
        server.wait_until_idle()
        data = bytearray()
        while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            data += slow.recv(65536)
    assert data.count(b'"finish_reason":"length"') == 2
