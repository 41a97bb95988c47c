"""Request bodies in the fields of OpenAI's and vLLM's clients, and their conversion to engine parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from phonograph.config.server_config import ServerConfig
from phonograph.core.beam_search_params import BeamSearchParams
from phonograph.core.repetition_detection import MAX_PATTERN_SIZE
from phonograph.core.sampling_params import SamplingParams
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import RequestError
from phonograph.server.chat.chat_request import check_logprobs
from phonograph.server.chat.conversation import further_keys
from phonograph.server.chat.fields import (
    Biases,
    Body,
    Budget,
    CacheSalt,
    Documents,
    Messages,
    Prompts,
    Stops,
    TokenIds,
    asks_nothing,
)
from phonograph.server.chat.thinking import Thinking
from phonograph.server.http.api_errors import api_error, invalid
from phonograph.server.openai.structured import PARAMETERS, StructuredFields, field_of, structured_outputs

DEFAULT_MAX_TOKENS = 16
"""Default of completions, as at OpenAI. A chat's answer may fill the context."""

_SAME_NAME = (
    *("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "prompt_logprobs", "allowed_token_ids", "bad_words", "speculate", "stream_interval"),
)
"""Fields that have the same name in the engine."""
_NOT_OF_BEAMS: dict[str, tuple[object, ...]] = {
    **{"top_k": (0, -1), "top_p": (1,), "min_p": (0,), "repetition_penalty": (1,), "min_tokens": (0,)},
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("logit_bias", "stop", "stop_token_ids", "bad_words", "prompt_logprobs"), ()),
    **dict.fromkeys(("logprob_token_ids", "repetition_detection", "thinking_token_budget", "suffix", "seed"), ()),
}
"""Fields without effect on a beam search, with neutral values."""


class StreamOptions(BaseModel):
    """Options of a stream.

    include_usage:          send a last chunk with the usage
    continuous_usage_stats: send the usage so far in every chunk, unless `include_usage` is false
    include_obfuscation:    no effect; OpenAI pads chunks against traffic analysis
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Repetition(BaseModel):
    """Repeated pattern that ends an answer; see `RepetitionDetectionParams`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_pattern_size: Annotated[int, Field(ge=0, le=MAX_PATTERN_SIZE)] = 0
    min_pattern_size: Annotated[int, Field(ge=0)] = 0
    min_count: Annotated[int, Field(ge=0)] = 0


class GenerationBody(StructuredFields):
    """Common fields of completions and chats. Null means the default."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: Stops | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Stops | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    speculate: bool | None = None
    repetition_detection: Repetition | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: TokenIds | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    priority: int | None = None
    cache_salt: CacheSalt | None = None
    request_id: Annotated[str, Field(max_length=200)] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and options.include_usage is not False and bool(options.continuous_usage_stats)

    def complete(self, config: ServerConfig) -> None:
        if self.return_tokens_as_token_ids is None:
            self.return_tokens_as_token_ids = config.return_tokens_as_token_ids
        if config.enable_force_include_usage and self.stream:
            self.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)

    def check(self) -> list[str]:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options needs stream=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens", "max_tokens and max_completion_tokens contradict each other; give one of them")
        self._check_beams()
        extra = self.model_extra or {}
        if extra.get("best_of") is not None and extra["best_of"] != (self.n or 1):
            raise invalid("best_of", "best_of other than n is not supported", code="unsupported_parameter")
        extra.pop("best_of", None)
        ignored = super().check()
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            ignored.append("stream_options.include_obfuscation")
        return ignored

    def _check_beams(self) -> None:
        """Check that no field contradicts `use_beam_search`."""
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1):
                raise invalid("length_penalty", "length_penalty needs use_beam_search=true")
            return
        for name, neutral in _NOT_OF_BEAMS.items():
            if not asks_nothing(getattr(self, name, None), neutral):
                raise invalid(name, f"{name} has no effect on a beam search; leave it or use_beam_search out")

    def beams(self, params: SamplingParams) -> BeamSearchParams | None:
        """Return the parameters of a beam search, or None if the request does not ask for one.

        Args:
            params: sampling parameters of the request.

        Raises:
            ApiError: a value is out of range.
        """
        if not self.use_beam_search:
            return None
        try:
            return BeamSearchParams(
                params.n,
                params.max_tokens or 1,
                ignore_eos=params.ignore_eos,
                temperature=params.temperature,
                length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
                include_stop_str_in_output=params.include_stop_str_in_output,
                structured_outputs=params.structured_outputs,
                allowed_token_ids=params.allowed_token_ids,
            )
        except RequestError as error:
            raise api_error(error, {"beam_width": "n"}) from None

    def requested_tokens(self) -> int | None:
        """Return max_tokens, which has two names."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    def names(self) -> dict[str, str]:
        """Return the request's names of engine parameters, where they differ."""
        field = field_of(self)
        names = {} if field is None else dict.fromkeys(PARAMETERS, field)
        if self.max_tokens is None and self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def sampling(
        self,
        *,
        logprobs: int | None,
        max_logprobs: int,
        scores_prompt: bool = False,
        structured: StructuredOutputs | None = None,
    ) -> dict[str, Any]:
        """Return the sampling parameters of a request, without max_tokens.

        Args:
            logprobs: likely tokens to report at each position, or None.
            max_logprobs: limit of the server.
            scores_prompt: report `logprobs` for the prompt too.
            structured: structured output that does not come from the fields, such as a forced tool call.

        Raises:
            ApiError: the form of the output is wrong, or too many log-probabilities are requested.
        """
        names = self.names()
        for name, value in ((names.get("logprobs", "logprobs"), logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                check_logprobs(name, value, max_logprobs)
        values: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        if self.repetition_detection is not None:
            values["repetition_detection"] = self.repetition_detection.model_dump()
        if scores_prompt and logprobs is not None:
            both = logprobs, self.prompt_logprobs or 0
            values["prompt_logprobs"] = -1 if -1 in both else max(both)
        if self.logprob_token_ids:
            values["logprob_token_ids"], logprobs = self.logprob_token_ids, None
        try:
            requested = structured_outputs(self)
            if structured is not None and requested is not None:
                problem = "tool_choice forces a call, which contradicts the requested structured output"
                raise invalid("tool_choice", problem)
            found = structured or requested
            if found is not None and self.structured_outputs_strictness is not None:
                found = replace(found, strictness=self.structured_outputs_strictness)
        except RequestError as error:
            raise api_error(error, names) from None
        return {**values, "structured_outputs": found, "logprobs": logprobs}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def check(self) -> list[str]:
        name = self.names().get("max_tokens", "max_tokens")
        if self.use_beam_search and self.echo and (self.logprobs is not None or self.requested_tokens() == 0):
            raise invalid("echo", f"echo with logprobs or {name}=0 has no log-probabilities of a beam search")
        if self.requested_tokens() == 0 and not self.echo:
            raise invalid(name, f"{name}=0 needs echo=true, because the answer would be empty")
        if self.logprob_token_ids and self.logprobs is None:
            raise invalid("logprob_token_ids", "logprob_token_ids needs logprobs")
        if self.logprob_token_ids and self.requested_tokens() == 0:
            raise invalid("logprob_token_ids", f"logprob_token_ids needs tokens of the output, and {name} is 0")
        for name in ("echo", "truncate_prompt_tokens", "prompt_logprobs"):
            if self.suffix and getattr(self, name):
                raise invalid(name, f"{name} contradicts suffix; give one of them")
        return super().check()


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    echo: bool | None = None
    add_special_tokens: bool | None = None
    documents: Documents | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Budget = None

    def complete(self, config: ServerConfig) -> None:
        super().complete(config)
        _check_template(self.chat_template, config)

    def requested_thinking(self) -> Thinking:
        return Thinking(
            effort=self.reasoning_effort,
            shown=self.include_reasoning is not False,
            budget=self.thinking_token_budget,
            template=self.chat_template,
            variables={
                **({"documents": self.documents} if self.documents else {}),
                **(self.chat_template_kwargs or {}),
            },
            names={"chat_template_kwargs.documents": "documents"},
        )

    def names(self) -> dict[str, str]:
        # Without a field for structured output, it comes from forced calls.
        return {"logprobs": "top_logprobs", **dict.fromkeys(PARAMETERS, "tools"), **super().names()}

    def check(self) -> list[str]:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs=true")
        if self.logprob_token_ids and not self.logprobs:
            raise invalid("logprob_token_ids", "logprob_token_ids needs logprobs=true")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message", "continue_final_message contradicts add_generation_prompt; give one of them"
            )
        return super().check() + further_keys(self.messages)


def _check_template(template: str | None, config: ServerConfig) -> None:
    """Check that a request may have a chat template."""
    problem = None
    if template is not None and config.chat_format == "harmony":
        problem = "chats in the harmony format have no template"
    elif template is not None and not config.trust_request_chat_template:
        problem = "the server takes templates of requests only with --trust-request-chat-template"
    if problem is not None:
        raise invalid("chat_template", f"chat_template: {problem}", code="unsupported_parameter")


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    return_token_strs: bool | None = None

    def complete(self, config: ServerConfig) -> None:
        _check_template(self.chat_template, config)

    def requested_thinking(self) -> Thinking:
        return Thinking(template=self.chat_template, variables=self.chat_template_kwargs or {})

    def check(self) -> list[str]:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        for name in (
            "add_generation_prompt",
            "continue_final_message",
            "chat_template",
            "chat_template_kwargs",
            "tools",
        ):
            if self.prompt is not None and getattr(self, name):
                raise invalid(name, f"{name} needs messages")
        return super().check() + further_keys(self.messages or [])


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: TokenIds
