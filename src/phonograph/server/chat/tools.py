"""Tools of a chat: validation, the template's input, and the schema that forces a call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import RequestError, quoted
from phonograph.server.chat.custom_tools import custom_tool
from phonograph.server.http.api_errors import api_error, invalid
from phonograph.text.formats.call_layouts import CallArguments, CallLayout

MAX_FORCED_CALLS = 16
"""Maximum calls of an answer with required calls; weak models do not stop by themselves."""
Form = Literal["parsed", "named", "required"]
_NO_MARKER = re.compile(r"[^\s<>{}\[\]`]+")
_PLAIN_NAMES = {"json": _NO_MARKER, "tags": _NO_MARKER, "keywords": re.compile(r"[\w.-]+")}
"""Names that calls without quotes around them can have, by the form of the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Permitted use of tools.

    form:     "parsed": calls are found in the text; "named": the output is the arguments of one function; "required":
        the output is a list of calls
    tools:    functions for the template
    function: name of the function, if `form` is "named"
    parallel: an answer may have several calls
    custom:   names of custom tools among the functions
    formed:   those whose input has a grammar
    grammars: grammars in Lark of custom tools; those that are regular expressions are in their functions' parameters
    """

    form: Form
    tools: list[dict[str, Any]]
    function: str | None = None
    parallel: bool = True
    custom: frozenset[str] = frozenset()
    formed: frozenset[str] = frozenset()
    grammars: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def has_strict(self) -> bool:
        """True if a function asks for arguments that fit its schema."""
        return any(tool["function"].get("strict") for tool in self.tools)

    @property
    def is_raw(self) -> bool:
        """True if the output is the input of a custom tool, in the form of its grammar."""
        return self.form == "named" and self.function in self.grammars

    def tagged(self, layout: CallLayout, tokens: Mapping[str, int]) -> StructuredOutputs:
        """Return the constraint that holds the arguments of the model's calls to the schemas of strict functions.

        Args:
            layout: layout of the model's calls.
            tokens: ids of special tokens that its texts name.

        Raises:
            ApiError: a schema or a name cannot be part of a constraint.
        """
        functions: dict[str, CallArguments] = {}
        for tool in self.tools:
            function, name = tool["function"], tool["function"]["name"]
            if layout.plain and not _PLAIN_NAMES[layout.form].fullmatch(name):
                problem = f"the model writes names without quotes, so that no grammar holds the name {quoted(name)}"
                raise invalid("tools", problem)
            is_strict = function.get("strict") or name in self.custom
            schema = _as_object(function.get("parameters") or {}) if is_strict else {"type": "object"}
            functions[name] = CallArguments(schema, self.grammars.get(name) if layout.form == "tags" else None)
        try:
            return StructuredOutputs(structural_tag=layout.structural_tag(functions, tokens))
        except RequestError as error:
            raise api_error(error, {"structural_tag": "tools"}) from None

    @property
    def structured(self) -> StructuredOutputs | None:
        """Schema that forces the calls, or None.

        Raises:
            ApiError: the parameters of a function cannot be part of a schema.
        """
        if self.form == "parsed":
            return None
        try:
            return self._forced()
        except RequestError as error:
            raise api_error(error, {"json": "tools", "grammar": "tools"}) from None

    def _forced(self) -> StructuredOutputs:
        functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}
        if self.form == "named":
            assert self.function is not None
            if self.is_raw:
                return StructuredOutputs(grammar=self.grammars[self.function])
            return StructuredOutputs(json=_as_object(functions[self.function]))
        # Each function's parameters are a separate schema resource, so that their references resolve within it.
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{index}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for index, name in enumerate(functions)
        ]
        places = {
            str(index): {**_as_object(schema), "$id": f"http://tools/{index}/"}
            for index, schema in enumerate(functions.values())
        }
        most = MAX_FORCED_CALLS if self.parallel else 1
        array = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": most, "$defs": places}
        return StructuredOutputs(json=array)


def read_tools(tools: list[Any] | None, choice: Any, parallel: bool | None) -> ToolChoice | None:
    """Return the tool choice of a request; None if the model must not call functions.

    Raises:
        ApiError: the tools or the choice are wrong.
    """
    if not tools:
        if choice not in (None, "none"):
            raise invalid("tool_choice", "tool_choice needs tools")
        return None
    return chosen_tools([_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)], choice, parallel)


def chosen_tools(read: list[dict[str, Any]], choice: Any, parallel: bool | None) -> ToolChoice | None:
    """Return the tool choice among checked functions; None if the model must not call functions.

    Raises:
        ApiError: the choice is wrong.
    """
    custom = frozenset(tool["function"]["name"] for tool in read if tool["type"] == "custom")
    formed = frozenset(tool["function"]["name"] for tool in read if tool.get("has_form"))
    grammars: dict[str, str] = {tool["function"]["name"]: tool["grammar"] for tool in read if tool.get("grammar")}
    read = [{"type": "function", "function": tool["function"]} for tool in read]
    names = [tool["function"]["name"] for tool in read]
    if len(set(names)) < len(names):
        raise invalid("tools", "two functions have the same name")
    if choice == "none":
        return None
    several = parallel is not False
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        read, choice = _allowed(read, choice)
    if choice in (None, "auto"):
        return ToolChoice(form="parsed", tools=read, parallel=several, custom=custom, formed=formed, grammars=grammars)
    if choice == "required":
        return ToolChoice(
            form="required", tools=read, parallel=several, custom=custom, formed=formed, grammars=grammars
        )
    name = _chosen_name(choice)
    if name is None:
        raise invalid("tool_choice", "tool_choice must be none, auto, required or an object that names a function")
    if name not in names:
        raise invalid("tool_choice", f"tool_choice names {name[:100]!r}, which is not among the tools")
    return ToolChoice(form="named", tools=read, function=name, custom=custom, formed=formed, grammars=grammars)


def _chosen_name(choice: Any) -> str | None:
    """Return the name in an object that names a function or a custom tool."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    about = choice.get(kind) if kind in ("function", "custom") else None
    name = about.get("name") if isinstance(about, dict) else None
    return name if isinstance(name, str) else None


def _allowed(tools: list[dict[str, Any]], choice: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """Return the tools that a choice allows, and its mode.

    Raises:
        ApiError: the mode is wrong, or a name is not among the tools.
    """
    allowed = choice.get("allowed_tools")
    about: dict[str, Any] = allowed if isinstance(allowed, dict) else {}
    mode, listed = about.get("mode"), about.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        problem = "allowed_tools must have the mode auto or required, and a list of tools"
        raise invalid("tool_choice.allowed_tools", problem)
    by_name = {tool["function"]["name"]: tool for tool in tools}
    found: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(cast("list[Any]", listed)):
        name = _chosen_name(tool)
        if name is None or name not in by_name:
            where = f"tool_choice.allowed_tools.tools[{index}]"
            raise invalid(where, f"{where} must name a function of the tools")
        found[name] = by_name[name]
    return list(found.values()), mode


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if isinstance(tool, dict) and tool.get("type") == "custom":
        return custom_tool(tool.get("custom"), f"{where}.custom")
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise invalid(where, f"{where} must be an object of type function with a function")
    return function_tool(function, f"{where}.function")


def function_tool(function: dict[str, Any], where: str, *, parameters: str = "parameters") -> dict[str, Any]:
    """Return a function in the form of OpenAI's chats, which templates expect.

    Args:
        function: name, description, parameters and `strict`.
        where: its place in the request.
        parameters: the request's name of the parameters.

    Raises:
        ApiError: it is no such function.
    """
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise invalid(f"{where}.name", "a function needs a name")
    if any("\ud800" <= character <= "\udfff" for character in function["name"]):
        raise invalid(f"{where}.name", "the name is not valid Unicode (lone surrogate)")
    for key, kind in (("description", str), (parameters, dict), ("strict", bool)):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise invalid(f"{where}.{key}", f"{key} of a function must be a {kind.__name__}")
    for key in function:
        if key not in ("name", "description", parameters, "strict"):
            raise invalid(where, f"unknown key {key[:50]!r} in a function")
    function = {"parameters" if key == parameters else key: value for key, value in function.items()}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _as_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of arguments as that of an object; no schema means an empty object."""
    return schema if {"type", "$ref"} & schema.keys() else {"type": "object", **(schema or {"properties": {}})}
