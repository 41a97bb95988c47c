"""Limits on the bytes, contents and time of request bodies, enforced while they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phonograph.config.server_config import ServerConfig
from phonograph.server.http.api_errors import ApiError, queue_full
from phonograph.server.http.api_keys import error_response
from phonograph.server.http.error_count import ERRORS
from phonograph.server.http.json_meter import PIECE, JsonMeter

BYTES_PER_SECOND = 131_072
"""Minimum rate of a body, in addition to `body_timeout`."""
FORM_PATHS = ("/audio/transcriptions", "/audio/translations")
"""Ends of the paths whose bodies are forms."""
LINGER_SECONDS = 5.0
"""Time in which the rest of a refused body is read and dropped.

Closing a connection while its client sends resets it, and the client would not see the answer.
"""


class BodyGuard:
    """Reads the whole body, or refuses it, before the application sees the request. Plain ASGI."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        body = _Body(self._count)
        try:
            await self._read(body, scope, receive)
        except ApiError as error:
            body.release()
            await _refuse(error, body, scope, receive, send)
            return
        try:
            if not body.abandoned:
                await self._app(scope, body.replay(receive), body.released_by(send))
        finally:
            body.release()

    def _count(self, num_bytes: int) -> int:
        self._num_bytes += num_bytes
        return self._num_bytes

    async def _read(self, body: _Body, scope: Scope, receive: Receive) -> None:
        """Read the body to its end.

        Raises:
            ApiError: the body is too large, holds too many items or is too slow, or too many bytes of bodies are
                queued.
        """
        most = self._config.max_request_bytes
        too_large = ApiError(413, f"the body has more than {most} bytes (max_request_bytes)", code="body_too_large")
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            raise too_large
        # A form has bytes of a recording, which are no JSON; its endpoint counts its fields.
        meter = None if scope["path"].endswith(FORM_PATHS) else JsonMeter(self._config)
        began = asyncio.get_running_loop().time()
        while not body.complete:
            seconds = self._config.body_timeout + body.num_bytes / BYTES_PER_SECOND
            try:
                async with asyncio.timeout_at(began + seconds):
                    piece = body.take(await receive())
            except TimeoutError:
                problem = f"only {body.num_bytes} bytes of the body arrived in {seconds:.1f} s (body_timeout)"
                raise ApiError(408, problem, code="timeout") from None
            if body.num_bytes > most:
                raise too_large
            if self._num_bytes > self._config.max_queued_bytes:
                if counts := scope.get("extensions", {}).get(ERRORS):
                    counts.rejected["max_queued_bytes"] += 1
                raise queue_full(
                    f"more than {self._config.max_queued_bytes} bytes of bodies are queued (max_queued_bytes)"
                )
            if meter is None:
                continue
            for start in range(0, len(piece), PIECE):
                if start:
                    await asyncio.sleep(0)
                meter.check(piece[start : start + PIECE])


class _Body:
    """The pieces of one body.

    count:     adds to the queued bytes of all bodies, and returns their sum
    complete:  the body has ended, or its client has disconnected
    abandoned: its client has disconnected
    """

    def __init__(self, count: Callable[[int], int]) -> None:
        self.num_bytes = 0
        self.complete = self.abandoned = False
        self._count = count
        self._num_counted = 0
        self._pieces: list[bytes] = []

    def take(self, message: Message) -> bytes:
        """Add a received piece and return it."""
        self.abandoned = message["type"] == "http.disconnect"
        self.complete = self.abandoned or not message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        self._pieces.append(piece)
        self.num_bytes += len(piece)
        self._num_counted += len(piece)
        self._count(len(piece))
        return piece

    def release(self) -> None:
        """Remove the body from the queued bytes."""
        self._count(-self._num_counted)
        self._num_counted = 0
        self._pieces.clear()

    def replay(self, receive: Receive) -> Receive:
        """Return a `receive` that yields the body once, and then what follows it."""

        async def replayed() -> Message:
            if not self._pieces:
                return await receive()
            body = b"".join(self._pieces)
            self._pieces.clear()
            return {"type": "http.request", "body": body, "more_body": False}

        return replayed

    def released_by(self, send: Send) -> Send:
        """Return a `send` that releases the body when the answer begins."""

        async def sent(message: Message) -> None:
            self.release()
            await send(message)

        return sent


async def _refuse(error: ApiError, body: _Body, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the error at once, and end the response after the rest of the body has arrived."""

    async def send_open(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await error_response(error, {"connection": "close"}, path=scope["path"])(scope, receive, send_open)
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while not body.complete:
                body.take(await receive())
                body.release()
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
