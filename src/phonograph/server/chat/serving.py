"""Common work of all endpoints: admission, tokenization, and opening calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from prometheus_client import CollectorRegistry, ProcessCollector

from phonograph.config.server_config import ServerConfig
from phonograph.core.beam_search_params import BeamSearchParams
from phonograph.core.pooling_params import PoolingParams
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.admission import admitted_token_ids
from phonograph.engine.async_llm import AsyncLLM
from phonograph.engine.process.beam_call import open_beams
from phonograph.engine.process.calls import Call
from phonograph.errors import EngineUnavailable, RequestError, counted, quoted
from phonograph.server.chat.chat_request import ChatRequest, kept_tokens
from phonograph.server.chat.conversation import Message, rendered
from phonograph.server.chat.fields import Body
from phonograph.server.chat.harmony import HARMONY_FORMATS, MOST_CHARACTERS, Harmony
from phonograph.server.chat.thinking import template_options
from phonograph.server.http.api_errors import ApiError, api_error, client_gone, invalid, queue_full
from phonograph.server.http.error_count import ErrorCounts
from phonograph.server.http.json_route import INLINE_BYTES, JsonRequest, until_gone
from phonograph.server.observe.logs import route_path
from phonograph.server.observe.metrics import EngineCollector
from phonograph.server.observe.request_lines import log_request
from phonograph.server.observe.traces import Traces
from phonograph.server.observe.warning_header import field_warnings
from phonograph.server.pooling.check_task import check_task
from phonograph.text.formats.find_formats import Formats, find_formats
from phonograph.text.formats.template_variables import template_variables
from phonograph.text.token_texts import TokenTexts
from phonograph.text.tokenizer import Tokenizer

THREADS = 2
"""Threads that prepare large requests. The limit on queued body bytes bounds the requests that wait for one."""
INLINE_PROMPTS = 32
"""Prompts of a request that are tokenized on the event loop, if its body is small; a thread does more."""
USUAL_CHARACTERS = 8
"""Characters per token that few texts exceed on average."""
Result = TypeVar("Result")


@dataclass(slots=True)
class Serving:
    """One server: an engine with the server's configuration.

    root:          name of the model in the engine's configuration
    defaults:      sampling parameters of the model
    chat_template: replaces the model's template
    harmony:       format of chats in place of templates, or None
    formats:       formats of reasoning and calls in the model's answers
    variables:     variables that the chat template reads, or None if they are unknown
    errors:        counts of error answers
    traces:        makes a trace of each request, or None
    started:       start time in seconds since the epoch
    """

    engine: AsyncLLM
    config: ServerConfig
    root: str
    defaults: Mapping[str, Any]
    chat_template: str | None
    harmony: Harmony | None = None
    texts: TokenTexts = field(init=False)
    formats: Formats = field(init=False)
    variables: frozenset[str] | None = field(init=False)
    registry: CollectorRegistry = field(init=False)
    errors: ErrorCounts = field(default_factory=ErrorCounts)
    traces: Traces | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(THREADS, "tokenizer"))

    def __post_init__(self) -> None:
        self.texts = self.tokenizer.texts
        if self.config.max_logprobs >= self.engine.facts.vocab_size:
            self.config = self.config.model_copy(update={"max_logprobs": -1})
        template = self.chat_template or self.tokenizer.template_text
        self.variables = None if template is None else template_variables(template)
        self.formats = (
            HARMONY_FORMATS
            if self.harmony is not None
            else find_formats(
                self.tokenizer,
                template,
                reasoning_parser=self.config.reasoning_parser,
                tool_call_parser=self.config.tool_call_parser,
                finds_tools=self.config.enable_auto_tool_choice,
            )
        )
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(self.engine, self.names[0], self.errors.rejected))
        ProcessCollector(registry=self.registry)

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.engine.tokenizer is not None, "a server does not start without a tokenizer"
        return self.engine.tokenizer

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model for clients. Answers have the first."""
        return self.config.served_model_name or (self.root,)

    def check(self, body: Body) -> dict[str, str]:
        """Check the fields of a request; return headers that list those without effect.

        Raises:
            ApiError: a field is wrong or not supported, or the request names another model.
        """
        dropped = body.drop_unknown() if self.config.unknown_fields == "warn" else []
        ignored = body.check()
        body.complete(self.config)
        thinking = body.requested_thinking()
        if thinking is not None and self.harmony is None:
            ignored += template_options(thinking, self.variables, self.formats)[1]
        if body.model is not None and body.model not in self.names:
            problem = f"the model {quoted(body.model)} does not exist; this server has {', '.join(self.names)}"
            raise ApiError(404, problem, param="model", code="model_not_found")
        return field_warnings(ignored, dropped)

    def admit(
        self, body: Body, *, num_prompts: int = 1, n: int = 1, priority: int = 0, pooled: str | None = None
    ) -> dict[str, str]:
        """Check a request before any work for it; return headers of its answer.

        Args:
            body: fields of the request.
            num_prompts: prompts of the request.
            n: samples of each prompt.
            priority: place in the queue.
            pooled: field with the prompts of a request that generates nothing; None if it generates.

        Raises:
            ApiError: the request is wrong or not supported, or too many requests are in progress.
        """
        headers = self.check(body)
        engine, facts = self.engine, self.engine.facts
        if engine.problem is not None:
            raise api_error(engine.problem)
        check_task(facts, pools=pooled is not None)
        if priority and facts.scheduling_policy != "priority":
            raise invalid("priority", f"priority={priority}: the server runs without --scheduling-policy priority")
        room = facts.max_num_seqs + self.config.max_queued_requests
        count = num_prompts * n
        if count > room:
            problem = f"{count} samples; this server takes {room} at most (max_num_seqs + max_queued_requests)"
            raise invalid(pooled or ("n" if num_prompts == 1 else "prompt"), problem)
        if engine.num_open + count > room:
            self.errors.rejected["max_num_queued_reqs"] += 1
            problem = f"{counted(engine.num_open, 'sample')} in progress or queued; this server takes {room} at most"
            raise queue_full(problem)
        return headers

    def check_token_ids(self, body: Any) -> None:
        """Check the length of a prompt of token ids in a body that is not validated yet.

        Raises:
            ApiError: it is longer than the context.
        """
        prompt = body.get("prompt") if isinstance(body, dict) and not body.get("truncate_prompt_tokens") else None
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            self._check_length("prompt", len(prompt), self.engine.facts.context_len)

    def encode(
        self,
        prompts: Sequence[str | list[int]],
        *,
        add_special_tokens: bool,
        keep: slice | None = None,
        gone: threading.Event | None = None,
    ) -> list[list[int]]:
        """Return the token ids of prompts, or those of them that `keep` takes. Prompts may be token ids already.

        When `gone` is set, because the client has disconnected, the remaining prompts are skipped.

        Raises:
            ApiError: a prompt is too long, or all together are.
            RequestError: a token id is outside the vocabulary, or a text is not valid Unicode.
        """
        for prompt in prompts:
            if not isinstance(prompt, str):
                if keep is None:
                    self._check_length("prompt", len(prompt), self.engine.facts.context_len)
                admitted_token_ids(prompt, self.engine.facts.vocab_size)
        found: list[list[int]] = []
        num_ids = 0
        for prompt in prompts:
            if gone is not None and gone.is_set():
                break
            if isinstance(prompt, str):
                token_ids = self.encode_text(prompt, add_special_tokens=add_special_tokens, cuts=keep is not None)
            else:
                token_ids = prompt
            found.append(token_ids if keep is None else token_ids[keep])
            num_ids += len(found[-1])
            if num_ids > self.config.max_request_token_ids:
                limit = f"{self.config.max_request_token_ids} (max_request_token_ids)"
                raise invalid("prompt", f"the prompts have more tokens than the {limit} that a request may have")
        return found

    def encode_text(
        self,
        text: str,
        *,
        add_special_tokens: bool = False,
        whole_context: bool = True,
        cuts: bool = False,
        field: str = "prompt",
    ) -> list[int]:
        """Return the token ids of a text. A text with too many characters is rejected without tokenizing it.

        With `whole_context` the tokens must fit the context, not only the limits of a request. With `cuts` the caller
        keeps a part of them, and neither the text nor the tokens must fit. `field` is the name of the text in errors.

        Raises:
            ApiError: the text is too long, or not valid Unicode.
        """
        context, each = self.engine.facts.context_len, self.tokenizer.max_token_characters
        if not cuts and each is not None and len(text) > context * each:
            problem = (
                f"{field} has {len(text)} characters; the context holds {context} tokens (max_model_len), "
                f"which have {context * each} characters at most: shorten it"
            )
            raise invalid(field, problem, code="context_length_exceeded")
        limited = whole_context and not cuts
        most = context if limited else max(context, self.config.max_request_token_ids)
        # A prefix of the text has the same tokens but for its last word. Above twice the limit the text is too long.
        beginning = text[: USUAL_CHARACTERS * most]
        if len(text) > 2 * len(beginning):
            self._check_length(field, len(self._encode(field, beginning, add_special_tokens)), 2 * most)
        token_ids = self._encode(field, text, add_special_tokens)
        self._check_length(field, len(token_ids), most)
        return token_ids

    def _encode(self, field: str, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except RequestError as error:
            raise api_error(error, {"prompt": field}) from None

    def _check_length(self, field: str, num_ids: int, most: int) -> None:
        if num_ids > most:
            context, limit = self.engine.facts.context_len, self.config.max_request_token_ids
            problem = f"{field} has more than {most} tokens; the context holds {context} (max_model_len), prompt and "
            problem += f"output together, and a request may have {limit} (max_request_token_ids): shorten it"
            raise invalid(field, problem, code="context_length_exceeded")

    def encode_chat(self, request: ChatRequest, *, whole_context: bool = True) -> list[int]:
        """Return the token ids of a request's conversation, with its tools in the prompt; see `encode_text`.

        By default it ends with the start of the assistant's answer, unless the last message continues. A request may
        truncate its prompt.

        Raises:
            ApiError: the messages are too long.
            RequestError: the chat template rejects them.
        """
        context = self.engine.facts.context_len
        keep = kept_tokens(request.truncate, request.max_tokens, first=request.keeps_first, context_len=context)
        token_ids = self._encode_chat(request, whole_context=whole_context, cuts=keep is not None)
        return token_ids if keep is None else token_ids[keep]

    def _encode_chat(self, request: ChatRequest, *, whole_context: bool, cuts: bool) -> list[int]:
        tools = None if request.tools is None else request.tools.tools
        if self.harmony is not None:
            return self._encode_harmony(self.harmony, request, tools, whole_context=whole_context and not cuts)
        variables = {
            **(self.config.default_chat_template_kwargs or {}),
            **template_options(request.thinking, self.variables, self.formats)[0],
        }

        def render(messages: list[Message]) -> str:
            return self.tokenizer.render_chat(
                messages,
                template=request.thinking.template or self.chat_template,
                add_generation_prompt=not request.continues if request.begins is None else request.begins,
                continue_final_message=request.continues,
                variables=variables,
                tools=tools,
            )

        text = rendered(render, request.messages)
        field, adds = request.name("messages"), request.adds_special
        return self.encode_text(text, add_special_tokens=adds, whole_context=whole_context, cuts=cuts, field=field)

    def _encode_harmony(
        self, harmony: Harmony, request: ChatRequest, tools: list[dict[str, Any]] | None, *, whole_context: bool
    ) -> list[int]:
        given = (("continue_final_message", request.continues), ("chat_template_kwargs", request.thinking.variables))
        for known, value in given:
            if value:
                name = request.name(known)
                raise invalid(name, f"{name} is not supported with chat_format=harmony, which has no template")
        messages, field = request.messages, request.name("messages")
        most = self.engine.facts.context_len if whole_context else self.config.max_request_token_ids
        # A token has at most as many characters as the longest one of the vocabulary.
        if sum(len(message["content"] or "") for message in messages) > most * MOST_CHARACTERS:
            self._check_length(field, most + 1, most)
        begins = request.begins is not False
        token_ids = harmony.encode(messages, tools=tools, effort=request.thinking.effort, begins=begins)
        self._check_length(field, len(token_ids), most)
        return token_ids

    def max_tokens(self, prompts: list[list[int]], requested: int | None, *, field: str) -> int | None:
        """Check the number of tokens to generate against the context, and return it.

        Raises:
            ApiError: the longest prompt leaves too little room.
        """
        longest, context = max(map(len, prompts)), self.engine.facts.context_len
        if longest + (requested or 1) > context:
            room = f"at most {context - longest} can follow" if longest < context else "shorten it"
            raise invalid(
                field,
                f"the context holds {context} tokens, prompt and output together; the prompt has {longest}"
                + (f" and {requested} were requested" if requested is not None else "")
                + f": {room}",
                code="context_length_exceeded",
            )
        return requested

    def open(
        self,
        request: Request,
        prompts: list[list[int]],
        params: SamplingParams | PoolingParams,
        *,
        streams: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
        beams: BeamSearchParams | None = None,
        detached: bool = False,
    ) -> Call:
        """Open a call of the engine.

        It fails when request_timeout has passed, or when the client disconnects unless it is `detached`.
        """
        options: dict[str, Any] = {"streams": streams, "priority": priority, "cache_salt": cache_salt}
        try:
            if beams is not None and isinstance(params, SamplingParams):
                call = open_beams(self.engine, prompts, params, beams, **options)
            else:
                call = self.engine.open(prompts, params, **options)
        except EngineUnavailable as error:
            raise api_error(error) from None
        if self.config.request_timeout is not None:
            seconds = self.config.request_timeout
            error = ApiError(
                504, f"not complete within {seconds:g} s (request_timeout)", kind="server_error", code="timeout"
            )
            call.limit(seconds, error)
        if not detached:
            call.watch(until_gone(request.receive), client_gone())
        if self.config.enable_log_requests:
            log_request(call, params, self.tokenizer, self.config)
        if self.traces is not None:
            self.traces.follow(call, params, route_path(request.url.path, self.config.root_path or ""), request.headers)
        return call

    async def prepare(
        self, request: Request, work: Callable[[threading.Event], Result], *, num_prompts: int = 1
    ) -> Result:
        """Run the work of a request that precedes the engine. A thread does it for a large body or many prompts.

        `work` is called with an event that is set when the client has disconnected.

        Raises:
            ApiError: the client has disconnected.
        """
        assert isinstance(request, JsonRequest), "the route is a JsonRoute"
        gone = threading.Event()
        if request.num_bytes <= INLINE_BYTES and num_prompts <= INLINE_PROMPTS:
            return work(gone)
        working = asyncio.get_running_loop().run_in_executor(self._threads, work, gone)
        leaving = asyncio.create_task(until_gone(request.receive))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                gone.set()
                raise client_gone()
            return working.result()
        finally:
            leaving.cancel()
            working.cancel()
