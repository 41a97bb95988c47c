"""POST /api/chat and /api/generate: Ollama's chats and prompts."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from phonograph.engine.process.calls import Call
from phonograph.server.chat.chat_parts import ChatParts
from phonograph.server.chat.chat_request import ChatRequest
from phonograph.server.chat.gap_prompts import gap_prompt, infill_form
from phonograph.server.chat.parts_stream import PartsStream
from phonograph.server.chat.prepared_chat import PreparedChat, fitted_params, prepared_chat
from phonograph.server.chat.respond import respond
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import OLLAMA_ERRORS, ApiError, invalid
from phonograph.server.http.json_route import JsonRoute
from phonograph.server.observe.logs import REQUEST_ID
from phonograph.server.observe.warning_header import with_no_effect
from phonograph.server.ollama.fitted_chat import TOO_LONG, fitted_chat, kept_room
from phonograph.server.ollama.ollama_answer import Durations, OllamaWriter
from phonograph.server.ollama.ollama_body import (
    GenerateBody,
    OllamaBody,
    OllamaChatBody,
    chat_request,
    generate_request,
)
from phonograph.server.ollama.ollama_models import named_model
from phonograph.server.openai.completion_logprobs import chat_content
from phonograph.text.formats.reasoning import Opening

router = APIRouter(route_class=JsonRoute)
LINES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer as lines, each a part of it, or at once if `stream` is false.",
        "content": {"application/json": {"schema": {"type": "object"}}, "application/x-ndjson": {}},
    },
    **OLLAMA_ERRORS,
}


@router.post("/api/chat", responses=LINES)
async def create_ollama_chat(body: OllamaChatBody, request: Request) -> Response:
    """Answer a conversation. Without messages, say that the model is loaded."""
    serving: Serving = request.app.state.serving
    name = named_model(serving, body)
    headers = serving.admit(body)
    if not body.messages:
        return _loaded(body, name, headers, {"message": {"role": "assistant", "content": ""}})
    chat = await serving.prepare(request, lambda _: _prepared_chat(serving, body))
    return await _respond(request, body, name, chat, headers, "message")


@router.post("/api/generate", responses=LINES)
async def generate(body: GenerateBody, request: Request) -> Response:
    """Answer a prompt, or continue it up to `suffix`. Without a prompt, say that the model is loaded."""
    serving: Serving = request.app.state.serving
    name = named_model(serving, body)
    headers = serving.admit(body)
    if not body.prompt and not body.suffix:
        return _loaded(body, name, headers, {"response": ""})
    prepared = _prepared_text if body.raw or body.suffix else _prepared_prompt
    chat = await serving.prepare(request, lambda _: prepared(serving, body))
    return await _respond(request, body, name, chat, headers, "response")


def _prepared_chat(serving: Serving, body: OllamaChatBody) -> PreparedChat:
    if body.tools and serving.harmony is None and serving.formats.tools is None:
        problem = "tools need the form of the model's calls, which its chat template does not show; start the server "
        raise invalid("tools", problem + "with --tool-call-parser")
    return _fitted(serving, body, chat_request(body, serving.config))


def _prepared_prompt(serving: Serving, body: GenerateBody) -> PreparedChat:
    return _fitted(serving, body, generate_request(body, serving.config))


def _fitted(serving: Serving, body: OllamaBody, request: ChatRequest) -> PreparedChat:
    """Return a request that fits its context, which `options.num_ctx` makes smaller than the engine's."""
    context, ignored = body.context(serving.engine.facts.context_len)
    chat = None
    try:
        chat = prepared_chat(serving, request)
    except ApiError as error:
        if error.code != TOO_LONG or body.truncate is False:
            raise
    if chat is None or (len(chat.prompt) >= context and body.truncate is not False):
        chat = prepared_chat(serving, fitted_chat(serving, request, context))
    return _within(chat, context, ignored, request.name("messages"))


def _within(chat: PreparedChat, context: int, ignored: tuple[str, ...], field: str) -> PreparedChat:
    """Return a request whose answer ends with its context.

    Raises:
        ApiError: the prompt leaves no room for an answer.
    """
    room = context - len(chat.prompt)
    if room < 1:
        problem = f"{field} has {len(chat.prompt)} tokens; options.num_ctx={context} holds prompt and answer together"
        raise invalid(field, f"{problem}: shorten it, or leave out truncate=false", code=TOO_LONG)
    requested = chat.params.max_tokens
    params = replace(chat.params, max_tokens=room if requested is None else min(requested, room))
    return chat._replace(params=params, ignored=(*chat.ignored, *ignored))


def _prepared_text(serving: Serving, body: GenerateBody) -> PreparedChat:
    """Return a prompt that the model continues as it stands, or up to the suffix."""
    text = body.prompt or ""
    context, ignored = body.context(serving.engine.facts.context_len)
    if body.suffix:
        prompt = gap_prompt(serving, text, body.suffix)
    else:
        cuts = body.truncate is not False
        prompt = serving.encode_text(text, add_special_tokens=True, cuts=cuts)
        if cuts and len(prompt) >= context:
            prompt = prompt[-max(context - kept_room(body.max_tokens(), context), 1) :]
    params = fitted_params(serving, prompt, body.sampling(serving.config), body.max_tokens(), body.names(), cuts=True)
    if body.suffix:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *infill_form(serving).ends))
    field = "suffix" if body.suffix else "prompt"
    return _within(PreparedChat(prompt, params, None, Opening.OUTSIDE), context, ignored, field)


async def _respond(
    request: Request,
    body: OllamaBody,
    name: str,
    chat: PreparedChat,
    headers: dict[str, str],
    form: Literal["message", "response"],
) -> Response:
    serving: Serving = request.app.state.serving
    call = serving.open(request, [chat.prompt], chat.params, streams=body.streams)
    parts = ChatParts(call, serving.formats, serving.harmony, chat.tools, chat.opening)
    writer = OllamaWriter(
        REQUEST_ID.get() or uuid.uuid4().hex, name, form, lambda: _durations(call), short_ids=parts.short_ids
    )
    answer = PartsStream(
        parts, writer, lambda positions: chat_content(positions, serving.texts, as_ids=False) if positions else []
    )
    headers = with_no_effect(headers, chat.ignored)
    return await respond(call, answer, headers, body.names(), streams=body.streams)


def _durations(call: Call) -> Durations:
    (sample,), began = call.samples, call.prompts[0].opened
    first = sample.first_token or began
    last = sample.last_token or first
    return Durations(time.monotonic() - began, first - began, last - first)


def _loaded(body: OllamaBody, name: str, headers: dict[str, str], parts: dict[str, Any]) -> Response:
    """Answer a request that only loads the model.

    Raises:
        ApiError: it asks to unload the model.
    """
    if body.keep_alive in (0, "0", "0s", "0m"):
        raise invalid(
            "keep_alive", "keep_alive=0 unloads the model at Ollama; this server has it until the server ends"
        )
    return JSONResponse({"model": name, **parts, "done": True, "done_reason": "load"}, headers=headers)
