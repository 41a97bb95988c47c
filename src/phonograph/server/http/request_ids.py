"""Ids of requests: the client's header `x-request-id`, or a new one, in every answer and in the log."""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phonograph.server.observe.logs import REQUEST_ID

HEADER = "x-request-id"
MAX_LENGTH = 200


class RequestIds:
    """Sets `REQUEST_ID` for the task of a request. Plain ASGI, so that streams pass unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = Headers(scope=scope).get(HEADER, "")
        if not name or len(name) > MAX_LENGTH or not (name.isascii() and name.isprintable()):
            name = uuid.uuid4().hex
        # Each request has a task of its own, whose context ends with it.
        REQUEST_ID.set(name)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (HEADER.encode(), name.encode())]}
            await send(message)

        await self._app(scope, receive, send_named)
