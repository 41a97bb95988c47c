"""What all endpoints share: who may ask what and how much, text to tokens, and how an answer is waited for and sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from prometheus_client import CollectorRegistry
from starlette.responses import JSONResponse, Response

from phonograph.config_server import ServerConfig
from phonograph.engine.tokenizer import Tokenizer, check_token_ids
from phonograph.sampling_params import SamplingParams
from phonograph.server.answers import Answer
from phonograph.server.async_engine import AsyncEngine
from phonograph.server.calls import Call
from phonograph.server.conversation import Message, read_messages
from phonograph.server.errors import ApiError, invalid
from phonograph.server.metrics import make_registry
from phonograph.server.protocol import GenerationBody
from phonograph.server.stream import EventStream
from phonograph.server.token_text import TokenTexts

INLINE_CHARACTERS = 16_384
"""Longer texts are tokenized by a thread. Handing over a short one would take longer than tokenizing it."""
THREADS = 2
Result = TypeVar("Result")


@dataclass(slots=True)
class Serving:
    """One server: an engine, and what it is told about how to serve.

    root:          the model as the engine was given it
    defaults:      sampling parameters that come with the model
    chat_template: instead of the model's own
    started:       seconds since the epoch
    """

    engine: AsyncEngine
    config: ServerConfig
    root: str
    defaults: Mapping[str, Any]
    chat_template: str | None
    texts: TokenTexts = field(init=False)
    registry: CollectorRegistry = field(init=False)
    started: int = field(default_factory=lambda: int(time.time()))
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(THREADS, "tokenizer"))

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.engine.tokenizer)
        self.registry = make_registry(self.engine, self.names[0])

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model; the first is in answers."""
        return self.config.served_model_name or (self.root,)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError where a client wants another model."""
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(
                404, f"the model {name!r} does not exist; here is {known}", param="model", code="model_not_found"
            )

    def admit(self, body: GenerationBody, num_prompts: int) -> dict[str, str]:
        """Whether a request may go on, before anything is spent on it; headers for its answer.

        Raises:
            ApiError: it asks for what is not served, or too much is in progress already.
        """
        ignored = body.check()
        self.check_model(body.model)
        engine, facts = self.engine, self.engine.facts
        if engine.problem is not None:
            raise engine.problem
        if body.priority and facts.scheduling_policy != "priority":
            raise invalid("priority", f"priority={body.priority}: the server runs without --scheduling-policy priority")
        room = facts.max_num_seqs + self.config.max_queued_requests
        count = num_prompts * (body.n or 1)
        if count > room:
            raise invalid("n" if num_prompts == 1 else "prompt", f"{count} samples; this server takes {room} at most")
        if engine.num_open + count > room:
            raise ApiError(
                429,
                f"{engine.num_open} samples are in progress or wait; this server takes {room} at most",
                kind="rate_limit_error",
                code="queue_full",
                headers={"retry-after": "1"},
            )
        return warning_headers(ignored)

    async def encode(self, prompts: Sequence[str | list[int]], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of prompts; those that are token ids already stay as they are.

        Raises:
            RequestError: a prompt has token ids that the model has not, or is no text.
        """
        for prompt in prompts:
            if not isinstance(prompt, str):
                check_token_ids(prompt, self.engine.facts.vocab_size)

        def encode() -> list[list[int]]:
            return [
                self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]

        return await self._run(sum(len(prompt) for prompt in prompts if isinstance(prompt, str)), encode)

    async def encode_chat(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        variables: Mapping[str, Any] | None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation."""
        read = read_messages(messages)

        def encode() -> list[int]:
            return self.tokenizer.encode_chat(
                read,
                template=self.chat_template,
                add_generation_prompt=not continue_final_message
                if add_generation_prompt is None
                else add_generation_prompt,
                continue_final_message=bool(continue_final_message),
                variables=variables,
                tools=tools,
            )

        return await self._run(sum(len(message["content"] or "") for message in read), encode)

    def max_tokens(self, prompts: list[list[int]], asked: int | None, *, field: str) -> int | None:
        """Tokens to generate, as asked for.

        Raises:
            ApiError: the longest prompt leaves no room for so many.
        """
        longest, context = max(map(len, prompts)), self.engine.facts.context_len
        if longest + (asked or 1) > context:
            room = f"at most {context - longest} can follow" if longest < context else "shorten it"
            raise invalid(
                field,
                f"the context holds {context} tokens, prompt and output together; the prompt has {longest}"
                + (f" and {asked} were asked for" if asked is not None else "")
                + f": {room}",
                code="context_length_exceeded",
            )
        return asked

    def open(self, request: Request, prompts: list[list[int]], params: SamplingParams, body: GenerationBody) -> Call:
        """Gives prompts to the engine. The call fails when the client goes away, or the time is up."""
        call = self.engine.open(
            prompts, params, streams=bool(body.stream), priority=body.priority or 0, names=body.names()
        )
        if self.config.request_timeout is not None:
            seconds = self.config.request_timeout
            error = ApiError(
                504, f"not complete within {seconds:g} s (request_timeout)", kind="server_error", code="timeout"
            )
            call.limit(seconds, error)
        call.watch(request.receive)
        return call

    async def _run(self, size: int, work: Callable[[], Result]) -> Result:
        if size <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def warning_headers(ignored: list[str]) -> dict[str, str]:
    """Says which fields of a request had no effect."""
    return {"warning": f'299 - "no effect: {", ".join(ignored)}"'} if ignored else {}


async def respond(call: Call, answer: Answer, body: GenerationBody, headers: Mapping[str, str]) -> Response:
    """Waits for the answer, or for its beginning, and sends it.

    Raises:
        ApiError: the call failed before anything of the answer was sent.
    """
    try:
        if body.stream:
            await call.begin()
            return EventStream(call, answer, body, headers)
        await call.wait()
        call.close()
        return JSONResponse(answer.whole(), headers=dict(headers))
    except BaseException:
        call.close()
        raise
