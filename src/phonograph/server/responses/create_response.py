"""POST /v1/responses: OpenAI's responses, at once, as a stream or in the background."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.process.calls import Call
from phonograph.errors import PhonographError
from phonograph.server.chat.chat_parts import ChatParts
from phonograph.server.chat.parts_stream import PartsStream
from phonograph.server.chat.prepared_chat import PreparedChat, prepared_chat
from phonograph.server.chat.respond import respond
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import ApiError, api_error, failed, invalid
from phonograph.server.http.json_route import JsonRequest, JsonRoute
from phonograph.server.observe.logs import REQUEST_ID
from phonograph.server.observe.warning_header import with_no_effect
from phonograph.server.openai.answers import ANSWERS
from phonograph.server.openai.completion_logprobs import chat_content
from phonograph.server.responses.response_body import ENCRYPTED, ResponseBody, response_request
from phonograph.server.responses.response_events import ResponseWriter
from phonograph.server.responses.response_input import input_items
from phonograph.server.responses.response_store import ResponseStore, StoredResponse

log = logging.getLogger(__name__)

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/responses", responses=ANSWERS)
async def create_response(body: ResponseBody, request: Request) -> Response:
    """Answer a conversation of input items, which may continue a stored one."""
    serving: Serving = request.app.state.serving
    store: ResponseStore = request.app.state.responses
    headers = serving.admit(body, priority=body.priority or 0)
    before, stores = _before(body, store), bool(store.most) and body.store is not False

    def prepared() -> tuple[PreparedChat, dict[str, Any]]:
        chat = prepared_chat(serving, response_request(body, serving.config, before.items))
        return chat, response_head(body, chat.params, serving.names[0])

    chat, head = await serving.prepare(request, lambda _: prepared())
    head |= {"id": store.free_id(head["id"]), "store": stores}
    assert isinstance(request, JsonRequest), "the route is a JsonRoute"
    stored = StoredResponse(head, [*before.items, *input_items(body.input)], before.num_bytes + request.num_bytes)

    def keep(response: dict[str, Any]) -> None:
        stored.end(response)
        store.put(stored)

    streams, background = bool(body.stream), bool(body.background)
    call = serving.open(
        request,
        [chat.prompt],
        chat.params,
        streams=streams,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        detached=background,
    )
    parts = ChatParts(call, serving.formats, serving.harmony, chat.tools, chat.opening)
    writer = ResponseWriter(
        head,
        seals=body.includes(ENCRYPTED),
        short_ids=parts.short_ids,
        namespaces=body.namespaces(),
        keep=keep if stores else lambda _: None,
    )
    answer = PartsStream(
        parts, writer, lambda positions: chat_content(positions, serving.texts, as_ids=False) if positions else []
    )
    headers = with_no_effect(headers, [*chat.ignored, *(["store"] if body.store and not stores else [])])
    if background:
        stored.task = asyncio.create_task(_run(call, answer, writer, stored))
        stored.task.add_done_callback(lambda _: call.close())  # also of a task that is cancelled before it begins
        stored.response = writer.unfinished("queued")
        store.put(stored)
        return JSONResponse(stored.response, headers=headers)
    return await respond(call, answer, headers, body.names(), streams=streams)


def _before(body: ResponseBody, store: ResponseStore) -> StoredResponse:
    """Return the response that a request continues, or an empty one.

    Raises:
        ApiError: it is not stored or has not ended, or the server stores nothing.
    """
    fields = {"previous_response_id": body.previous_response_id, "background": body.background}
    for name, value in fields.items():
        if value and not store.most:
            problem = f"{name} is not supported by this server: nothing is stored (max_stored_responses=0)"
            raise invalid(name, problem, code="unsupported_parameter")
    if body.previous_response_id is None:
        return StoredResponse({})
    before = store.get(body.previous_response_id, "previous_response_id")
    if before.in_progress:
        raise invalid("previous_response_id", f"the response {before.response['id']} has not ended")
    return before


async def _run(call: Call, answer: PartsStream, writer: ResponseWriter, stored: StoredResponse) -> None:
    """Make a response in the background."""
    stored.response = writer.unfinished("in_progress")
    call.name = answer.name
    try:
        await call.wait()
        answer.whole()
    except (ApiError, PhonographError) as error:
        stored.response = writer.failed(api_error(error))
    except Exception:
        log.exception("the response %s could not be made", answer.name)
        stored.response = writer.failed(failed("internal error", code="internal_error"))


def response_head(body: ResponseBody, params: SamplingParams, model: str) -> dict[str, Any]:
    """Return the fields of a response that are known before its answer.

    Raises:
        ApiError: a field that the response repeats cannot be part of an answer.
    """
    form = (body.text or {}).get("format") or {"type": "text"}
    head = {
        "id": f"resp_{body.request_id or REQUEST_ID.get() or uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "temperature": params.temperature,
        "text": {"format": form},
        "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": None,
    }
    try:
        json.dumps(head, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        problem = f"a field that the response repeats is not valid JSON in UTF-8: {error}"
        raise invalid(None, problem) from None
    return head
