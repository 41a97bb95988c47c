"""Answers the requests of a batch file with an engine of its own, through the endpoints of a server and no socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.engine.process.client import StartProgress
from phonograph.server.batch.batch_file import BatchRequest, answer_line
from phonograph.server.http.api_errors import invalid
from phonograph.server.http.application import make_app
from phonograph.server.http.request_ids import HEADER
from phonograph.server.http.run import checked_template, started_server

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/pooling"),
    *("/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v2/embed"),
)
"""Endpoints of a batch."""
FULL = 429
RETRY_SECONDS = 0.2

App = Callable[[Any, Any, Any], Awaitable[None]]


def run_batch(
    engine: EngineConfig,
    server: ServerConfig,
    requests: Sequence[BatchRequest],
    progress: StartProgress,
    answered: Callable[[str, int], None],
) -> None:
    """Answer requests, and call `answered` with each line and its status, in the order of the requests.

    Raises:
        PhonographError: the engine could not start.
    """
    asyncio.run(_run(engine, server, requests, progress, answered))


async def _run(
    engine: EngineConfig,
    server: ServerConfig,
    requests: Sequence[BatchRequest],
    progress: StartProgress,
    answered: Callable[[str, int], None],
) -> None:
    template = checked_template(engine, server)
    async with started_server(engine, server, template, progress) as serving:
        app = make_app(serving)
        # Enough to fill every step while others are prepared.
        room = asyncio.Semaphore(2 * serving.engine.facts.max_num_seqs)

        async def answer(request: BatchRequest) -> tuple[str, int]:
            if request.problem is not None:
                error = invalid(None, request.problem)
                return answer_line(request, error.status, "", json.dumps(error.body()).encode()), error.status
            async with room:
                status, headers, body = await post(app, request.url, request.body)
                while status == FULL:
                    await asyncio.sleep(RETRY_SECONDS)
                    status, headers, body = await post(app, request.url, request.body)
            return answer_line(request, status, headers.get(HEADER, ""), body), status

        tasks = [asyncio.create_task(answer(request)) for request in requests]
        try:
            for task in tasks:
                answered(*await task)
        finally:
            for task in tasks:
                task.cancel()


async def post(app: App, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of an answer of an ASGI application."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
    }
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    status, headers, pieces = 500, dict[str, str](), list[bytes]()

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            # The client of a batch does not leave.
            await asyncio.Event().wait()
            raise AssertionError
        return message

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update((name.decode(), value.decode("latin-1")) for name, value in message["headers"])
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, b"".join(pieces)
