"""Formats of a model's answers, found from its chat template and vocabulary, each with the reason of the choice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phonograph.config.server_config import ReasoningParser, ToolCallParser
from phonograph.errors import ConfigError
from phonograph.text.formats.answer_parts import ToolParser
from phonograph.text.formats.call_layouts import DEEPSEEK, HERMES, LLAMA, MISTRAL, PYTHONIC, XML, CallLayout
from phonograph.text.formats.json_calls import Hermes, JsonCalls
from phonograph.text.formats.marked_calls import DeepSeekCalls, MistralCalls
from phonograph.text.formats.python_calls import PythonicCalls
from phonograph.text.formats.reasoning import ReasoningFormat
from phonograph.text.formats.xml_calls import XmlCalls
from phonograph.text.tokenizer import Tokenizer

Functions = Mapping[str, Mapping[str, Any]]
"""Functions of a request by name, each with the JSON Schema of its parameters."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Form in which a model writes calls.

    sign:    expression that templates of this form contain
    token:   token of the vocabulary that begins a call, if there is one
    parser:  makes the parser of one answer
    other:   expression that only templates of other forms contain
    markers: special tokens that the text of an answer must show
    layouts: layouts of calls that a grammar can hold; the template shows which one the model writes
    short_ids: ids of calls have 9 characters, as the templates of this form require
    """

    name: ToolCallParser
    sign: str
    token: str | None
    parser: Callable[[Functions], ToolParser]
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
TOOL_FORMATS: Mapping[ToolCallParser, ToolFormat] = {
    form.name: form
    for form in (
        ToolFormat("qwen3_coder", r"(?s)<function=.*<parameter=", "<tool_call>", XmlCalls, layouts=XML),
        ToolFormat("hermes", r"<tool_call>", _TOOL_CALL, Hermes, other=r"<arg_key>|<function=", layouts=HERMES),
        ToolFormat("deepseek_v3", r"<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>", DeepSeekCalls, layouts=DEEPSEEK),
        ToolFormat(
            "mistral", r"\[TOOL_CALLS\]", _MISTRAL[0], MistralCalls, markers=_MISTRAL, short_ids=True, layouts=MISTRAL
        ),
        ToolFormat(
            "pythonic",
            r"\[\w+\(\w+ ?=",
            None,
            PythonicCalls,
            other=r"<\|tool_call_start\|>|<TOOLCALL>",
            layouts=PYTHONIC,
        ),
        ToolFormat(
            "llama3_json", r"""'"parameters": |"name": function name, "parameters":""", None, JsonCalls, layouts=LLAMA
        ),
    )
}
"""Forms of calls, in the order of preference where several fit."""

_THINK = ("<think>", "</think>")
_MARKERS: Mapping[ReasoningParser, tuple[str, str]] = {
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
    reasoning_parser: ReasoningParser | None,
    tool_call_parser: ToolCallParser | None,
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
        ConfigError: the vocabulary has not the tokens of the format of reasoning.
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


def _tools(tokenizer: Tokenizer, template: str, name: ToolCallParser | None) -> tuple[ToolFormat | None, str]:
    if name is not None:
        return TOOL_FORMATS[name], "set by tool_call_parser"
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


def _reasoning(tokenizer: Tokenizer, template: str, name: ReasoningParser | None) -> tuple[ReasoningFormat | None, str]:
    if name == "none":
        return None, "set by reasoning_parser"
    if name is not None:
        form = _with_tokens(tokenizer, name)
        if form is None:
            problem = f"needs the tokens {' and '.join(_MARKERS[name])}, which the vocabulary has not; none works"
            raise ConfigError("reasoning_parser", name, problem)
        return form, "set by reasoning_parser"
    think: ReasoningParser = "deepseek_r1" if _DEEPSEEK in template and not _SWITCH.search(template) else "qwen3"
    names: list[ReasoningParser] = [one for one in ("mistral", think) if _MARKERS[one][1] in template]
    forms = [form for form in (_with_tokens(tokenizer, one) for one in names) if form is not None]
    if not names:
        return None, "the chat template has no known marker of reasoning; reasoning_parser sets one"
    if not forms:
        return None, f"the chat template has {_MARKERS[names[0]][1]}, which is no token of the vocabulary"
    reason = f"the chat template has {forms[0].end}"
    if len(forms) > 1:
        reason += f"; {forms[1].name} would fit too: reasoning_parser chooses"
    return forms[0], reason


def _with_tokens(tokenizer: Tokenizer, name: ReasoningParser) -> ReasoningFormat | None:
    """Return a format with the tokens of its markers; None if the vocabulary has not both."""
    start, end = _MARKERS[name]
    start_id, end_id = map(tokenizer.token_id, (start, end))
    if start_id is None or end_id is None:
        return None
    return ReasoningFormat(
        name=name, start=start, end=end, start_id=start_id, end_id=end_id, always=name == "deepseek_r1"
    )
