"""Bodies of Ollama's POST /api/chat and /api/generate, and their translation to the server's chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from phonograph.config.server_config import ServerConfig
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import RequestError, quoted
from phonograph.server.chat.chat_request import ChatRequest, check_logprobs
from phonograph.server.chat.fields import Body, Fields, Stops
from phonograph.server.chat.thinking import Thinking
from phonograph.server.chat.tools import read_tools
from phonograph.server.http.api_errors import api_error, invalid
from phonograph.server.ollama.ollama_turns import read_turns
from phonograph.server.openai.structured import PARAMETERS

LATEST = ":latest"
"""Tag that clients add to a name without one."""
_SAME_NAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop")
_NAMES = {
    **{name: f"options.{name}" for name in (*_SAME_NAME, "seed")},
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "logprobs": "top_logprobs",
    "tool_choice": "tools",
    "continue_final_message": "messages",
    **dict.fromkeys(("reasoning_effort", "thinking_token_budget", "include_reasoning"), "think"),
}
"""Ollama's names of fields of chats and of engine parameters."""


class Options(Fields):
    """`options` of a body."""

    prefix: ClassVar[str] = "options."
    no_effect: ClassVar[frozenset[str]] = frozenset(
        {
            *("f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat_eta", "mirostat_tau", "num_batch"),
            *("num_gpu", "num_keep", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"),
        }
    )
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **{"embedding_only": (), "mirostat": (0,), "penalize_newline": (True,)},
        **dict.fromkeys(("tfs_z", "typical_p"), (1,)),
    }

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Stops | None = None
    num_ctx: int | None = None
    num_predict: int | None = None

    def check(self) -> list[str]:
        ignored = super().check()
        if self.repeat_last_n not in (None, -1):
            if self.repeat_penalty not in (None, 1):
                name = "options.repeat_last_n"
                problem = f"{name}={self.repeat_last_n}: repeat_penalty counts the whole context here; use -1"
                raise invalid(name, problem, code="unsupported_parameter")
            ignored.append("options.repeat_last_n")
        return ignored


class OllamaBody(Body):
    """Common fields of chats and generations. Answers are streamed, unless `stream` is false."""

    no_effect: ClassVar[frozenset[str]] = frozenset({"shift"})
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    stream: bool | None = None
    truncate: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def drop_unknown(self) -> list[str]:
        return super().drop_unknown() + ([] if self.options is None else self.options.drop_unknown())

    def check(self) -> list[str]:
        if not self.model:
            raise invalid("model", "model is missing")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs=true")
        ignored = super().check() + ([] if self.options is None else self.options.check())
        return ignored if self.keep_alive is None else [*ignored, "keep_alive"]

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def requested_thinking(self) -> Thinking:
        effort = self.think if isinstance(self.think, str) else None
        enabled = self.think if isinstance(self.think, bool) else None
        return Thinking(effort=effort or None, enabled=enabled, names=_NAMES, needed=False)

    def names(self) -> dict[str, str]:
        """Return the request's names of the fields of chats and of engine parameters, where they differ."""
        return {**_NAMES, **dict.fromkeys(PARAMETERS, "format" if self.format else "tools")}

    def max_tokens(self) -> int | None:
        """Return the maximum of tokens; None is up to the context, which zero and negative numbers request."""
        requested = None if self.options is None else self.options.num_predict
        return requested if requested is not None and requested > 0 else None

    def context(self, context_len: int) -> tuple[int, tuple[str, ...]]:
        """Return the tokens of prompt and answer together, and what has no effect.

        Args:
            context_len: context of the engine, which no request exceeds.
        """
        requested = None if self.options is None else self.options.num_ctx
        if requested is None or requested <= 0:
            return context_len, ()
        return min(requested, context_len), ("options.num_ctx",) if requested > context_len else ()

    def sampling(self, config: ServerConfig) -> dict[str, Any]:
        """Return the sampling parameters of a request, without max_tokens.

        Raises:
            ApiError: the format is wrong, or too many log-probabilities are requested.
        """
        values: dict[str, Any] = {}
        if self.options is not None:
            given = {name: getattr(self.options, name) for name in _SAME_NAME}
            given["repetition_penalty"] = self.options.repeat_penalty
            seed = self.options.seed
            given["seed"] = None if seed is not None and seed < 0 else seed
            values = {name: value for name, value in given.items() if value is not None}
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
            check_logprobs("top_logprobs", values["logprobs"], config.max_logprobs)
        form = self._form()
        return values if form is None else {**values, "structured_outputs": form}

    def _form(self) -> StructuredOutputs | None:
        if self.format in (None, ""):
            return None
        if self.format == "json":
            return StructuredOutputs(json_object=True)
        if not isinstance(self.format, dict):
            raise invalid("format", f"format={quoted(self.format)} must be json or a JSON schema")
        try:
            return StructuredOutputs(json=self.format)
        except RequestError as error:
            raise api_error(error, self.names()) from None


class OllamaChatBody(OllamaBody):
    """POST /api/chat."""

    messages: list[Any] | None = None
    tools: list[Any] | None = None


class GenerateBody(OllamaBody):
    """POST /api/generate."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **dict.fromkeys(("context", "height", "images", "steps", "width"), ()),
        "template": ("",),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        "context": "send the earlier turns as messages of /api/chat",
        "template": "start the server with --chat-template, or send the finished prompt with raw=true",
    }

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None

    def check(self) -> list[str]:
        for name in ("raw", "suffix"):
            if self.system and getattr(self, name):
                raise invalid("system", f"system contradicts {name}, with which there is no chat template")
        return super().check()


def chat_request(body: OllamaChatBody, config: ServerConfig) -> ChatRequest:
    """Return the chat request of a conversation.

    Args:
        body: fields of the request, with messages.
        config: limits of the server.

    Raises:
        ApiError: a field is wrong.
    """
    messages = read_turns(body.messages or [], config)
    continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return ChatRequest(
        messages=messages,
        tools=read_tools(body.tools, None, None),
        thinking=body.requested_thinking(),
        sampling=body.sampling(config),
        max_tokens=body.max_tokens(),
        cuts=True,
        continues=continues,
        names=body.names(),
    )


def generate_request(body: GenerateBody, config: ServerConfig) -> ChatRequest:
    """Return the chat request of a prompt, which is a user's message after the system's.

    Raises:
        ApiError: a field is wrong.
    """
    system = [{"role": "system", "content": body.system}] if body.system else []
    return ChatRequest(
        messages=[*system, {"role": "user", "content": body.prompt or ""}],
        thinking=body.requested_thinking(),
        sampling=body.sampling(config),
        max_tokens=body.max_tokens(),
        cuts=True,
        names={**body.names(), "messages": "prompt"},
    )
