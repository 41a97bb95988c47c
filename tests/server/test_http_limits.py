"""Limits of bodies and headers, with the last value that is taken and the first one that is not.

The numbers without a setting are written out: clients meet them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from phonograph.config.server_config import ServerConfig
from phonograph.errors import EngineUnavailable, RequestError, RequestFailure
from phonograph.server.http.api_errors import ApiError, api_error, client_gone, invalid
from phonograph.server.http.error_count import ErrorCounts
from phonograph.server.http.http_protocol import http_protocol
from phonograph.server.http.json_meter import JsonMeter
from phonograph.server.http.json_route import check_sizes

CONFIG = ServerConfig(
    max_request_messages=3,
    max_request_tools=4,
    max_request_stops=5,
    max_request_stop_token_ids=6,
    max_request_biases=7,
    max_request_token_ids=12,
    max_request_prompts=2,
)


def fields(count: int) -> dict[str, int]:
    return {str(number): number for number in range(count)}


@pytest.mark.parametrize(
    ("taken", "refused", "says"),
    [
        (fields(256), fields(257), "the body has 257 fields; no endpoint has more than 256"),
        *(
            ({name: fields(most)}, {name: fields(most + 1)}, f"{name} has {most + 1} fields; this server takes {most}")
            for name, most in (("stream_options", 16), ("chat_template_kwargs", 1024))
        ),
        *(
            ({name: [0] * most}, {name: [0] * (most + 1)}, f"{name} has {most + 1} items.* takes {most} .*{setting}")
            for name, most, setting in (
                ("messages", 3, "max_request_messages"),
                ("tools", 4, "max_request_tools"),
                ("stop", 5, "max_request_stops"),
                ("stop_token_ids", 6, "max_request_stop_token_ids"),
                ("tokens", 12, "max_request_token_ids"),
            )
        ),
        ({"logit_bias": fields(7)}, {"logit_bias": fields(8)}, "logit_bias has 8 items.*max_request_biases"),
        ({"prompt": [1] * 12}, {"prompt": [1] * 13}, "prompt has 13 token ids.*max_request_token_ids"),
        ({"prompt": ["a"] * 2}, {"prompt": ["a"] * 3}, "prompt has 3 prompts.*max_request_prompts"),
        ({"prompt": [[1], [2]]}, {"prompt": [[1], [2], [3]]}, "prompt has 3 prompts.*max_request_prompts"),
        ({"prompt": [[1] * 6] * 2}, {"prompt": [[1] * 6, [1] * 7]}, "prompt has 13 token ids.*max_request_token_ids"),
        ({"prompt": [None, [1] * 12]}, {"prompt": [None, [1] * 13]}, "prompt has 13 token ids"),
        ({"prompt": "a" * 50, "stop": "b" * 50}, {"prompt": ["a", "b", [1]]}, "prompt has 3 prompts"),
    ],
)
def test_the_last_size_that_is_taken(taken: dict[str, Any], refused: dict[str, Any], says: str) -> None:
    check_sizes(taken, CONFIG)
    with pytest.raises(ApiError, match=says) as caught:
        check_sizes(refused, CONFIG)
    assert caught.value.status == 400


def test_bodies_that_are_no_objects_have_no_sizes() -> None:
    for body in (None, 3, [[0]] * 300, "text", {"prompt": []}):
        check_sizes(body, CONFIG)


@pytest.mark.parametrize("before", [0, 1, 500, 1023])
def test_numbers_of_1024_characters(before: int) -> None:
    """A number may come in two pieces."""
    for length, is_taken in ((1024, True), (1025, False)):
        meter, number = JsonMeter(CONFIG), b"9" * length
        meter.check(b'{"a": [1, ' + number[:before])
        try:
            meter.check(number[before:] + b", 22]}")
        except ApiError as error:
            assert error.code == "number_too_long" and not is_taken
        else:
            assert is_taken


@pytest.mark.parametrize(("value", "is_taken"), [(65_520, True), (65_521, False)])
def test_headers_of_65536_bytes(value: int, is_taken: bool) -> None:
    """With the target, and with the colon, the space and the line's end of each header."""
    made: Any = http_protocol(ServerConfig()).func
    protocol, refusals = object.__new__(made), list[ApiError]()
    protocol.headers, protocol.url, protocol.expect_100_continue = [], b"", False
    protocol._num_header_bytes, protocol._refusal, protocol._refuse = 0, None, refusals.append
    protocol.on_url(b"/a")
    protocol.on_header(b"a-name", b"")
    protocol.on_header(b"", b"v" * value)
    assert [(error.status, error.code) for error in refusals] == [(431, "headers_too_large")] * (not is_taken)


class Transport(asyncio.Transport):
    """A connection whose client reads nothing."""

    def write(self, data: Any) -> None: ...

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Connection:
    """A connection to a server, each answer of which waits until its path is taken off `waits`."""

    def __init__(self, *waits: str) -> None:
        config = Config(self._answer, lifespan="off", log_config=None, ws="none")
        self.waits = {*waits}
        self.protocol = http_protocol(ServerConfig())(config=config, server_state=ServerState(), app_state={})
        self.protocol.connection_made(Transport())

    def send(self, path: str, body: bytes, first: int = 0) -> str | None:
        """Send a request with the first bytes of its body, then the others; return the refusal's message."""
        head = b"POST %s HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body))
        self.protocol.data_received(head + body[:first])
        assert self.protocol._refusal is None
        self.protocol.data_received(body[first:])
        return None if self.protocol._refusal is None else self.protocol._refusal.message

    def close(self) -> None:
        self.waits.clear()
        self.protocol.connection_lost(None)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        while scope["path"] in self.waits:
            await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


@pytest.mark.parametrize("first", [0, 1, 30_000, 65_536])
@pytest.mark.parametrize("length", [65_536, 65_537])
def test_65536_bytes_may_follow_an_unanswered_request(length: int, first: int) -> None:
    """The body of a second request, whose first bytes come with its headers."""

    async def refusal() -> str | None:
        connection = Connection("/a")
        connection.send("/a", b"")
        found = connection.send("/b", b"b" * length, first)
        connection.close()
        return found

    says = "more than 65536 bytes follow an unanswered request"
    assert asyncio.run(refusal()) == (says if length > 65_536 else None)


def test_bytes_that_follow_a_request_count_until_it_is_answered() -> None:
    async def refusals() -> list[str | None]:
        connection = Connection("/a", "/b")
        found = [connection.send("/a", b""), connection.send("/b", b"b" * 40_000)]
        connection.waits.remove("/a")
        while connection.protocol.pipeline:
            await asyncio.sleep(0)
        found += [connection.send("/c", b"c" * 40_000), connection.send("/d", b"d" * 40_000)]
        connection.close()
        return found

    *before, last = asyncio.run(refusals())
    assert before == [None] * 3 and last is not None


@pytest.mark.parametrize(
    ("status", "refused", "failed"),
    [(200, 0, 0), (399, 0, 0), (400, 1, 0), (429, 1, 0), (499, 0, 0), (500, 0, 1), (503, 0, 1)],
)
def test_answers_that_count_as_errors(status: int, refused: int, failed: int) -> None:
    counts = ErrorCounts()
    counts.add(status)
    assert (counts.refused, counts.failed) == (refused, failed)


def test_errors_have_a_status_a_kind_and_a_code() -> None:
    errors = {
        (503, "server_error", "engine_died"): EngineUnavailable("it ended", "engine_died"),
        (500, "server_error", "request_failed"): RequestFailure("r", "sampling", "broke"),
        (400, "invalid_request_error", None): RequestError("max_tokens", 0, "is too small"),
    }
    for expected, error in errors.items():
        found = api_error(error)
        assert (found.status, found.kind, found.code) == expected
    gone = client_gone()
    assert api_error(gone) is gone and gone.status == 499
    with pytest.raises(KeyError):
        api_error(KeyError("a"))
    renamed = api_error(RequestError("max_tokens", 0, "is too small"), {"max_tokens": "max_completion_tokens"})
    assert renamed.param == "max_completion_tokens" and renamed.message == "max_completion_tokens=0: is too small"


def test_messages_have_1000_characters_and_parameters_100() -> None:
    for length in (1000, 1001):
        assert invalid(None, "m" * length).message == "m" * 1000 + "..." * (length > 1000)
        assert invalid("p" * (length - 900), "m").param == "p" * 100 + "..." * (length > 1000)
    error = invalid("\ud800", "\udfff")
    assert (error.param, error.message) == ("?", "?")
