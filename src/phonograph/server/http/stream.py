"""A streamed answer on its way to the client: server-sent events, many thousand of them a second.

A task that wakes for each token, through all the layers of the application, costs a quarter of everything else that a
token needs here. So the call writes itself: whoever takes in the engine's reports calls it once for what they brought,
and it sends then and there. Its task only waits for the end, and for clients that do not read: sending to one of those
stops half-way, the task goes on with it, and what has come by then is one piece.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Generator, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from phonograph.engine.process.calls import Call, Sample
from phonograph.errors import PhonographError
from phonograph.server.http.api_errors import ApiError, api_error, failed
from phonograph.server.openai.answers import DONE, Answer, ChunkWriter, error_chunk
from phonograph.server.openai.protocol import GenerationBody

log = logging.getLogger(__name__)

SERVERS_SEND = "phonograph.send"
"""Among a request's extensions: `send` as the server gave it."""


class DirectSend:
    """Keeps the server's own `send` for streams: each layer of the application wraps it in another."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("extensions", {})[SERVERS_SEND] = send
        await self._app(scope, receive, send)


class EventStream(Response):
    """Sends the chunks of a call as it grows, and closes it, however it ends."""

    def __init__(self, call: Call, answer: Answer, body: GenerationBody, headers: Mapping[str, str]) -> None:
        # Proxies must neither keep the events nor wait for more of them (the second is nginx's word for it).
        streamed = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, 200, {**headers, **streamed}, "text/event-stream")
        del self.headers["content-length"]
        self._call = call
        self._answer = answer
        self._writer = ChunkWriter(answer.head)
        self._continuous_usage = body.continuous_usage
        self._include_usage = body.include_usage
        self._names = body.names()
        self._finished = False
        self._error: ApiError | None = None
        self._unsent: _Begun | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # What lies between has a part in the beginning of an answer only.
            self._send = scope.get("extensions", {}).get(SERVERS_SEND, send)
            await self._send_chunks()
            await self._send(_message(self._end(), more=False))
        finally:
            self._call.on_change = None
            self._call.close()

    async def _send_chunks(self) -> None:
        """Until the call has ended, well or not."""
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
        """Sends what the call got, unless something is on its way already."""
        if self._unsent is not None or self._finished:
            return
        try:
            changed, self._finished = self._call.take_changed(), self._call.finished
            data = self._chunks(changed)
            if data:
                self._unsent = _begin(self._send(_message(data)))
        except Exception:  # whoever takes in reports has other calls to think of
            log.exception("a chunk could not be written")
            self._finished = False
            self._call.fail(failed("the output could not be written", code="internal_error"))
        if self._unsent is not None:
            self._call.wake()

    def _chunks(self, changed: list[Sample]) -> bytes:
        usage = self._answer.usage() if self._continuous_usage else None
        write, answer = self._writer.chunk, self._answer
        return b"".join(
            [write(choice, usage) for sample in changed for choice in answer.choices(sample, sample.take())]
        )

    def _end(self) -> bytes:
        if self._error is not None:
            return error_chunk(self._error)
        return (self._writer.chunk(None, self._answer.usage()) if self._include_usage else b"") + DONE


def _message(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _begin(sending: Coroutine[Any, Any, None]) -> _Begun | None:
    """Runs it until it has to wait; None where it did not."""
    try:
        return _Begun(sending, sending.send(None))
    except StopIteration:
        return None


class _Begun:
    """A coroutine that was run until it waits, to be awaited from there on.

    awaited: what it gave to the event loop, to be called again when that is done
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
