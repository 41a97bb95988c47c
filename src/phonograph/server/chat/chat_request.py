"""One chat request, as the server knows it. Every protocol of chats translates its body to this value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phonograph.core.sampling_params import SamplingParams
from phonograph.errors import RequestError
from phonograph.server.chat.conversation import Message
from phonograph.server.chat.thinking import Thinking
from phonograph.server.chat.tools import ToolChoice
from phonograph.server.http.api_errors import api_error, invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation and what its answer shall be. All but the values of `sampling` is checked.

    messages:   of `read_messages`
    tools:      permitted use of tools; None without
    thinking:   reasoning that the request asks for
    sampling:   sampling parameters by the engine's names, without `max_tokens`; also the form of the content
    max_tokens: maximum tokens of the answer; None is up to the context
    cuts:       a `max_tokens` that does not fit the context is reduced, not refused
    truncate:   tokens of the prompt to keep; -1 keeps what fits, None all
    keeps_first: keep its first tokens, not the last ones
    continues:  the answer continues the last message
    begins:     the prompt ends with the start of the answer; None is yes, unless it continues a message
    adds_special: the tokenizer adds special tokens to those of the chat template
    names:      names of the request's fields by those of the engine and of OpenAI's chats, where they differ
    """

    messages: list[Message]
    tools: ToolChoice | None = None
    thinking: Thinking = field(default_factory=Thinking)
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_tokens: int | None = None
    cuts: bool = False
    truncate: int | None = None
    keeps_first: bool = False
    continues: bool = False
    begins: bool | None = None
    adds_special: bool = False
    names: Mapping[str, str] = field(default_factory=dict[str, str])

    def name(self, field: str) -> str:
        """Return the request's name of a field."""
        return self.names.get(field, field)


def sampling_params(
    defaults: Mapping[str, Any], values: Mapping[str, Any], max_tokens: int | None, names: Mapping[str, str]
) -> SamplingParams:
    """Return the engine's parameters for a request.

    Args:
        defaults: sampling parameters of the model, for those that the request leaves out.
        values: sampling parameters of the request.
        max_tokens: tokens to generate.
        names: the request's names of parameters, where they differ.

    Raises:
        ApiError: a value is out of range.
    """
    try:
        return SamplingParams(**{**defaults, **values}, max_tokens=max_tokens)
    except RequestError as error:
        raise api_error(error, names) from None


def check_logprobs(name: str, count: int, most: int) -> None:
    """Check the number of log-probabilities of a position against the server's limit.

    Args:
        name: field of the request.
        count: its value; -1 is the whole vocabulary.
        most: `max_logprobs` of the server; -1 is no limit.

    Raises:
        ApiError: the server gives fewer.
    """
    if most >= 0 and (count > most or count == -1):
        raise invalid(name, f"{name}={count}: this server gives {most} at most (max_logprobs)")


def kept_tokens(truncate: int | None, max_tokens: int | None, *, first: bool, context_len: int) -> slice | None:
    """Return which tokens of a prompt stay; None is all.

    Args:
        truncate: `truncate_prompt_tokens`; -1 leaves room for `max_tokens` in the context.
        max_tokens: tokens to generate; None is one at least.
        first: the first tokens stay, not the last ones.
        context_len: maximum tokens of prompt and output.

    Raises:
        ApiError: the number is out of range.
    """
    if truncate is None:
        return None
    if truncate < -1 or truncate == 0 or truncate > context_len:
        problem = f"truncate_prompt_tokens={truncate} must be 1 to {context_len} (max_model_len), or -1 for what fits"
        raise invalid("truncate_prompt_tokens", problem)
    num_kept = max(context_len - (max_tokens or 1), 1) if truncate == -1 else truncate
    return slice(num_kept) if first else slice(-num_kept, None)
