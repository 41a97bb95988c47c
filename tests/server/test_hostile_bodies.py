"""Bodies that hold too much are refused by a limit that the answer names. `scripts/hostile-bodies` sends large ones."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from servers import Server

from phonograph.server.chat.serving import Serving
from phonograph.server.http.json_route import JsonRequest

ServeWith = Callable[..., Server]
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
LIMITS = {
    "max_request_fields": 400,
    "max_request_token_ids": 300,
    "max_request_depth": 16,
    "max_request_prompts": 3,
    "max_request_messages": 5,
    "max_request_tools": 2,
    "max_request_stops": 3,
    "max_request_stop_token_ids": 4,
    "max_request_biases": 6,
}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"a": ["b"] * 400})}}]}
NESTED = '{"prompt": "a", "metadata": ' + '{"a":' * 20 + "1" + "}" * 21
TOO_MUCH: list[tuple[str, Any, str | None, str]] = [
    # path, body, the field that is at fault, part of what is said
    ("/v1/chat/completions", {"messages": [USER] * 6}, "messages", "takes 5 at most (max_request_messages)"),
    ("/v1/chat/completions", {"messages": [{}] * 450}, None, "(max_request_fields)"),
    ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL] * 3}, "tools", "(max_request_tools)"),
    ("/v1/chat/completions", {"messages": [CALL]}, None, "(max_request_fields)"),
    (
        "/v1/completions",
        {"prompt": ["a"] * 4},
        "prompt",
        "4 prompts; this server takes 3 at most (max_request_prompts)",
    ),
    ("/v1/completions", {"prompt": [1] * 301}, "prompt", "(max_request_token_ids)"),
    ("/v1/completions", {"prompt": [[1] * 200, [1] * 101]}, "prompt", "301 token ids"),
    ("/v1/completions", {"prompt": ["many words of text " * 20] * 3}, "prompt", "(max_request_token_ids)"),
    ("/v1/completions", {"prompt": "a", "stop": ["b"] * 4}, "stop", "(max_request_stops)"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 5}, "stop_token_ids", "(max_request_stop_token_ids)"),
    (
        "/v1/completions",
        {"prompt": "a", "logit_bias": {str(i): 1 for i in range(7)}},
        "logit_bias",
        "(max_request_biases)",
    ),
    ("/v1/completions", {"prompt": "a"} | {f"f{i}": 1 for i in range(300)}, None, "no endpoint has more than 256"),
    ("/v1/completions", {"prompt": "a", "metadata": {f"k{i}": "" for i in range(300)}}, None, "(max_request_fields)"),
    (
        "/v1/completions",
        {"prompt": "a", "stream_options": {f"k{i}": 1 for i in range(17)}},
        "stream_options",
        "17 fields",
    ),
    ("/v1/completions", {"prompt": "a", "guided_choice": [1] * 300}, "guided_choice", "must be a list of texts"),
    ("/v1/completions", NESTED, None, "(max_request_depth)"),
    ("/v1/completions", '{"prompt": [' + "9" * 1025 + "]}", None, "a number of more than 1024 characters"),
    ("/v1/completions", b'{"prompt": "\xff"}', None, "not UTF-8 at byte 12"),
    ("/v1/completions", json.dumps({"prompt": "a"}).encode("utf-16"), None, "not UTF-8 at byte 0"),
    ("/tokenize", {"prompt": "a" * 20_000}, "prompt", "the context holds 1024 tokens (max_model_len)"),
    ("/tokenize", {"messages": [USER | {"content": "a" * 20_000}]}, "messages", "(max_model_len)"),
    ("/detokenize", {"tokens": [1] * 301}, "tokens", "(max_request_token_ids)"),
]


def test_each_limit_is_named(serve_with: ServeWith) -> None:
    server = serve_with(**LIMITS)
    with httpx.Client(base_url=server.url, headers={"content-type": "application/json"}, timeout=60) as http:
        for path, body, param, says in TOO_MUCH:
            answer = http.post(path, content=body if isinstance(body, str | bytes) else json.dumps(body))
            assert answer.status_code == 400, (path, says, answer.text)
            error = answer.json()["error"]
            assert error["param"] == param and says in error["message"], (says, error)
        # A byte-order mark is white space.
        assert http.post("/tokenize", content=b'\xef\xbb\xbf{"prompt": "Hi"}').status_code == 200


def test_template_variables_are_bounded(server: Server) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        for count, status in ((1024, 200), (1025, 400)):
            variables = {f"v{index}": 1 for index in range(count)}
            answer = server.post(path, {"messages": [USER], "chat_template_kwargs": variables})
            assert answer.status_code == status, answer.text
        assert answer.json()["error"] | {"type": None, "code": None} == {
            "message": "chat_template_kwargs has 1025 fields; this server takes 1024 at most",
            "param": "chat_template_kwargs",
            "type": None,
            "code": None,
        }


def test_a_prompt_of_too_many_ids_is_refused_before_its_ids_are_looked_at(server: Server) -> None:
    context = server.engine.facts.context_len
    for prompt in ([5] * (context + 1), [5, *(["no id"] * context)]):
        answer = server.post("/v1/completions", {"prompt": prompt})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded", answer.text


def test_ordinary_requests_are_far_from_the_limits(server: Server) -> None:
    biases = {str(token_id): -1.5 for token_id in range(2000)}
    body = {"prompt": [[5] * 1000] * 16, "max_tokens": 1, "logit_bias": biases, "stop": ["x"] * 20}
    assert len(server.post("/v1/completions", body).json()["choices"]) == 16
    long = {"messages": [{"role": "user", "content": [{"type": "text", "text": "1 + 1"}]}] * 400}
    count = server.post("/tokenize", long).json()["count"]
    assert count > 1024, "a text of more tokens than the context holds is counted"
    assert server.post("/detokenize", {"tokens": [5] * 100_000}).status_code == 200


def test_errors_shorten_quoted_values(server: Server) -> None:
    key = "k" * 1_000_000
    for path, body in [
        ("/v1/completions", {"prompt": "a", key: 1}),
        ("/v1/completions", {"prompt": "a", "stream": True, "stream_options": {key: 1}}),
        ("/v1/completions", {"prompt": "a", "model": key}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {key: 1}}),
        ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {"tokenize": key}}),
    ]:
        answer = server.post(path, body)
        assert 400 <= answer.status_code < 500 and len(answer.content) < 2000, answer.text[:3000]
    assert len(server.get("/v1/models/" + "m" * 60_000).content) < 2000
    answer = server.post("/v1/chat/completions", {"messages": [USER | {key: 1}], "max_tokens": 1})
    assert answer.status_code == 200 and len(answer.headers["warning"]) < 2000


def test_bodies_that_wait_are_bounded_together(serve_with: ServeWith) -> None:
    server = serve_with(max_queued_bytes=100_000)
    with connected(server, length=90_000) as slow:
        slow.sendall(b'{"prompt": "' + b"a" * 60_000)
        # The first may come before the bytes of the slow one.
        server.wait_until(lambda _: server.post("/tokenize", {"prompt": " " * 50_000}).status_code == 429)
        refused = server.post("/tokenize", {"prompt": " " * 50_000})
        assert refused.status_code == 429 and "(max_queued_bytes)" in refused.json()["error"]["message"]
    server.wait_until(lambda _: server.post("/tokenize", {"prompt": "a" * 13_000}).status_code == 200)
    large = server.post("/tokenize", {"prompt": " " * 100_001})
    assert large.status_code == 429, "no matter how much waits besides"


def test_a_refused_body_is_read_to_its_end(serve_with: ServeWith) -> None:
    """Else the connection would be reset while the client sends, before it reads the answer."""
    server = serve_with(max_request_bytes=1000)
    with connected(server, length=3_000_000) as client:
        client.sendall(b"[" * 3_000_000)
        assert b" 413 " in read_answer(client)


def test_slow_bodies_and_headers_are_ended(serve_with: ServeWith) -> None:
    server = serve_with(body_timeout=0.3, header_timeout=0.3)
    with connected(server, length=100) as client:
        client.sendall(b"{")
        answer = read_answer(client)
        assert b" 408 " in answer and b"(body_timeout)" in answer
    with connected(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nx:")
        answer = read_all(client)
        assert b" 408 " in answer and b"(header_timeout)" in answer
    with connected(server) as client:
        assert read_all(client) == b"", "a connection without a request is closed"
    with connected(server) as client:
        client.sendall(b"GET /version HTTP/1.1\r\n\r\n")
        assert b" 200 " in read_answer(client)
        time.sleep(0.5)
        client.sendall(b"GET /version HTTP/1.1\r\n\r\n")
        assert b" 200 " in read_answer(client), "one that waits for its next request is kept"
        client.sendall(b"GET /version HT")
        assert b" 408 " in read_all(client)


@pytest.mark.parametrize("headers", [b"x: " + b"a" * 70_000, b"x: a\r\n" * 20_000, b"x: " + b"a" * 500_000])
def test_long_headers_are_refused(server: Server, headers: bytes) -> None:
    for end in (b"\r\n\r\n", b""):
        with connected(server) as client:
            client.sendall(b"GET /health HTTP/1.1\r\n" + headers[:200_000] + end)
            answer = read_all(client)
            assert b"HTTP/1.1 431 " in answer and b"65536 bytes" in answer
    with connected(server) as client:
        client.sendall(b"GET /" + headers + b" HTTP/1.1\r\n\r\n")
        assert b"HTTP/1.1 4" in read_all(client)


def test_bytes_that_are_not_http_get_an_error(server: Server) -> None:
    with connected(server) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = read_all(client)
    assert b"HTTP/1.1 400 " in answer and b'"code": "invalid_http"' in answer


CHUNKED = b"transfer-encoding: chunked\r\n"
BROKEN_BODIES = {
    "a size that is no number": (CHUNKED, b"xyz\r\n{}\r\n"),
    "a negative size": (CHUNKED, b"-5\r\n{}\r\n"),
    "a size in a line of its own": (CHUNKED, b"\r\n2\r\n{}\r\n"),
    "a size above 64 bits": (CHUNKED, b"f" * 17 + b"\r\n{}"),
    "a size without a line feed": (CHUNKED, b"2\r{}"),
    "a chunk longer than its size": (CHUNKED, b"1\r\n{}\r\n0\r\n\r\n"),
    "a chunk without its end": (CHUNKED, b"2\r\n{}5\r\n"),
    "a broken second chunk": (CHUNKED, b'c\r\n{"prompt": "\r\nzz\r\n'),
    "a broken end": (CHUNKED, b"2\r\n{}\r\n0\r\nno trailer\r\n\r\n"),
    "a length and chunks": (CHUNKED + b"content-length: 2\r\n", b"2\r\n{}\r\n0\r\n\r\n"),
    "chunks and a length": (b"content-length: 2\r\n" + CHUNKED, b"{}"),
    "two lengths": (b"content-length: 2\r\ncontent-length: 3\r\n", b"{}"),
    "a negative length": (b"content-length: -2\r\n", b"{}"),
    "a length above 64 bits": (b"content-length: %d\r\n" % 2**70, b"{}"),
    "an unknown coding": (b"transfer-encoding: gzip\r\n", b"2\r\n{}\r\n"),
    "chunks that are coded again": (b"transfer-encoding: chunked, gzip\r\n", b"2\r\n{}\r\n"),
}


@pytest.mark.parametrize("case", BROKEN_BODIES)
@pytest.mark.parametrize("path", [b"POST /tokenize", b"POST /v1/completions", b"PUT /tokenize", b"GET /health"])
def test_a_body_that_is_not_http_is_refused_at_once(server: Server, path: bytes, case: str) -> None:
    headers, body = BROKEN_BODIES[case]
    for pause in (0.0, 0.05):
        began = time.monotonic()
        with connected(server) as client:
            client.sendall(path + b" HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + headers + b"\r\n")
            time.sleep(pause)
            client.sendall(body)
            answer = read_all(client)
        # An endpoint without a body may have answered before it came.
        early = path.startswith(b"GET") and answer.startswith(b"HTTP/1.1 200 ")
        assert early or answer.startswith(b"HTTP/1.1 400 "), answer[:300]
        assert b'"code": "invalid_http"' in answer
        assert answer.count(b"HTTP/1.1 ") == 1 + early and time.monotonic() - began < 5, "the connection is closed"


def test_a_refused_body_that_breaks_ends_its_answer(serve_with: ServeWith) -> None:
    server = serve_with(max_request_bytes=100)
    with connected(server) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\n" + CHUNKED + b"\r\nc8\r\n" + b"a" * 200 + b"\r\n")
        assert b" 413 " in client.recv(10_000)
        began = time.monotonic()
        client.sendall(b"xyz\r\n")
        read_all(client)
        assert time.monotonic() - began < 3, "nothing more is waited for"


def test_chunks_are_read_as_one_body(server: Server) -> None:
    with connected(server) as client:
        head = b"POST /tokenize HTTP/1.1\r\ncontent-type: application/json\r\n" + CHUNKED + b"\r\n"
        client.sendall(head + b'8;name=value\r\n{"prompt\r\n')
        time.sleep(0.05)
        client.sendall(b'9\r\n": "Tom"}\r\n0\r\nx-trailer: a\r\n\r\n')
        assert b" 200 " in read_answer(client)


@pytest.mark.parametrize(
    "behind", [b"GET /version HTTP/1.1\r\n\r\n", b"GET /ver", b"POST /tokenize HTTP/1.1\r\n", b"\x00"]
)
def test_a_client_with_requests_in_the_pipe_that_leaves_is_noticed(server: Server, behind: bytes) -> None:
    body = json.dumps({"prompt": "Tom", "max_tokens": 1000, "ignore_eos": True, "stream": True}).encode()
    with connected(server, length=len(body), path="/v1/completions") as client:
        client.sendall(body)
        assert b" 200 " in client.recv(1000)
        client.sendall(behind * 2)
        server.wait_until(lambda engine: engine.num_open == 1)
        time.sleep(0.05)
    server.wait_until(lambda engine: engine.num_open == 0, seconds=1)


def test_requests_in_the_pipe_are_answered_in_their_order(server: Server) -> None:
    with connected(server) as client:
        body = b'{"prompt": "Hi", "max_tokens": 3}'
        ask = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        client.sendall((ask + body) * 2 + b"GET /version HTTP/1.1\r\nconnection: close\r\n\r\n")
        answers = read_all(client)
    assert answers.count(b"HTTP/1.1 200") == 3 and b'"version"' in answers.rpartition(b"\r\n\r\n")[2]
    with connected(server) as client:
        client.sendall(ask + body + b"POST /tokenize HTTP/1.1\r\ncontent-length: 90000\r\n\r\n")
        client.sendall(b" " * 80_000)
        assert read_all(client).count(b"HTTP/1.1 ") == 1, "more than may wait ends the connection after the first"


def test_a_client_that_leaves_is_not_prepared_for() -> None:
    """Work that runs is told, and work that waits for a thread is never begun."""
    left, released, seen = asyncio.Event(), threading.Event(), list[Any]()
    threads: Any = SimpleNamespace(_threads=ThreadPoolExecutor(1))

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    def running(gone: threading.Event) -> None:
        seen.append(gone.wait(20) and released.wait(20))

    async def leave() -> list[Any]:
        request = JsonRequest({"type": "http"}, receive)
        request.num_bytes = 10**6
        tasks = [
            asyncio.create_task(Serving.prepare(threads, request, running)),
            asyncio.create_task(Serving.prepare(threads, request, lambda _: seen.append("begun"))),
        ]
        await asyncio.sleep(0)
        left.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    errors = asyncio.run(leave())
    released.set()
    threads._threads.shutdown()
    assert [error.status for error in errors] == [499, 499]
    assert seen == [True]


def test_many_prompts_are_tokenized_by_a_thread() -> None:
    """However short they are; the event loop would stand still."""
    threads: Any = SimpleNamespace(_threads=ThreadPoolExecutor(1))

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def thread_of(num_prompts: int) -> threading.Thread:
        request = JsonRequest({"type": "http"}, receive)
        request.num_bytes = 10_000
        return await Serving.prepare(threads, request, lambda _: threading.current_thread(), num_prompts=num_prompts)

    assert asyncio.run(thread_of(2)) is threading.current_thread()
    assert asyncio.run(thread_of(2000)) is not threading.current_thread()
    threads._threads.shutdown()


@contextmanager
def connected(server: Server, *, length: int | None = None, path: str = "/tokenize") -> Iterator[socket.socket]:
    """Return a connection on which the headers of a request of this many bytes were sent."""
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":")[-1])), timeout=20) as client:
        if length is not None:
            client.sendall(
                b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                % (path.encode(), length)
            )
        yield client


def read_answer(client: socket.socket) -> bytes:
    """Return an answer whose body is a JSON object, from a connection that stays open."""
    data = piece = client.recv(1000)
    while piece and not data.endswith(b"}"):
        piece = client.recv(1000)
        data += piece
    return data


def read_all(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    data = bytearray()
    try:
        while piece := client.recv(65_536):
            data += piece
    except ConnectionResetError:
        pass
    return bytes(data)
