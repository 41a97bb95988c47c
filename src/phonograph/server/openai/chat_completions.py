"""POST /v1/chat/completions: answers conversations through the model's chat template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from phonograph.core.batch import TokenLogprobs
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.admission import admitted_bad_words
from phonograph.engine.process.calls import Call, Delta, Sample
from phonograph.server.http.api_errors import invalid
from phonograph.server.http.json_route import JsonRoute
from phonograph.server.openai.answers import ANSWERS, answer_head, usage_of
from phonograph.server.openai.completion_logprobs import chat_content, prompt_positions
from phonograph.server.openai.harmony import HarmonyReader, check_harmony
from phonograph.server.openai.protocol import ChatBody
from phonograph.server.openai.serving import Serving, respond
from phonograph.server.openai.tool_answers import CallReader
from phonograph.server.openai.tools import ToolChoice, read_tools

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses=ANSWERS)
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    serving: Serving = request.app.state.serving
    headers = serving.admit(body, 1)
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs are not streamed; use stream=false")
    tools, prompt, params = await serving.prepare(request, lambda _: _prepared(serving, body))
    call = serving.open(request, [prompt], params, body)
    return await respond(call, ChatAnswer(serving, call, body, tools), body, headers)


def _prepared(serving: Serving, body: ChatBody) -> tuple[ToolChoice | None, list[int], SamplingParams]:
    """Return the tools, token ids and sampling parameters of a request, all checked."""
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    if serving.harmony is not None:
        check_harmony(body, tools)
    elif body.reasoning_effort not in (None, "none"):
        problem = "reasoning_effort is not supported by this server, which has no --chat-format harmony"
        raise invalid("reasoning_effort", problem, code="unsupported_parameter")
    elif tools is not None and tools.form == "parsed" and not serving.config.enable_auto_tool_choice:
        raise invalid("tool_choice", "tool_choice auto needs a server with --enable-auto-tool-choice")
    prompt = serving.encode_chat(body, tools=None if tools is None else tools.tools)
    field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    params = body.sampling_params(
        serving.defaults,
        max_tokens=serving.max_tokens([prompt], body.requested_tokens(), field=field),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_logprobs=serving.config.max_logprobs,
        structured=None if tools is None else tools.structured,
    )
    if serving.harmony is not None:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *serving.harmony.stop_token_ids))
    return tools, prompt, admitted_bad_words(params, serving.tokenizer)


class ChatAnswer:
    """Answer to a chat request."""

    def __init__(self, serving: Serving, call: Call, body: ChatBody, tools: ToolChoice | None) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self.head = answer_head("chatcmpl", kind, serving.names[0], body.request_id)
        self._serving = serving
        self._call = call
        self._body = body
        self._tools = tools
        self._begun: set[int] = set()
        self._readers: dict[int, CallReader | HarmonyReader] = {}

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": sample.index,
                "message": {"role": "assistant", **self._message(sample), "refusal": None},
                **self._rest(sample, sample.positions or []),
            }
            for sample in self._call.samples
        ]
        answer = {**self.head, "choices": choices, "usage": self.usage()}
        if self._body.prompt_logprobs is not None:
            positions = self._call.prompts[0].logprobs
            answer["prompt_logprobs"] = prompt_positions(positions, self._serving.texts, top=self._body.prompt_logprobs)
        return answer

    def usage(self) -> dict[str, Any]:
        return usage_of(self._call)

    def choices(self, sample: Sample, delta: Delta) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if sample.index not in self._begun:
            self._begun.add(sample.index)
            role = {"role": "assistant", "content": ""}
            found.append({"index": sample.index, "delta": role, "logprobs": None, "finish_reason": None})
        # Tokens without text, such as parts of a character, have chunks too: clients count and time chunks.
        content: dict[str, Any] = {"content": delta.text} if delta.text or delta.token_ids else {}
        reader = self._reader(sample)
        ended = sample.finish_reason is not None
        if isinstance(reader, HarmonyReader):
            content = reader.delta(delta.token_ids, ended=ended)
        elif reader is not None:
            content = reader.delta(delta.text, ended=ended)
        if content or (delta.logprobs and self._body.logprobs) or sample.finish_reason is not None:
            found.append({"index": sample.index, "delta": content, **self._rest(sample, delta.logprobs)})
        return found

    def _rest(self, sample: Sample, positions: list[TokenLogprobs]) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs:
            as_ids = bool(self._body.return_tokens_as_token_ids)
            logprobs = {"content": chat_content(positions, self._serving.texts, as_ids=as_ids), "refusal": None}
        reason: str | None = sample.finish_reason
        reader = self._readers.get(sample.index)
        if reason == "stop" and reader is not None and reader.has_calls:
            reason = "tool_calls"
        return {"logprobs": logprobs, "finish_reason": reason, "stop_reason": sample.stop_reason}

    def _message(self, sample: Sample) -> dict[str, Any]:
        reader = self._reader(sample)
        if isinstance(reader, HarmonyReader):
            return reader.message(sample.token_ids)
        return {"content": sample.text} if reader is None else reader.message(sample.text)

    def _reader(self, sample: Sample) -> CallReader | HarmonyReader | None:
        """Return the reader of tool calls of a sample, or of its channels; None without tools and channels."""
        harmony, tools = self._serving.harmony, self._tools
        if sample.index not in self._readers:
            if harmony is not None:
                names = () if tools is None else [tool["function"]["name"] for tool in tools.tools]
                self._readers[sample.index] = harmony.reader(names, parallel=tools is None or tools.parallel)
            elif tools is not None:
                self._readers[sample.index] = CallReader(tools, self._serving.config.tool_call_parser)
        return self._readers.get(sample.index)
