"""Prompts and conversations of the offline API, in the forms that vLLM accepts, reduced to text or token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NotRequired, TypedDict, cast

from phonograph.core.token_types import EncoderTokens
from phonograph.engine.admission import Prompt, admit_cache_salt
from phonograph.errors import RequestError, shortened
from phonograph.text.tokenizer import ChatMessage


class TextPrompt(TypedDict):
    """Text of a prompt."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids of a prompt."""

    prompt_token_ids: list[int]
    cache_salt: NotRequired[str]


PromptInput = Prompt | TextPrompt | TokensPrompt | Mapping[str, Any]
"""Text, token ids, or a mapping with one of `prompt` (text) and `prompt_token_ids`, and perhaps a `cache_salt`."""
_KEYS = ("prompt", "prompt_token_ids")
_CONVERSATION = 'must be a list of messages such as {"role": "user", "content": "Hello"}'
_ONE = "is a list of prompts, and one prompt is taken here; only `LLM.generate` takes a list"
_WORKS = "must be text, a list of token ids, a mapping with prompt or prompt_token_ids, or a list of these"


def prompt_list(prompts: object) -> list[PromptInput]:
    """Return a list of prompts from one prompt or several.

    Raises:
        RequestError: the value is neither.
    """
    if isinstance(prompts, (str, Mapping, EncoderTokens)):
        return [cast("PromptInput", prompts)]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise RequestError("prompts", shortened(repr(prompts)), _WORKS)
    items = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)  # pyright: ignore[reportAttributeAccessIssue]
    return cast("list[PromptInput]", [items] if items and isinstance(items[0], Integral) else items)


def conversation_list(messages: object) -> list[object]:
    """Return a list of conversations from one conversation or several.

    Raises:
        RequestError: the value is neither.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError("messages", shortened(repr(messages)), f"{_CONVERSATION}, or a list of such lists")
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def plain_conversation(messages: object) -> Sequence[ChatMessage]:
    """Return one conversation.

    Raises:
        RequestError: the value is not a list of messages.
    """
    if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)):
        turns: list[object] = list(messages)
        if turns and all(isinstance(turn, Mapping) for turn in turns):
            return cast("list[ChatMessage]", turns)
    raise RequestError("messages", shortened(repr(messages)), _CONVERSATION)


def plain_prompt(prompt: object) -> Prompt:
    """Return the text or the token ids of a prompt.

    Raises:
        RequestError: the value is neither, or a mapping with other keys.
    """
    if not isinstance(prompt, Mapping):
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
            raise RequestError("prompt", shortened(repr(prompt)), _WORKS)
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], (str, Mapping, list, tuple)):
            raise RequestError("prompt", prompt, _ONE)
        return cast("Prompt", prompt)
    entries = {name: value for name, value in prompt.items() if value is not None and name != "cache_salt"}
    for name, value in entries.items():
        if name not in _KEYS:
            raise RequestError(f"prompt[{name!r}]", shortened(repr(value)), "is not supported; leave it out")
    if len(entries) != 1:
        raise RequestError("prompt", sorted(entries), "must have exactly one of prompt and prompt_token_ids")
    ((name, value),) = entries.items()
    if isinstance(value, str) != (name == "prompt") or not isinstance(value, Iterable):
        problem = "must be text" if name == "prompt" else "must be a list of token ids"
        raise RequestError(name, shortened(repr(value)), problem)
    return cast("Prompt", value)


def salt_of(prompt: object) -> str | None:
    """Return the salt of a prompt's cached prefixes, if it has one.

    Raises:
        RequestError: it is not a non-empty string.
    """
    cache_salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    admit_cache_salt(cache_salt)
    return cache_salt


def refuse_unsupported(**arguments: object) -> None:
    """Reject arguments of vLLM's methods that have no effect here.

    Raises:
        RequestError: an argument is neither None nor an empty mapping.
    """
    for name, value in arguments.items():
        if value is not None and value != {}:
            raise RequestError(name, shortened(repr(value)), "is not supported; leave it out")
