"""Bodies of POST /v1/messages and /v1/messages/count_tokens, and their translation to the server's chat request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import RequestError, quoted
from phonograph.server.chat.chat_request import ChatRequest
from phonograph.server.chat.fields import VLLM_UNSUPPORTED, Body, CacheSalt, Messages, Stops
from phonograph.server.chat.thinking import Thinking
from phonograph.server.chat.tools import ToolChoice, chosen_tools, function_tool
from phonograph.server.http.api_errors import api_error, invalid
from phonograph.server.messages.message_turns import read_turns
from phonograph.server.openai.structured import PARAMETERS

_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking",
    "include_reasoning": "thinking.display",
    "continue_final_message": "messages",
}
"""Anthropic's names of fields of chats and of engine parameters."""
_TOOL_KEYS = frozenset({"cache_control", "eager_input_streaming", "input_examples", "defer_loading", "allowed_callers"})
"""Keys of a tool without effect."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountBody(Body):
    """POST /v1/messages/count_tokens."""

    no_effect: ClassVar[frozenset[str]] = frozenset(
        {
            *("context_management", "inference_geo", "metadata", "service_tier", "speed"),
            *("user_profile_id", "workspace_id"),
        }
    )
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **VLLM_UNSUPPORTED,
        **dict.fromkeys(("container", "mcp_servers"), ()),
    }

    messages: Messages
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> list[str]:
        ignored = super().check()
        if any(_with_key("cache_control", (self.cache_control, self.system, self.messages, self.tools))):
            ignored.append("cache_control")
        if self.thinking is not None:
            self._check_thinking(self.thinking)
            if self.thinking.get("display") == "summarized":
                ignored.append("thinking.display")
        for key in self.output_config or ():
            if key not in ("effort", "format"):
                raise invalid(f"output_config.{key[:50]}", f"unknown key {key[:50]!r} in output_config")
        if not isinstance((self.output_config or {}).get("effort"), str | None):
            raise invalid("output_config.effort", "output_config.effort must be a string")
        tools = [tool for tool in self.tools or () if isinstance(tool, dict)]
        keys = sorted({key for tool in tools for key, value in tool.items() if key in _TOOL_KEYS and value})
        return ignored + [f"tools.{key}" for key in keys if key != "cache_control"]

    def _check_thinking(self, thinking: dict[str, Any]) -> None:
        kinds = ("enabled", "disabled", "adaptive")
        if thinking.get("type") not in kinds:
            raise invalid("thinking.type", f"thinking.type={quoted(thinking.get('type'))} must be {', '.join(kinds)}")
        for key in thinking:
            if key not in ("type", "budget_tokens", "display"):
                raise invalid(f"thinking.{key[:50]}", f"unknown key {key[:50]!r} in thinking")
        budget = thinking.get("budget_tokens")
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
            raise invalid("thinking.budget_tokens", "thinking.budget_tokens must be an integer")
        if thinking.get("display") not in (None, "summarized", "omitted"):
            raise invalid("thinking.display", "thinking.display must be summarized or omitted")

    def requested_thinking(self) -> Thinking:
        thinking = self.thinking or {}
        kind = thinking.get("type")
        enabled = None if kind is None else kind != "disabled"
        return Thinking(
            effort=None if enabled is False else (self.output_config or {}).get("effort"),
            enabled=enabled,
            shown=thinking.get("display") != "omitted",
            budget=thinking.get("budget_tokens") if kind == "enabled" else None,
            variables=self.chat_template_kwargs or {},
            names=_NAMES,
            needed=False,
        )

    def names(self) -> dict[str, str]:
        """Return the request's names of the fields of chats and of engine parameters, where they differ."""
        form = "output_config.format" if (self.output_config or {}).get("format") is not None else "tools"
        return {**_NAMES, **dict.fromkeys(PARAMETERS, form)}


class MessageBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    cache_salt: CacheSalt | None = None


def message_request(body: CountBody) -> ChatRequest:
    """Return the chat request of a body.

    Raises:
        ApiError: a field is wrong.
    """
    tools, names = _tools(body), body.names()
    messages = read_turns(body.messages, body.system)
    continues = messages[-1]["role"] == "assistant"
    if "tool_calls" in messages[-1]:
        raise invalid("messages", "the last message has tool_use blocks; send their results as tool_result blocks")
    form, forced = _form(body, names), None if tools is None else tools.structured
    if form is not None and forced is not None:
        raise invalid("tool_choice", "tool_choice forces a call, which contradicts output_config.format")
    values: dict[str, Any] = {}
    if form is not None or forced is not None:
        values["structured_outputs"] = form or forced
    max_tokens = None
    if isinstance(body, MessageBody):
        max_tokens = body.max_tokens
        given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
        given["stop"] = body.stop_sequences
        values |= {name: value for name, value in given.items() if value is not None}
    return ChatRequest(
        messages=messages,
        tools=tools,
        thinking=body.requested_thinking(),
        sampling=values,
        max_tokens=max_tokens,
        cuts=True,
        continues=continues,
        names=names,
    )


def _form(body: CountBody, names: Mapping[str, str]) -> StructuredOutputs | None:
    form = (body.output_config or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise invalid("output_config.format", "output_config.format must have the type json_schema and a schema")
    try:
        return StructuredOutputs(json=cast("dict[str, Any]", form["schema"]))
    except RequestError as error:
        raise api_error(error, names) from None


def _tools(body: CountBody) -> ToolChoice | None:
    choice = body.tool_choice or {"type": "auto"}
    kind, name = choice.get("type"), choice.get("name")
    if kind not in ("auto", "any", "tool", "none"):
        raise invalid("tool_choice.type", f"tool_choice.type={quoted(kind)} must be auto, any, tool or none")
    if not body.tools:
        if kind in ("any", "tool"):
            raise invalid("tool_choice", "tool_choice needs tools")
        return None
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    several = not choice.get("disable_parallel_tool_use")
    named = {"type": "function", "function": {"name": name}}
    return chosen_tools(tools, named if kind == "tool" else _CHOICES[kind], several)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise invalid(where, f"{where} must be an object")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        problem = f"tools of type {str(kind)[:50]!r} are not supported: this server runs no tools, and the model knows "
        raise invalid(where, problem + "none by itself; tools with an input_schema work", code="unsupported_tool")
    function = {key: value for key, value in tool.items() if key not in _TOOL_KEYS and key != "type"}
    return function_tool(function, where, parameters="input_schema")


def _with_key(key: str, value: Any) -> Iterator[bool]:
    """Yield True for each object in a request's messages, blocks or tools that has a key with a value."""
    if isinstance(value, dict):
        if value.get(key):
            yield True
        content = value.get("content")
        if isinstance(content, list):
            yield from _with_key(key, content)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _with_key(key, one)
