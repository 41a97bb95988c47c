"""Responses in memory, for GET, DELETE and cancel of /v1/responses/{id}, and for `previous_response_id`.

The store keeps the latest responses, up to a number and to a number of bytes. A restart forgets them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from pydantic_core import to_json
from starlette.responses import JSONResponse, Response

from phonograph.errors import quoted
from phonograph.server.http.api_errors import ApiError, invalid

router = APIRouter()

MAX_STORED_BYTES = 64 * 2**20
"""Maximum bytes of stored responses. The conversation before a response counts for each response that follows it."""


@dataclass(slots=True)
class StoredResponse:
    """A response and its conversation.

    response:  fields of the response, as clients get them
    items:     input items of the conversation, with the output of the response when it has ended
    num_bytes: size of the conversation in JSON
    task:      makes a response in the background; None for others
    """

    response: dict[str, Any]
    items: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    num_bytes: int = 0
    task: asyncio.Task[None] | None = None

    @property
    def in_progress(self) -> bool:
        """True until a response in the background has ended."""
        return self.task is not None and not self.task.done()

    def end(self, response: dict[str, Any]) -> None:
        """Set the response that has ended, and continue its conversation with it."""
        self.response = response
        self.items = [*self.items, *response["output"]]
        self.num_bytes += len(to_json(response))


class ResponseStore:
    """The latest responses of a server.

    Args:
        most: maximum number of responses; 0 stores none.
        max_bytes: maximum of their sizes together.
    """

    def __init__(self, most: int, max_bytes: int = MAX_STORED_BYTES) -> None:
        self.most = most
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def free_id(self, name: str) -> str:
        """Return the id of a new response: `name`, unless a stored response has it."""
        return f"resp_{uuid.uuid4().hex}" if name in self._stored else name

    def put(self, stored: StoredResponse) -> None:
        """Store a response, and forget the oldest ones that exceed a limit. Those in progress stay."""
        self._stored[stored.response["id"]] = stored
        num_bytes = sum(one.num_bytes for one in self._stored.values())
        for name, one in list(self._stored.items()):
            if len(self._stored) <= self.most and num_bytes <= self._max_bytes:
                break
            if not one.in_progress:
                del self._stored[name]
                num_bytes -= one.num_bytes

    def get(self, name: str, param: str | None = None) -> StoredResponse:
        """Return a response, which becomes the latest one.

        Args:
            name: its id.
            param: field of the request that has the id.

        Raises:
            ApiError: it is not stored.
        """
        if name not in self._stored:
            problem = f"Response with id {quoted(name)} not found."
            hint = f" The server keeps the latest {self.most} (max_stored_responses), and none with store=false."
            raise ApiError(404, problem + hint, param=param, code="response_not_found")
        self._stored.move_to_end(name)
        return self._stored[name]

    def delete(self, name: str) -> None:
        """Forget a response, which ends if it is in progress.

        Raises:
            ApiError: it is not stored.
        """
        stored = self.get(name)
        del self._stored[name]
        if stored.task is not None:
            stored.task.cancel()


@router.get("/v1/responses/{name}", response_model=dict[str, Any])
async def retrieve_response(name: str, request: Request, stream: bool = False) -> Response:
    """Return a stored response."""
    if stream:
        raise invalid("stream", "stream: events are not stored; the response is returned at once")
    return JSONResponse(_store(request).get(name).response)


@router.delete("/v1/responses/{name}", response_model=dict[str, Any])
async def delete_response(name: str, request: Request) -> Response:
    """Forget a stored response."""
    _store(request).delete(name)
    return JSONResponse({"id": name, "object": "response", "deleted": True})


@router.post("/v1/responses/{name}/cancel", response_model=dict[str, Any])
async def cancel_response(name: str, request: Request) -> Response:
    """End a response in the background."""
    stored = _store(request).get(name)
    if stored.task is None:
        raise invalid("background", "Cannot cancel a synchronous response.")
    if stored.in_progress:
        stored.task.cancel()
        stored.response = {**stored.response, "status": "cancelled"}
    return JSONResponse(stored.response)


def _store(request: Request) -> ResponseStore:
    return request.app.state.responses
