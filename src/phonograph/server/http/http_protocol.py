"""HTTP/1.1 of one connection: uvicorn's protocol with limits on headers, and detection of disconnects."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from phonograph.config.server_config import ServerConfig
from phonograph.server.http.api_errors import ApiError, invalid

MAX_HEADER_BYTES = 65_536
"""Maximum bytes of a request line with its headers. The parser itself has no limit."""
MAX_PIPELINED_BYTES = 65_536
"""Maximum bytes of pipelined requests that wait for the answer to an earlier one."""


def http_protocol(config: ServerConfig) -> Any:
    """Return the protocol of a server's connections, for `uvicorn.Config`."""
    return partial(HttpProtocol, header_timeout=config.header_timeout)


class HttpProtocol(HttpToolsProtocol):
    """One connection. It is read even while a request is answered, because only a read shows a disconnect.

    header_timeout: time limit for the headers of a request, in seconds
    """

    def __init__(self, *args: Any, header_timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timeout = header_timeout
        self._header_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        self._num_unfinished_bytes = 0
        self._num_pipelined_bytes = 0
        self._running: RequestResponseCycle | None = None
        self._refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn notifies only the latest request, which may be queued behind the running one.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:  # requests after a refused one get no answer
            return
        awaited, pipelined = self._header_timer is not None, bool(self.pipeline)
        super().data_received(data)
        if self._refusal is not None:
            return
        if self._header_timer is None and self._answered:
            self._await_headers()
        elif awaited and self._header_timer is not None:
            self._num_unfinished_bytes += len(data)
            self._check_headers(self._num_unfinished_bytes)
        if self.pipeline:
            self._num_pipelined_bytes += len(data) if pipelined else len(self.cycle.body)
            if self._num_pipelined_bytes > MAX_PIPELINED_BYTES:
                self._refuse(invalid(None, f"more than {MAX_PIPELINED_BYTES} bytes follow an unanswered request"))
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = self._num_unfinished_bytes = 0
        if self._header_timer is None:
            self._await_headers()

    def on_url(self, url: bytes) -> None:
        self._num_header_bytes += len(url)
        self._check_headers(self._num_header_bytes)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_header_bytes += len(name) + len(value) + len(": \r\n")
        self._check_headers(self._num_header_bytes)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        # The parser finishes its piece after a refusal.
        if self._refusal is None:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refusal is None:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._refusal is None:
            self._refuse(invalid(None, "the request is not HTTP/1.1", code="invalid_http"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._num_pipelined_bytes = 0
        super()._start_asgi_task(cycle, app)

    @property
    def _answered(self) -> bool:
        return self._running is not None and self._running.response_complete

    def _check_headers(self, num_bytes: int) -> None:
        if num_bytes > MAX_HEADER_BYTES and self._refusal is None:
            self._refuse(
                ApiError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes", code="headers_too_large")
            )

    def _await_headers(self) -> None:
        self._header_timer = self.loop.call_later(self._header_timeout, self._end_waiting)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _end_waiting(self) -> None:
        self._header_timer = None
        if not self._num_header_bytes and not self._num_unfinished_bytes:
            self.transport.close()
            return
        problem = f"the headers did not arrive within {self._header_timeout:g} s (header_timeout)"
        self._refuse(ApiError(408, problem, code="timeout"))

    def _refuse(self, error: ApiError) -> None:
        """End the connection with an error, or after the answer in progress.

        A request whose body cannot be read to its end is not waited for: it gets the error at once.
        """
        self._refusal = error
        self._stop_timer()
        self.pipeline.clear()
        running = None if self._answered else self._running
        if running is not None:
            running.keep_alive = False
            if running is not self.cycle or not running.more_body:
                return
            # The application sees the end of the body, or a client that has left if the answer is sent here.
            running.more_body = False
            running.disconnected = not running.response_started
            running.message_event.set()
        if (running is None or running.disconnected) and not self.transport.is_closing():
            body = json.dumps(error.body()).encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
            self.transport.close()
