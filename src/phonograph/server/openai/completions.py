"""POST /v1/completions: continues prompts given as text or as token ids."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from phonograph.core.batch import TokenLogprobs
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.admission import admitted_bad_words
from phonograph.engine.process.calls import Call, Delta, Prompt, Sample
from phonograph.server.chat.chat_request import kept_tokens, sampling_params
from phonograph.server.chat.gap_prompts import gap_prompt, infill_form
from phonograph.server.chat.respond import respond
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import invalid
from phonograph.server.http.json_route import JsonRoute
from phonograph.server.openai.answers import ANSWERS, ChunkStream, answer_head, usage_of
from phonograph.server.openai.completion_logprobs import CompletionLogprobs, prompt_positions
from phonograph.server.openai.protocol import DEFAULT_MAX_TOKENS, CompletionBody

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", responses=ANSWERS)
async def create_completion(body: CompletionBody, request: Request) -> Response:
    """Continue one prompt or several."""
    serving: Serving = request.app.state.serving
    headers = serving.admit(body, num_prompts=len(body.prompt), n=body.n or 1, priority=body.priority or 0)
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs are not streamed; use echo with logprobs, or stream=false")
    prompts, params = await serving.prepare(
        request, lambda gone: _prepared(serving, body, gone), num_prompts=len(body.prompt)
    )
    streams = bool(body.stream)
    call = serving.open(
        request,
        prompts,
        params,
        streams=streams,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        beams=body.beams(params),
    )
    answer = ChunkStream(
        CompletionAnswer(serving, call, body), call, body, timed=serving.config.enable_per_request_metrics
    )
    return await respond(call, answer, headers, body.names(), streams=streams)


def _prepared(serving: Serving, body: CompletionBody, gone: threading.Event) -> tuple[list[list[int]], SamplingParams]:
    """Return the token ids and sampling parameters of a request, all checked."""
    requested = body.requested_tokens()
    keep = kept_tokens(
        body.truncate_prompt_tokens,
        requested,
        first=body.truncation_side == "right",
        context_len=serving.engine.facts.context_len,
    )
    if body.suffix:
        return _with_gaps(serving, body)
    prompts = serving.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False, keep=keep, gone=gone)
    if keep is not None:
        body.prompt = prompts  # for echo
    # The engine generates at least one token; with max_tokens=0 it is not shown.
    return prompts, _params(serving, body, prompts, 1 if requested == 0 else requested)


def _with_gaps(serving: Serving, body: CompletionBody) -> tuple[list[list[int]], SamplingParams]:
    """Return the token ids of prompts of which the answers come before the suffix, and the parameters."""
    prompts = [gap_prompt(serving, prompt, body.suffix or "") for prompt in body.prompt]
    params = _params(serving, body, prompts, body.requested_tokens())
    return prompts, replace(params, stop_token_ids=(*params.stop_token_ids, *infill_form(serving).ends))


def _params(serving: Serving, body: CompletionBody, prompts: list[list[int]], requested: int | None) -> SamplingParams:
    max_tokens = serving.max_tokens(prompts, requested, field=body.names().get("max_tokens", "max_tokens"))
    values = body.sampling(
        logprobs=body.logprobs, max_logprobs=serving.config.max_logprobs, scores_prompt=bool(body.echo)
    )
    params = sampling_params(serving.defaults, values, max_tokens or DEFAULT_MAX_TOKENS, body.names())
    return admitted_bad_words(params, serving.tokenizer)


class CompletionAnswer:
    """Answer to a completion request."""

    def __init__(self, serving: Serving, call: Call, body: CompletionBody) -> None:
        self.head = answer_head("cmpl", "text_completion", serving.names[0], body.request_id)
        self._serving = serving
        self._call = call
        self._body = body
        self._prompt_only = body.requested_tokens() == 0
        self._begun: set[int] = set()
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def whole(self) -> dict[str, Any]:
        choices = [choice for sample in self._call.samples for choice in self.choices(sample, sample.take())]
        return {**self.head, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        return usage_of(self._call, num_completion_tokens=0 if self._prompt_only else None)

    def choices(self, sample: Sample, delta: Delta) -> list[dict[str, Any]]:
        echoed = bool(self._body.echo) and sample.index not in self._begun
        self._begun.add(sample.index)
        if self._prompt_only:
            delta = Delta("", [], [])
        # Tokens without text, such as parts of a character, have chunks too: clients count and time chunks.
        shows = echoed or delta.text or delta.token_ids
        if not shows and sample.finish_reason is None:
            return []
        place = sample.index // (self._body.n or 1)
        prompt, source, echo = self._call.prompts[place], self._body.prompt[place], None
        if echoed:
            echo = (
                source
                if isinstance(source, str)
                else self._serving.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
            )
        # Special tokens that the tokenizer adds before the text.
        adds = isinstance(source, str) and self._body.add_special_tokens is not False
        num_before = self._serving.tokenizer.num_tokens_before if adds else 0
        choice: dict[str, Any] = {
            "index": sample.index,
            "text": (echo or "") + delta.text,
            "logprobs": self._block(sample, prompt, delta, echo, num_before),
            "finish_reason": "length" if self._prompt_only and sample.finish_reason else sample.finish_reason,
            "stop_reason": None if self._prompt_only else sample.stop_reason,
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_positions(
                prompt.logprobs, self._serving.texts, top=self._body.prompt_logprobs
            )
        return [choice]

    def _block(
        self, sample: Sample, prompt: Prompt, delta: Delta, echo: str | None, num_before: int
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        writer = self._logprobs.get(sample.index)
        if writer is None:
            writer = self._logprobs[sample.index] = CompletionLogprobs(
                self._serving.texts,
                self._serving.tokenizer,
                prompt.token_ids,
                as_ids=as_ids,
                skips_special=self._body.skip_special_tokens is not False,
            )
        if echo is None:
            return writer.block(delta.token_ids, delta.logprobs, top=self._body.logprobs)
        offsets = writer.echo(prompt.token_ids, echo, num_before=num_before)
        token_ids: list[int] = [*prompt.token_ids, *delta.token_ids]
        positions: list[TokenLogprobs | None] = [*(prompt.logprobs or ()), *delta.logprobs]
        return writer.block(token_ids, positions, top=self._body.logprobs, echoed=offsets)
