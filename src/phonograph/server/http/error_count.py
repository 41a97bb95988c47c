"""Counts of requests that ended with an error, for the page at /."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phonograph.server.http.api_errors import CLIENT_GONE

ERRORS = "phonograph.errors"
"""Key of the counts among the extensions of a request."""


class ErrorCounts:
    """Counts since the start.

    rejected: requests for which a queue had no room, by the limit in vLLM's or this server's words
    refused: requests that were wrong or too many (4xx)
    failed:  requests that the server or its engine failed to answer (5xx), also after their stream had begun
    """

    def __init__(self) -> None:
        self.rejected = {"max_num_queued_reqs": 0, "max_queued_bytes": 0}
        self.refused = 0
        self.failed = 0

    def add(self, status: int) -> None:
        """Count an answer; a client that has disconnected does not count."""
        if status >= 500:
            self.failed += 1
        elif status >= 400 and status != CLIENT_GONE:
            self.refused += 1


class ErrorCount:
    """Counts the error answers to requests with a body. Plain ASGI; of a stream it sees the start only."""

    def __init__(self, app: ASGIApp, counts: ErrorCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        scope.setdefault("extensions", {})[ERRORS] = self._counts

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts.add(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            # Starlette answers 500 outside of all middleware.
            self._counts.add(500)
            raise
