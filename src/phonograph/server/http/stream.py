"""Streamed answers as server-sent events.

A task that wakes for each token, through all layers of the application, would cost a quarter of the server's time per
token. Chunks are therefore sent from the callback that applies the engine's reports. The task of the request only waits
for the end of the call, and for clients that read slowly: a send to such a client suspends, the task finishes it, and
later output accumulates into one chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Generator, Mapping
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from phonograph.engine.process.calls import Call, Sample
from phonograph.errors import PhonographError
from phonograph.server.http.api_errors import ApiError, api_error, failed
from phonograph.server.http.error_count import ERRORS

log = logging.getLogger(__name__)

SERVERS_SEND = "phonograph.send"
"""Key of the server's own `send` among the extensions of a request."""


class AnswerWriter(Protocol):
    """Writer of one answer in its protocol, at once or as a stream.

    name:       id of the answer
    media_type: type of its stream
    """

    name: str
    media_type: str

    def whole(self) -> dict[str, Any]:
        """Return the answer to a request without streaming."""
        ...

    def write(self, changed: list[Sample]) -> bytes:
        """Return the events of samples that have changed, from the first on; empty if there is nothing to show yet."""
        ...

    def end(self) -> bytes:
        """Return the events after all samples have ended."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Return the events of an answer that ends with an error."""
        ...


class DirectSend:
    """Stores the server's own `send` for streams, because each layer of the application wraps it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("extensions", {})[SERVERS_SEND] = send
        await self._app(scope, receive, send)


class EventStream(Response):
    """Sends the events of a call as it grows. Closes the call, however it ends.

    Args:
        call: the call of the engine.
        answer: writes the events.
        headers: headers of the response.
        names: the request's names of engine parameters, where they differ.
    """

    def __init__(self, call: Call, answer: AnswerWriter, headers: Mapping[str, str], names: Mapping[str, str]) -> None:
        # Proxies must neither cache nor buffer events; the second header is nginx's.
        streamed = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, 200, {**headers, **streamed}, answer.media_type)
        del self.headers["content-length"]
        self._call = call
        self._answer = answer
        self._names = names
        self._finished = False
        self._error: ApiError | None = None
        self._unsent: _Begun | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # The layers in between only act on the start of a response.
            self._send = scope.get("extensions", {}).get(SERVERS_SEND, send)
            await self._send_chunks()
            await self._send(_message(self._end(), more=False))
        finally:
            if self._error is not None and (errors := scope.get("extensions", {}).get(ERRORS)):
                errors.add(self._error.status)
            self._call.on_change = None
            self._call.close()

    async def _send_chunks(self) -> None:
        """Send until the call has ended or failed."""
        self._call.on_change = self._write
        self._write()
        try:
            while self._unsent is not None or not self._finished:
                if self._unsent is None:
                    await self._call.wait()
                else:
                    await self._unsent
                    self._unsent = None
                self._write()
        except (ApiError, PhonographError) as error:
            self._error = api_error(error, self._names)
            if self._unsent is not None:
                await self._unsent

    def _write(self) -> None:
        """Send new output of the call, unless an earlier send is suspended."""
        if self._unsent is not None or self._finished:
            return
        try:
            changed, self._finished = self._call.take_changed(), self._call.finished
            data = self._answer.write(changed)
            if data:
                self._unsent = _begin(self._send(_message(data)))
        except Exception:  # the caller serves other calls too
            log.exception("a chunk could not be written")
            self._finished = False
            self._call.fail(failed("the output could not be written", code="internal_error"))
        if self._unsent is not None:
            self._call.wake()

    def _end(self) -> bytes:
        return self._answer.end() if self._error is None else self._answer.error(self._error)


def _message(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _begin(sending: Coroutine[Any, Any, None]) -> _Begun | None:
    """Run a coroutine until it suspends; return the rest of it, or None if it has ended."""
    try:
        return _Begun(sending, sending.send(None))
    except StopIteration:
        return None


class _Begun:
    """The rest of a coroutine that was run until it suspended; awaitable.

    awaited: value that the coroutine yielded to the event loop
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            while True:
                try:
                    yield self._awaited
                except BaseException as error:
                    self._awaited = self._coroutine.throw(error)
                else:
                    self._awaited = self._coroutine.send(None)
        except StopIteration:
            return
