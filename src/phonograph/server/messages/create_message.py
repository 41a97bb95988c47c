"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's messages."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from phonograph.server.chat.chat_parts import ChatParts
from phonograph.server.chat.parts_stream import PartsStream
from phonograph.server.chat.prepared_chat import prepared_chat
from phonograph.server.chat.respond import respond
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import MESSAGES_ERRORS, MESSAGES_PATH
from phonograph.server.http.json_route import JsonRoute
from phonograph.server.messages.message_body import CountBody, MessageBody, message_request
from phonograph.server.messages.message_events import MessageWriter
from phonograph.server.observe.logs import REQUEST_ID
from phonograph.server.observe.warning_header import with_no_effect
from phonograph.server.openai.answers import ANSWERS

router = APIRouter(route_class=JsonRoute)


@router.post(MESSAGES_PATH, responses={**ANSWERS, **MESSAGES_ERRORS})
async def create_message(body: MessageBody, request: Request) -> Response:
    """Answer a conversation of messages with content blocks."""
    serving: Serving = request.app.state.serving
    headers = serving.admit(body)
    chat = await serving.prepare(request, lambda _: prepared_chat(serving, message_request(body)))
    streams = bool(body.stream)
    call = serving.open(request, [chat.prompt], chat.params, streams=streams, cache_salt=body.cache_salt)
    parts = ChatParts(call, serving.formats, serving.harmony, chat.tools, chat.opening)
    writer = MessageWriter(
        f"msg_{REQUEST_ID.get() or uuid.uuid4().hex}",
        serving.names[0],
        shows_thinking=body.requested_thinking().shown,
        is_cut=chat.params.max_tokens != body.max_tokens,
        short_ids=parts.short_ids,
    )
    headers = with_no_effect(headers, chat.ignored)
    return await respond(call, PartsStream(parts, writer), headers, body.names(), streams=streams)


@router.post(f"{MESSAGES_PATH}/count_tokens", response_model=dict[str, Any], responses=MESSAGES_ERRORS)
async def count_tokens(body: CountBody, request: Request) -> Response:
    """Return the number of tokens of a conversation in the model's template."""
    serving: Serving = request.app.state.serving
    headers = serving.check(body)
    token_ids = await serving.prepare(
        request, lambda _: serving.encode_chat(message_request(body), whole_context=False)
    )
    return JSONResponse({"input_tokens": len(token_ids)}, headers=headers)
