"""Body of POST /v1/responses, and its translation to the server's own chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, cast

from pydantic import BeforeValidator, Field, WithJsonSchema

from phonograph.config.server_config import ServerConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import RequestError, quoted
from phonograph.server.chat.chat_request import ChatRequest, check_logprobs
from phonograph.server.chat.custom_tools import custom_tool
from phonograph.server.chat.fields import VLLM_UNSUPPORTED, Biases, Body, Budget, CacheSalt, Stops, TokenIds
from phonograph.server.chat.thinking import Thinking
from phonograph.server.chat.tools import ToolChoice, chosen_tools, function_tool
from phonograph.server.http.api_errors import api_error, invalid
from phonograph.server.http.json_meter import JsonMeter
from phonograph.server.openai.structured import PARAMETERS, of_format
from phonograph.server.responses.response_input import joined_name, read_input

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_OF_TOOLS = frozenset(
    {
        *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results"),
        *("message.input_image.image_url", "web_search_call.action.sources", "web_search_call.results"),
    }
)
"""Values of `include` about items that no answer of this server has."""
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
)
_SEARCHES = ("web_search", "tool_search")
"""Beginnings of the types of tools that search."""
_NOT_STORED = "only responses are stored; send previous_response_id, or the whole conversation as input"


def _items(value: object) -> object:
    if isinstance(value, str):
        return value
    items = cast("list[Any]", value) if isinstance(value, list) else []
    if not items or not all(isinstance(item, dict) for item in items):
        raise ValueError("must be a string or a list of one item or more, each an object")
    return items


Input = Annotated[
    Any,
    BeforeValidator(_items),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}),
]


class ResponseBody(Body):
    """POST /v1/responses."""

    no_effect: ClassVar[frozenset[str]] = frozenset(
        {
            *("client_metadata", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"),
            *("prompt_cache_retention", "safety_identifier", "service_tier", "session_id", "user"),
        }
    )
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **dict.fromkeys(("background_options", "context_management", "conversation", "moderation", "prompt"), ()),
        **VLLM_UNSUPPORTED,
        **dict.fromkeys(("enable_response_messages", "previous_input_messages"), ()),
        **dict.fromkeys(("include_reasoning", "spaces_between_special_tokens"), (True,)),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("conversation", "prompt"), _NOT_STORED),
    }

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: Biases | None = None
    stop: Stops | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    thinking_token_budget: Budget = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[Any] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=300)] | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: CacheSalt | None = None
    request_id: Annotated[str, Field(max_length=200)] | None = None

    def check(self) -> list[str]:
        ignored = super().check()
        if self.background and self.store is False:
            raise invalid("background", "background can only be used when `store` is true")
        if self.background and self.stream:
            problem = "background with stream is not supported: GET /v1/responses/{id} returns the response"
            raise invalid("background", problem, code="unsupported_parameter")
        if self.truncation not in (None, "disabled"):
            raise invalid("truncation", f"truncation={quoted(self.truncation)}: only disabled is supported")
        if self.stream_options is not None:
            if not self.stream:
                raise invalid("stream_options", "stream_options needs stream=true")
            ignored += _told(self.stream_options, "stream_options", (), ("include_obfuscation",))
        if self.reasoning is not None:
            ignored += _told(self.reasoning, "reasoning", ("effort",), ("summary", "generate_summary"))
            if not isinstance(self.reasoning.get("effort"), str | None):
                raise invalid("reasoning.effort", "reasoning.effort must be a string")
        if self.text is not None:
            ignored += _told(self.text, "text", ("format",), ("verbosity",))
        for value in self.include or ():
            if isinstance(value, str) and value in _OF_TOOLS:
                ignored.append(f"include {value}")
            elif value not in (LOGPROBS, ENCRYPTED):
                raise invalid("include", f"include: {quoted(value)} is not among {LOGPROBS} and {ENCRYPTED}")
        if self.top_logprobs and not self.includes(LOGPROBS):
            raise invalid("top_logprobs", f"top_logprobs needs include=[{LOGPROBS!r}]")
        return ignored + [f"tools {kind}" for kind in self.left_out_tools()]

    def left_out_tools(self) -> list[str]:
        """Return the types of search tools next to tools of the client.

        Agents always offer a search, and the model can answer without it. A request with a search alone needs it.
        """
        kinds = {str(tool.get("type")) for tool in self.tools or () if isinstance(tool, dict)}
        has_others = not kinds.isdisjoint(("function", "custom", "namespace"))
        return sorted(kind for kind in kinds if kind.startswith(_SEARCHES)) if has_others else []

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Return namespace and name of each function of a namespace, by its name in the prompt. Tools are checked."""
        spaces = [tool for tool in self.tools or () if tool["type"] == "namespace"]
        pairs = [(space["name"], tool["name"]) for space in spaces for tool in space["tools"]]
        return {joined_name(*pair): pair for pair in pairs}

    def includes(self, value: str) -> bool:
        """Return True if the answer has what a value of `include` names."""
        return self.include is not None and value in self.include

    def requested_thinking(self) -> Thinking:
        return Thinking(
            effort=(self.reasoning or {}).get("effort"),
            budget=self.thinking_token_budget,
            variables=self.chat_template_kwargs or {},
            names={"reasoning_effort": "reasoning.effort"},
        )

    def names(self) -> dict[str, str]:
        """Return the request's names of the fields of chats and of engine parameters, where they differ."""
        form = "text.format" if self.text is not None and self.text.get("format") is not None else "tools"
        form = form if self.structured_outputs is None else "structured_outputs"
        names = {"messages": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
        return {**names, **dict.fromkeys(PARAMETERS, form)}


def response_request(body: ResponseBody, config: ServerConfig, before: Sequence[dict[str, Any]] = ()) -> ChatRequest:
    """Return the chat request of a body.

    Args:
        body: fields of the request.
        config: limits of the server.
        before: items of the conversation before.

    Raises:
        ApiError: a field is wrong.
    """
    names, tools = body.names(), _tools(body)
    values: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if body.includes(LOGPROBS):
        values["logprobs"] = body.top_logprobs or 0
        check_logprobs("top_logprobs", values["logprobs"], config.max_logprobs)
    form, forced = _form(body, names), None if tools is None else tools.structured
    if form is not None and forced is not None:
        raise invalid("tool_choice", f"tool_choice forces a call, which contradicts {names['structured_outputs']}")
    if form is not None or forced is not None:
        values["structured_outputs"] = form or forced
    return ChatRequest(
        messages=read_input(body.input, body.instructions, JsonMeter(config), before),
        tools=tools,
        thinking=body.requested_thinking(),
        sampling=values,
        max_tokens=body.max_output_tokens,
        names=names,
    )


def _form(body: ResponseBody, names: Mapping[str, str]) -> StructuredOutputs | None:
    form = (body.text or {}).get("format")
    if body.structured_outputs is not None:
        if form is not None:
            raise invalid("structured_outputs", "structured_outputs contradicts text.format; give one of them")
        try:
            return SamplingParams(structured_outputs=body.structured_outputs).structured_outputs  # pyright: ignore[reportArgumentType]
        except RequestError as error:
            raise api_error(error, names) from None
    if form is None:
        return None
    if not isinstance(form, dict):
        raise invalid("text.format", "text.format must be an object with a type")
    about = {key: value for key, value in cast("dict[str, Any]", form).items() if key != "type"}
    try:
        return of_format(form.get("type"), about, "text.format", "text.format")
    except RequestError as error:
        raise api_error(error, names) from None


def _tools(body: ResponseBody) -> ToolChoice | None:
    choice = _choice(body.tool_choice)
    if not body.tools:
        if choice not in (None, "auto", "none"):
            raise invalid("tool_choice", "tool_choice needs tools")
        return None
    return chosen_tools(_read_tools(body), choice, body.parallel_tool_calls)


def _read_tools(body: ResponseBody) -> list[dict[str, Any]]:
    """Return the functions and custom tools of a body, those of namespaces with joined names."""
    optional = body.left_out_tools()
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(body.tools or ()):
        where = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace":
            found += _of_namespace(tool, where)
        elif kind not in optional:
            found.append(_tool(tool, where))
    return found


def _of_namespace(namespace: dict[str, Any], where: str) -> list[dict[str, Any]]:
    name, tools = namespace.get("name"), namespace.get("tools")
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.name", "a namespace needs a name")
    if not isinstance(tools, list):
        raise invalid(f"{where}.tools", "tools of a namespace must be a list")
    found = [_tool(tool, f"{where}.tools[{index}]") for index, tool in enumerate(cast("list[Any]", tools))]
    for tool in found:
        tool["function"]["name"] = joined_name(name, tool["function"]["name"])
    return found


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise invalid(where, f"{where} must be an object with a type")
    if kind == "custom":
        return custom_tool({key: value for key, value in tool.items() if key != "type" and value is not None}, where)
    if kind != "function":
        problem = f"tools of type {kind[:50]!r} are not supported: this server runs no tools; function and custom work"
        raise invalid(where, problem, code="unsupported_tool")
    return function_tool({key: value for key, value in tool.items() if key != "type" and value is not None}, where)


def _choice(choice: str | dict[str, Any] | None) -> Any:
    """Return a choice in the form of OpenAI's chats.

    Raises:
        ApiError: it is of a kind that is not supported.
    """
    if not isinstance(choice, dict):
        return choice
    kind, rest = choice.get("type"), {key: value for key, value in choice.items() if key != "type"}
    if kind in ("function", "custom"):
        return {"type": kind, kind: rest}
    if kind == "allowed_tools":
        listed: Any = rest.get("tools")
        nested = [_nested(one) for one in listed] if isinstance(listed, list) else listed
        return {"type": "allowed_tools", "allowed_tools": {**rest, "tools": nested}}
    problem = "tool_choice must be none, auto, required, or an object of type function, custom or allowed_tools"
    raise invalid("tool_choice", problem)


def _nested(tool: Any) -> Any:
    kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
    return {"type": kind, str(kind): tool}


def _told(value: Mapping[str, Any], field: str, known: tuple[str, ...], no_effect: tuple[str, ...]) -> list[str]:
    """Return the names of keys without effect.

    Raises:
        ApiError: a key is unknown.
    """
    for key in value:
        if key not in (*known, *no_effect):
            name = f"{field}.{key[:50]}"
            raise invalid(name, f"unknown field {name!r}; known are {', '.join((*known, *no_effect))}")
    return [f"{field}.{key}" for key in no_effect if value.get(key)]
