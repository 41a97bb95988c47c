"""Answers while the engine starts: 503 with the progress, on the port that will serve.

A plain responder in place of the application, which needs the engine. It listens on a copy of the server's socket, so
connections that come between its end and the application's start wait in the backlog.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

from phonograph.server.http.api_errors import ApiError

log = logging.getLogger(__name__)

RETRY_SECONDS = 1
READ_SECONDS = 5.0
"""Time that a client has to send its request."""
MAX_HEAD = 64 * 1024
MAX_BODY = 1 << 20
"""Bytes of a body that are read, so that the client gets to read the answer."""


class Starting:
    """Progress of a start, and the HTTP responder that reports it."""

    def __init__(self, backlog: int, tls: ssl.SSLContext | None = None) -> None:
        self._backlog = backlog
        self._tls = tls
        self._began = time.monotonic()
        self._progress = "imports", 0, 1

    def progress(self, phase: str, done: int, total: int) -> None:
        """Take the progress of the engine's start; see `StartProgress`."""
        self._progress = phase, done, total

    @asynccontextmanager
    async def answering(self, listener: socket.socket) -> AsyncGenerator[None]:
        """Answer every request on the bound socket until the context ends."""
        listener.listen(self._backlog)
        responder = await asyncio.start_server(
            self._answer, sock=listener.dup(), limit=MAX_HEAD, backlog=self._backlog, ssl=self._tls
        )
        try:
            yield
        finally:
            responder.close()

    def body(self) -> dict[str, Any]:
        """Return the body of an answer: the error in OpenAI's format, and the progress."""
        phase, done, total = self._progress
        seconds = round(time.monotonic() - self._began, 1)
        message = f"the engine is starting: {phase}, {done} of {total}, after {seconds} s; try again in a second"
        error = ApiError(503, message, kind="server_error", code="engine_starting")
        return {**error.body(), "starting": {"phase": phase, "done": done, "total": total, "seconds": seconds}}

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                body = json.dumps(self.body()).encode()
                headers = (
                    "HTTP/1.1 503 Service Unavailable\r\n"
                    "content-type: application/json\r\n"
                    f"content-length: {len(body)}\r\n"
                    f"retry-after: {RETRY_SECONDS}\r\n"
                    "connection: close\r\n\r\n"
                )
                writer.write(headers.encode() + (b"" if head.startswith(b"HEAD ") else body))
                if self._tls is None:  # which has no end of one direction
                    writer.write_eof()
                # A close with unread bytes resets the connection, and the client may lose the answer.
                left = MAX_BODY
                while left > 0 and (piece := await reader.read(min(left, MAX_HEAD))):
                    left -= len(piece)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            log.debug("a request during the start was not answered", exc_info=True)
        finally:
            with suppress(OSError):
                writer.close()
