"""Formats of a model's answers, found from its chat template and vocabulary, each with the reason of the choice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phonograph.config.server_config import REASONING_FORMATS_GROUP, TOOL_FORMATS_GROUP, ServerConfig
from phonograph.errors import ConfigError, cause_text
from phonograph.text.formats.answer_parts import Found, ToolParser
from phonograph.text.formats.call_layouts import DEEPSEEK, HERMES, LLAMA, MISTRAL, PYTHONIC, XML, CallLayout
from phonograph.text.formats.format_plugins import load_plugin
from phonograph.text.formats.json_calls import Hermes, JsonCalls
from phonograph.text.formats.marked_calls import DeepSeekCalls, MistralCalls
from phonograph.text.formats.python_calls import PythonicCalls
from phonograph.text.formats.reasoning import ReasoningFormat, ReasoningMarkers
from phonograph.text.formats.xml_calls import XmlCalls
from phonograph.text.tokenizer import Tokenizer

Functions = Mapping[str, Mapping[str, Any]]
"""Functions of a request by name, each with the JSON Schema of its parameters."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Form in which a model writes calls.

    parser:  makes the parser of one answer
    sign:    expression that templates of this form contain; forms of other packages are selected by name only
    token:   token of the vocabulary that begins a call, if there is one
    other:   expression that only templates of other forms contain
    markers: special tokens that the text of an answer must show
    layouts: layouts of calls that a grammar can hold; the template shows which one the model writes
    short_ids: ids of calls have 9 characters, as the templates of this form require
    """

    name: str
    parser: Callable[[Functions], ToolParser]
    sign: str = r"(?!)"
    token: str | None = None
    other: str = r"(?!)"
    markers: tuple[str, ...] = ()
    layouts: tuple[CallLayout, ...] = ()
    short_ids: bool = False

    def fits(self, template: str) -> bool:
        """Return True if a template has this form."""
        return re.search(self.sign, template) is not None and re.search(self.other, template) is None

    def layout_of(self, template: str) -> CallLayout | None:
        """Return the layout that a template shows, if a grammar can hold one of the form."""
        return next((layout for layout in self.layouts if re.search(layout.sign, template)), None)


_TOOL_CALL = "<tool_call>"
_MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    form.name: form
    for form in (
        ToolFormat("qwen3_coder", XmlCalls, r"(?s)<function=.*<parameter=", "<tool_call>", layouts=XML),
        ToolFormat("hermes", Hermes, r"<tool_call>", _TOOL_CALL, other=r"<arg_key>|<function=", layouts=HERMES),
        ToolFormat("deepseek_v3", DeepSeekCalls, r"<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>", layouts=DEEPSEEK),
        ToolFormat(
            "mistral", MistralCalls, r"\[TOOL_CALLS\]", _MISTRAL[0], markers=_MISTRAL, short_ids=True, layouts=MISTRAL
        ),
        ToolFormat(
            "pythonic",
            PythonicCalls,
            r"\[\w+\(\w+ ?=",
            other=r"<\|tool_call_start\|>|<TOOLCALL>",
            layouts=PYTHONIC,
        ),
        ToolFormat(
            "llama3_json", JsonCalls, r"""'"parameters": |"name": function name, "parameters":""", layouts=LLAMA
        ),
    )
}
"""Forms of calls, in the order of preference where several fit."""

_THINK = ("<think>", "</think>")
_MARKERS: Mapping[str, tuple[str, str]] = {
    "mistral": ("[THINK]", "[/THINK]"),
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
}
_DEEPSEEK = "<｜Assistant｜>"
"""Marker of a turn in the templates of models whose answers may lack the opening marker."""
_SWITCH = re.compile(r"\b(?:enable_)?thinking\b")
"""Variable of templates whose models answer without reasoning too. In them an opening marker is never missing."""


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats of a model's answers, or None where there is none.

    notes:  each choice with its reason
    layout: layout of calls for grammars
    """

    reasoning: ReasoningFormat | None
    tools: ToolFormat | None
    notes: tuple[str, ...]
    layout: CallLayout | None = None


def find_formats(
    tokenizer: Tokenizer,
    template: str | None,
    *,
    reasoning_parser: str | None,
    tool_call_parser: str | None,
    finds_tools: bool = True,
) -> Formats:
    """Return the formats of a model's answers.

    Args:
        tokenizer: vocabulary of the model.
        template: chat template.
        reasoning_parser: name of the format of reasoning; None searches it.
        tool_call_parser: name of the format of calls; None searches it.
        finds_tools: False for none.

    Raises:
        ConfigError: the vocabulary has not the tokens of the format of reasoning, or a package's format does not work.
    """
    reasoning, why_reasoning = _reasoning(tokenizer, template or "", reasoning_parser)
    tools, why_tools = (
        _tools(tokenizer, template or "", tool_call_parser)
        if finds_tools
        else (None, "enable_auto_tool_choice is false")
    )
    found = [("reasoning", reasoning, why_reasoning), ("tool calls", tools, why_tools)]
    notes = tuple(f"{what}: {'none' if form is None else form.name} ({why})" for what, form, why in found)
    return Formats(reasoning, tools, notes, None if tools is None else tools.layout_of(template or ""))


def check_formats(config: ServerConfig) -> None:
    """Check the formats that the settings name, before a model is loaded.

    Raises:
        ConfigError: a package's format does not work.
    """
    if config.tool_call_parser is not None:
        _named_tools(config.tool_call_parser)
    if config.reasoning_parser is not None:
        _named_reasoning(config.reasoning_parser)


def _named_tools(name: str) -> tuple[ToolFormat, str]:
    """Return the form of calls that `tool_call_parser` names, with the reason of the choice."""
    reason = "set by tool_call_parser"
    plugin = load_plugin("tool_call_parser", name, TOOL_FORMATS_GROUP, ToolFormat, TOOL_FORMATS)
    if plugin is None:
        return TOOL_FORMATS[name], reason
    form, package = plugin
    try:
        parser: Any = form.parser({"function": {}})
        found: Any = parser.push("")
        works = isinstance(found, Found) and isinstance(parser, ToolParser)
        problem = "must have num_calls, finish, and push that returns Found"
    except Exception as error:  # whatever another package's parser raises
        works, problem = False, cause_text(error)
    if not works:
        raise ConfigError("tool_call_parser", name, f"the parser of the package {package} does not work: {problem}")
    return form, f"{reason}, from the package {package}"


def _named_reasoning(name: str) -> tuple[ReasoningMarkers | None, str]:
    """Return the markers that `reasoning_parser` names, or None for none, with the reason of the choice."""
    reason = "set by reasoning_parser"
    plugin = load_plugin("reasoning_parser", name, REASONING_FORMATS_GROUP, ReasoningMarkers, {*_MARKERS, "none"})
    if plugin is not None:
        return plugin[0], f"{reason}, from the package {plugin[1]}"
    return None if name == "none" else _built_in(name), reason


def _tools(tokenizer: Tokenizer, template: str, name: str | None) -> tuple[ToolFormat | None, str]:
    if name is not None:
        return _named_tools(name)
    fitting = [form for form in TOOL_FORMATS.values() if form.fits(template)]
    if not fitting:
        return None, "the chat template has no known form of calls; tool_call_parser sets one"
    # The template may mention several. The vocabulary has the markers that the model was trained with.
    ranked = sorted(fitting, key=lambda form: form.token is None or tokenizer.token_id(form.token) is None)
    reason = "by the chat template"
    if len(ranked) > 1:
        others = " and ".join(form.name for form in ranked[1:])
        reason += f"; {others} would fit too: tool_call_parser chooses"
    return ranked[0], reason


def _reasoning(tokenizer: Tokenizer, template: str, name: str | None) -> tuple[ReasoningFormat | None, str]:
    if name is not None:
        markers, reason = _named_reasoning(name)
        form = None if markers is None else _with_tokens(tokenizer, markers)
        if markers is not None and form is None:
            problem = f"needs the tokens {markers.start} and {markers.end}, which the vocabulary has not; none works"
            raise ConfigError("reasoning_parser", name, problem)
        return form, reason
    think = "deepseek_r1" if _DEEPSEEK in template and not _SWITCH.search(template) else "qwen3"
    names = [one for one in ("mistral", think) if _MARKERS[one][1] in template]
    forms = [form for form in (_with_tokens(tokenizer, _built_in(one)) for one in names) if form is not None]
    if not names:
        return None, "the chat template has no known marker of reasoning; reasoning_parser sets one"
    if not forms:
        return None, f"the chat template has {_MARKERS[names[0]][1]}, which is no token of the vocabulary"
    reason = f"the chat template has {forms[0].end}"
    if len(forms) > 1:
        reason += f"; {forms[1].name} would fit too: reasoning_parser chooses"
    return forms[0], reason


def _built_in(name: str) -> ReasoningMarkers:
    return ReasoningMarkers(name, *_MARKERS[name], always=name == "deepseek_r1")


def _with_tokens(tokenizer: Tokenizer, markers: ReasoningMarkers) -> ReasoningFormat | None:
    """Return a format with the tokens of its markers; None if the vocabulary has not both."""
    start_id, end_id = map(tokenizer.token_id, (markers.start, markers.end))
    if start_id is None or end_id is None:
        return None
    return ReasoningFormat(
        name=markers.name,
        start=markers.start,
        end=markers.end,
        start_id=start_id,
        end_id=end_id,
        always=markers.always,
    )
