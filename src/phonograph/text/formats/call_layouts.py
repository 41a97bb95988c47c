"""Layouts of calls in an answer: the texts around the arguments, from which a grammar of strict calls is made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

NAME = "NAME"
"""Placeholder of a function's name in the texts of a layout."""


class CallArguments(NamedTuple):
    """Arguments of one function.

    schema:  JSON Schema of the arguments
    grammar: grammar of the only argument in llguidance's Lark, which only the form "tags" can hold
    """

    schema: Mapping[str, Any]
    grammar: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLayout:
    """Layout of the calls of one form.

    begins:    texts before the arguments of a call; each begins with a trigger, unless the calls are a list
    end:       text after the arguments
    triggers:  texts that begin a call anywhere in an answer; without any, calls are the whole answer
    sign:      expression that templates with this layout contain
    form:      form of the arguments
    separator: text between the calls of a list; None if each call has a trigger
    opening:   text before the calls of a list
    closing:   text after the calls of a list
    plain:     the name is plain text, not JSON text
    markers:   special tokens that the texts name
    around:    special tokens that may stand before and after the calls, if calls are the whole answer
    unlike:    expression of the beginnings of text that are calls, if calls are the whole answer
    """

    begins: tuple[str, ...]
    end: str
    triggers: tuple[str, ...] = ()
    sign: str = ""
    form: Literal["json", "keywords", "tags"] = "json"
    separator: str | None = None
    opening: str = ""
    closing: str = ""
    plain: bool = False
    markers: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    unlike: str = ""

    def structural_tag(self, functions: Mapping[str, CallArguments], tokens: Mapping[str, int]) -> dict[str, Any]:
        """Return the structural tag of an answer with calls.

        Args:
            functions: arguments of each function.
            tokens: ids of the special tokens among `markers` and `around`.
        """
        structures: list[dict[str, Any]] = []
        for name, arguments in functions.items():
            shown = name if self.plain else json.dumps(name, ensure_ascii=False)
            more = {} if arguments.grammar is None else {"grammar": arguments.grammar}
            for begin in self.begins:
                about = {"begin": begin.replace(NAME, shown), "schema": arguments.schema, "end": self.end}
                structures.append({**about, "form": self.form, **more})
        layout: dict[str, Any] = {"tokens": {name: tokens[name] for name in self.markers if name in tokens}}
        if self.separator is not None:
            layout |= {"separator": self.separator, "opening": self.opening, "closing": self.closing}
        if not self.triggers:
            layout["unlike"] = self.unlike.replace(NAME, any_of(functions))
            layout["around"] = [tokens[name] for name in self.around if name in tokens]
        return {"triggers": [*self.triggers], "structures": structures, "layout": layout}


def any_of(texts: Iterable[str]) -> str:
    """Return a regular expression of texts."""
    return f"({'|'.join(map(escaped, texts))})"


def escaped(text: str) -> str:
    """Return a regular expression of a text, in the syntax of the grammar's library."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)


_TOOL_CALL = "<tool_call>"
_MISTRAL = "[TOOL_CALLS]"
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_MISTRAL_LIST = CallLayout(
    begins=(f'{{"name": {NAME}, "arguments": ',),
    end="}",
    triggers=(_MISTRAL,),
    separator=", ",
    opening=" [",
    closing="]",
    markers=(_MISTRAL,),
)

HERMES = (
    CallLayout(
        begins=(f'{_TOOL_CALL}\n{{"name": {NAME}, "arguments": ',), end="}\n</tool_call>", triggers=(_TOOL_CALL,)
    ),
)
XML = (
    CallLayout(
        begins=(f"{_TOOL_CALL}\n<function={NAME}>\n", f"<function={NAME}>\n"),
        end="</function>\n</tool_call>",
        triggers=(_TOOL_CALL, "<function="),
        form="tags",
        plain=True,
    ),
)
MISTRAL = (
    CallLayout(
        begins=(f"{_MISTRAL}{NAME}[ARGS]",),
        end="",
        triggers=(_MISTRAL,),
        sign=r"\[ARGS\]",
        plain=True,
        markers=(_MISTRAL, "[ARGS]"),
    ),
    replace(_MISTRAL_LIST, sign=r"\[TOOL_CALLS\]\[", opening="["),
    _MISTRAL_LIST,
)
DEEPSEEK = (
    CallLayout(
        begins=tuple(f"{begin}function{_SEPARATOR}{NAME}\n```json\n" for begin in ("".join(_DEEPSEEK), _DEEPSEEK[1])),
        end="\n```<｜tool▁call▁end｜>",
        triggers=_DEEPSEEK,
        sign="```json",
        plain=True,
    ),
    CallLayout(
        begins=tuple(f"{begin}{NAME}{_SEPARATOR}" for begin in ("".join(_DEEPSEEK), _DEEPSEEK[1])),
        end="<｜tool▁call▁end｜>",
        triggers=_DEEPSEEK,
        plain=True,
    ),
)
PYTHONIC = (
    CallLayout(
        begins=(f"{NAME}(",),
        end=")",
        form="keywords",
        separator=", ",
        opening="[",
        closing="]",
        plain=True,
        around=("<|python_start|>", "<|python_tag|>", "<|python_end|>"),
        unlike=rf"\s*({any_of(('<|python_start|>', '<|python_tag|>'))}\s*)*\[\s*{NAME}\s*\(",
    ),
)
LLAMA = (
    CallLayout(
        begins=(f'{{"name": {NAME}, "parameters": ',),
        end="}",
        separator="; ",
        around=("<|python_tag|>",),
        unlike=rf"\s*({any_of(('<|python_tag|>',))}\s*)?\{{",
    ),
)
