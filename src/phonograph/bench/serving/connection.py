"""HTTP exchanges, recorded: each piece of the answer with the time at which it reached this process.

The socket's callback reads the clock and keeps the bytes; `events` parses them later. A client that parses each piece
in a task of its own times itself when many streams are open (docs/evaluation.md).
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
"""Characters in an error of an answer that is not in OpenAI's form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Destination of requests.

    address: the host, or its IP address, which spares requests the look-up
    prefix:  first part of every path
    tls:     None for plain HTTP
    """

    host: str
    address: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None

    @classmethod
    def parse(cls, base_url: str) -> Target:
        """Parse an HTTP URL.

        Raises:
            ConfigError: it is not an HTTP URL.
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
        """Return the head of a request with a body of `length` bytes."""
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
    """One exchange.

    start:  begin of the exchange, before the connection; seconds of `time.perf_counter`, as `times`
    times:  arrival of each of `pieces`, parts of the body
    peer:   address that answered
    error:  reason if there is no complete answer with status 200
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
    """Send a request on a new connection and record the answer; any failure is the recording's `error`.

    The timeout is in seconds from the start to the last piece, or None. A caller that may cancel the exchange passes
    its own `recording` to see the pieces so far.
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
    """Callbacks of parser and socket. `done` is set at the end of the answer."""

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
    """Return the message of an error in OpenAI's form, or the begin of the body."""
    text = body.decode("utf-8", "replace")
    try:
        found: Any = json.loads(text)["error"]
        return str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError):
        return text[:SHOWN_ERROR]
