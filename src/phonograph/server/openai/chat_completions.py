"""POST /v1/chat/completions: answers conversations through the model's chat template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from phonograph.core.batch import TokenLogprobs
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.admission import admitted_bad_words
from phonograph.engine.process.calls import Call, Delta, Sample
from phonograph.errors import RequestError
from phonograph.server.chat.answer_reader import AnswerReader
from phonograph.server.chat.harmony import HarmonyReader, check_harmony
from phonograph.server.chat.serving import Serving, respond
from phonograph.server.chat.thinking import reasoning_opening, with_formats
from phonograph.server.chat.tools import ToolChoice, read_tools
from phonograph.server.http.api_errors import api_error, invalid
from phonograph.server.http.json_route import JsonRoute
from phonograph.server.openai.answers import ANSWERS, answer_head, usage_of
from phonograph.server.openai.completion_logprobs import chat_content, prompt_positions
from phonograph.server.openai.protocol import ChatBody
from phonograph.text.formats.reasoning import Opening, ReasoningReader, ReasoningTokens

router = APIRouter(route_class=JsonRoute)
_KEYS = {"both": ("reasoning", "reasoning_content")}
"""Keys of reasoning by the setting reasoning_key, where it is not the name of one."""


class _Prepared(NamedTuple):
    """A request whose fields are checked.

    opening: state of the answer at its beginning
    """

    tools: ToolChoice | None
    prompt: list[int]
    params: SamplingParams
    opening: Opening


@router.post("/v1/chat/completions", responses=ANSWERS)
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    serving: Serving = request.app.state.serving
    headers = serving.admit(body, 1)
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs are not streamed; use stream=false")
    prepared = await serving.prepare(request, lambda _: _prepared(serving, body))
    call = serving.open(request, [prepared.prompt], prepared.params, body)
    return await respond(call, ChatAnswer(serving, call, body, prepared.tools, opening=prepared.opening), body, headers)


def _prepared(serving: Serving, body: ChatBody) -> _Prepared:
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    if serving.harmony is not None:
        check_harmony(body, tools)
    elif tools is not None and tools.form == "parsed" and serving.formats.tools is None:
        raise invalid("tool_choice", _no_calls(serving))
    prompt = serving.encode_chat(body, tools=None if tools is None else tools.tools)
    field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    params = body.sampling_params(
        serving.defaults,
        max_tokens=serving.max_tokens([prompt], body.requested_tokens(), field=field),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_logprobs=serving.config.max_logprobs,
        structured=None if tools is None else tools.structured,
    )
    params = admitted_bad_words(params, serving.tokenizer)
    opening = reasoning_opening(body, serving.formats, serving.tokenizer, prompt)
    if serving.harmony is not None:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *serving.harmony.stop_token_ids))
        return _Prepared(tools, prompt, params, opening)
    formats = serving.formats
    if tools is None or tools.form != "parsed":
        formats = replace(formats, tools=None)
    try:
        params = with_formats(params, body, formats, opening, serving.tokenizer)
    except RequestError as error:
        raise api_error(error) from None
    return _Prepared(tools, prompt, params, opening)


def _no_calls(serving: Serving) -> str:
    """Return the reason why calls cannot be left to the model."""
    if serving.config.enable_auto_tool_choice:
        problem = "tool_choice auto needs the form of the model's calls, which its chat template does not show; start "
        return f"{problem}the server with --tool-call-parser, or use tool_choice required"
    return "tool_choice auto is turned off by --no-enable-auto-tool-choice; required and a named function work"


class ChatAnswer:
    """Answer to a chat request. `opening` is the state in which it begins."""

    def __init__(
        self,
        serving: Serving,
        call: Call,
        body: ChatBody,
        tools: ToolChoice | None,
        *,
        opening: Opening = Opening.OUTSIDE,
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self.head = answer_head("chatcmpl", kind, serving.names[0], body.request_id)
        self._serving = serving
        self._call = call
        self._body = body
        self._tools = tools
        self._opening = opening
        self._begun: set[int] = set()
        self._readers: dict[int, AnswerReader | HarmonyReader] = {}
        self._reasoning: dict[int, ReasoningTokens] = {}
        self._keys = _KEYS.get(serving.config.reasoning_key, (serving.config.reasoning_key,))

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
        usage = usage_of(self._call)
        form = None if self._serving.harmony is not None else self._serving.formats.reasoning
        if form is not None:
            for sample in self._call.samples:
                self._reasoning.setdefault(sample.index, ReasoningTokens(form, self._opening))
            num_tokens = sum(self._reasoning[sample.index].count(sample.token_ids) for sample in self._call.samples)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return usage

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
            content = self._keyed(reader.delta(delta.token_ids, ended=ended))
        elif reader is not None:
            found_parts = self._keyed(reader.delta(delta.text, ended=ended))
            content = found_parts or ({"content": ""} if content and self._tools is None else {})
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
            return self._keyed(reader.message(sample.token_ids))
        return {"content": sample.text} if reader is None else self._keyed(reader.message(sample.text))

    def _keyed(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the parts of a message or delta with their reasoning by the configured keys."""
        reasoning = parts.pop("reasoning_content", None)
        if reasoning is None or self._body.include_reasoning is False:
            return parts
        return {**dict.fromkeys(self._keys, reasoning), **parts}

    def _reader(self, sample: Sample) -> AnswerReader | HarmonyReader | None:
        """Return the reader of a sample; None if its text is its content."""
        harmony, tools = self._serving.harmony, self._tools
        if sample.index not in self._readers:
            if harmony is not None:
                names = () if tools is None else [tool["function"]["name"] for tool in tools.tools]
                self._readers[sample.index] = harmony.reader(names, parallel=tools is None or tools.parallel)
            else:
                formats = self._serving.formats
                reasoning = None
                if formats.reasoning is not None and self._opening is not Opening.OUTSIDE:
                    reasoning = ReasoningReader(formats.reasoning, self._opening)
                if tools is not None or reasoning is not None:
                    self._readers[sample.index] = AnswerReader(tools, formats.tools, reasoning)
        return self._readers.get(sample.index)
