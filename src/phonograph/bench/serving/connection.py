"""One HTTP exchange, recorded: each piece of the answer with the time at which it reached this process.

The clock is read in the socket's callback, and what came is kept as it is and read later (`events`). A client that
wakes a task for each piece, and reads it there, is late by as much as it has to do for all streams: at 256 streams and
25,000 tokens a second it times itself (docs/evaluation.md has figures).
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from phonograph.errors import ConfigError

SHOWN_ERROR = 300
"""Characters of a server's answer that an error shows, where it is not in OpenAI's form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go.

    address: the host, or the IP address that it was found to have, so that no request has to look it up
    prefix:  of every path
    tls:     None for plain HTTP
    """

    host: str
    address: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None

    @classmethod
    def parse(cls, base_url: str) -> Target:
        """
        Raises:
            ConfigError: it is no HTTP URL.
        """
        url = urlsplit(base_url)
        try:
            port = url.port
        except ValueError:
            port = 0
        if url.scheme not in ("http", "https") or not url.hostname or port == 0 or url.query or url.fragment:
            raise ConfigError("base_url", base_url, "must be as http://127.0.0.1:8000")
        secure = url.scheme == "https"
        return cls(
            host=url.hostname,
            address=url.hostname,
            port=port or (443 if secure else 80),
            prefix=url.path.rstrip("/"),
            tls=ssl.create_default_context() if secure else None,
        )

    def head(self, method: str, path: str, length: int, headers: dict[str, str]) -> bytes:
        """The head of a request with a body of so many bytes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        fields = {
            "host": f"{host}:{self.port}",
            "accept": "*/*",
            "content-type": "application/json",
            "content-length": str(length),
            **headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{method} {self.prefix}{path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


@dataclass(slots=True)
class Recording:
    """What came, and when.

    start:  when the exchange began, before its connection was made; seconds of `time.perf_counter`, as `times`
    times:  one for each of `pieces`, of the body
    peer:   the address that answered
    error:  why there is no complete answer with status 200
    """

    start: float = 0.0
    status: int | None = None
    times: list[float] = field(default_factory=list[float])
    pieces: list[bytes] = field(default_factory=list[bytes])
    peer: str | None = None
    error: str | None = None

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


async def exchange(
    target: Target,
    method: str,
    path: str,
    body: bytes,
    *,
    headers: dict[str, str],
    timeout: float | None,
    recording: Recording | None = None,
) -> Recording:
    """Sends a request on a connection of its own and records the answer; whatever goes wrong is its `error`.

    timeout:   seconds from the beginning to the last piece, or None
    recording: what is filled in, for who cancels this and wants what had come
    """
    recording = recording or Recording()
    recording.start = time.perf_counter()
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(timeout):
            loop = asyncio.get_running_loop()
            done = loop.create_future()
            transport, _ = await loop.create_connection(
                lambda: _Receiver(recording, done),
                target.address,
                target.port,
                ssl=target.tls,
                server_hostname=target.host if target.tls else None,
            )
            transport.write(target.head(method, path, len(body), headers) + body)
            await done
    except TimeoutError:
        recording.error = f"no complete answer within {timeout:g} s"
    except OSError as error:
        recording.error = f"no connection: {error}"
    finally:
        if transport is not None:
            transport.abort()
    if recording.error is None and recording.status != 200:
        recording.error = f"HTTP {recording.status}: {_message(recording.body)}"
    return recording


class _Receiver(asyncio.Protocol):
    """The parser's and the socket's callbacks. `done` is set when no more is to come."""

    def __init__(self, recording: Recording, done: asyncio.Future[None]) -> None:
        self._recording = recording
        self._done = done
        self._now = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._delimited = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        self._recording.peer = peer[0] if peer else None

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        # An answer without a length ends with its connection.
        whole = exc is None and self._recording.status is not None and not self._delimited
        self._end(None if whole else f"the connection broke before the answer was complete{f' ({exc})' if exc else ''}")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._delimited |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._recording.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._recording.times.append(self._now)
        self._recording.pieces.append(body)

    def on_message_complete(self) -> None:
        self._end(None)

    def _end(self, error: str | None) -> None:
        if not self._done.done():
            self._recording.error = error
            self._done.set_result(None)


def _message(body: bytes) -> str:
    """What a server says is wrong, as OpenAI's servers say it, or as it stands."""
    text = body.decode("utf-8", "replace")
    try:
        found: Any = json.loads(text)["error"]
        return str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError):
        return text[:SHOWN_ERROR]
