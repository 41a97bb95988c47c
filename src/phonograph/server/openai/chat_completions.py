"""POST /v1/chat/completions: answers conversations through the model's chat template."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from phonograph.core.batch import TokenLogprobs
from phonograph.engine.process.calls import Delta, Sample
from phonograph.server.chat.chat_parts import ChatParts
from phonograph.server.chat.conversation import read_messages
from phonograph.server.chat.prepared_chat import prepared_chat
from phonograph.server.chat.respond import respond
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import invalid
from phonograph.server.http.json_meter import JsonMeter
from phonograph.server.http.json_route import JsonRoute
from phonograph.server.observe.warning_header import with_no_effect
from phonograph.server.openai.answers import ANSWERS, ChunkStream, answer_head, usage_of
from phonograph.server.openai.chat_message import delta_of, message_of
from phonograph.server.openai.chat_translation import chat_request
from phonograph.server.openai.completion_logprobs import chat_content, prompt_positions
from phonograph.server.openai.protocol import ChatBody

router = APIRouter(route_class=JsonRoute)
_KEYS = {"both": ("reasoning", "reasoning_content")}
"""Keys of reasoning by the setting reasoning_key, where it is not the name of one."""


@router.post("/v1/chat/completions", responses=ANSWERS)
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    serving: Serving = request.app.state.serving
    headers = serving.admit(body, n=body.n or 1, priority=body.priority or 0)
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs are not streamed; use stream=false")
    prepared = await serving.prepare(request, lambda _: prepared_chat(serving, chat_request(body, serving.config)))
    streams = bool(body.stream)
    call = serving.open(
        request,
        [prepared.prompt],
        prepared.params,
        streams=streams,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        beams=body.beams(prepared.params),
    )
    parts = ChatParts(call, serving.formats, serving.harmony, prepared.tools, prepared.opening)
    answer = ChunkStream(ChatAnswer(serving, parts, body), call, body, timed=serving.config.enable_per_request_metrics)
    headers = with_no_effect(headers, prepared.ignored)
    return await respond(call, answer, headers, body.names(), streams=streams)


class ChatAnswer:
    """Answer to a chat request."""

    def __init__(self, serving: Serving, parts: ChatParts, body: ChatBody) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self.head = answer_head("chatcmpl", kind, serving.names[0], body.request_id)
        self._serving = serving
        self._parts = parts
        self._body = body
        self._begun: set[int] = set()
        self._echo = ""
        if body.echo and body.messages[-1].get("role") == "assistant":
            (last,) = read_messages(body.messages[-1:], JsonMeter(serving.config))
            self._echo = last["content"] or ""
        self._keys = _KEYS.get(serving.config.reasoning_key, (serving.config.reasoning_key,))

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": sample.index,
                "message": {"role": "assistant", **self._message(sample), "refusal": None},
                **self._rest(sample, sample.positions or []),
            }
            for sample in self._parts.call.samples
        ]
        answer = {**self.head, "choices": choices, "usage": self.usage()}
        if self._body.prompt_logprobs is not None:
            positions = self._parts.call.prompts[0].logprobs
            answer["prompt_logprobs"] = prompt_positions(positions, self._serving.texts, top=self._body.prompt_logprobs)
        return answer

    def usage(self) -> dict[str, Any]:
        usage = usage_of(self._parts.call)
        num_tokens = self._parts.num_reasoning_tokens()
        if num_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return usage

    def choices(self, sample: Sample, delta: Delta) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = []
        if sample.index not in self._begun:
            self._begun.add(sample.index)
            role = {"role": "assistant", "content": self._echo}
            choices.append({"index": sample.index, "delta": role, "logprobs": None, "finish_reason": None})
        found = self._parts.found(sample, delta)
        # Tokens without text, such as parts of a character, have chunks too: clients count and time chunks.
        has_chunk = bool(delta.text or delta.token_ids)
        if found is None:
            content: dict[str, Any] = {"content": delta.text} if has_chunk else {}
        else:
            content = self._keyed(delta_of(found, short_ids=self._parts.short_ids))
            if not content and has_chunk and self._counts_chunks:
                content = {"content": ""}
        if content or (delta.logprobs and self._body.logprobs) or sample.finish_reason is not None:
            choices.append({"index": sample.index, "delta": content, **self._rest(sample, delta.logprobs)})
        return choices

    @property
    def _counts_chunks(self) -> bool:
        """True if tokens without parts to show have chunks: not while they may be part of a call."""
        return self._parts.tools is None and self._serving.harmony is None

    def _rest(self, sample: Sample, positions: list[TokenLogprobs]) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs:
            as_ids, listed = bool(self._body.return_tokens_as_token_ids), bool(self._body.logprob_token_ids)
            content = chat_content(positions, self._serving.texts, as_ids=as_ids, listed=listed)
            logprobs = {"content": content, "refusal": None}
        reason: str | None = sample.finish_reason
        if reason == "stop" and self._parts.has_calls(sample):
            reason = "tool_calls"
        return {"logprobs": logprobs, "finish_reason": reason, "stop_reason": sample.stop_reason}

    def _message(self, sample: Sample) -> dict[str, Any]:
        message = self._keyed(message_of(self._parts.whole(sample), short_ids=self._parts.short_ids))
        if self._serving.formats.reasoning is not None:  # null without, so that clients can read it
            message = {**dict.fromkeys(self._keys), **message}
        return {**message, "content": self._echo + (message["content"] or "")} if self._echo else message

    def _keyed(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the parts of a message or delta with their reasoning by the configured keys."""
        reasoning = parts.pop("reasoning_content", None)
        if reasoning is None or self._body.include_reasoning is False:
            return parts
        return {**dict.fromkeys(self._keys, reasoning), **parts}
