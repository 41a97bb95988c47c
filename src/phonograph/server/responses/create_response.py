"""POST /v1/responses: OpenAI's responses, without a store."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from phonograph.core.sampling_params import SamplingParams
from phonograph.server.chat.chat_parts import ChatParts
from phonograph.server.chat.parts_stream import PartsStream
from phonograph.server.chat.prepared_chat import PreparedChat, prepared_chat
from phonograph.server.chat.respond import respond
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import invalid
from phonograph.server.http.json_route import JsonRoute
from phonograph.server.observe.logs import REQUEST_ID
from phonograph.server.observe.warning_header import with_no_effect
from phonograph.server.openai.answers import ANSWERS
from phonograph.server.openai.completion_logprobs import chat_content
from phonograph.server.responses.response_body import ENCRYPTED, ResponseBody, response_request
from phonograph.server.responses.response_events import ResponseWriter

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/responses", responses=ANSWERS)
async def create_response(body: ResponseBody, request: Request) -> Response:
    """Answer a conversation of input items. Nothing is stored, so that each request has the whole conversation."""
    serving: Serving = request.app.state.serving
    headers = serving.admit(body, priority=body.priority or 0)

    def prepared() -> tuple[PreparedChat, dict[str, Any]]:
        chat = prepared_chat(serving, response_request(body, serving.config))
        return chat, response_head(body, chat.params, serving.names[0])

    chat, head = await serving.prepare(request, lambda _: prepared())
    streams = bool(body.stream)
    call = serving.open(
        request, [chat.prompt], chat.params, streams=streams, priority=body.priority or 0, cache_salt=body.cache_salt
    )
    parts = ChatParts(call, serving.formats, serving.harmony, chat.tools, chat.opening)
    writer = ResponseWriter(
        head, seals=body.includes(ENCRYPTED), short_ids=parts.short_ids, namespaces=body.namespaces()
    )
    answer = PartsStream(
        parts, writer, lambda positions: chat_content(positions, serving.texts, as_ids=False) if positions else []
    )
    headers = with_no_effect(headers, chat.ignored)
    return await respond(call, answer, headers, body.names(), streams=streams)


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
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "store": False,
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
