"""Formats by the chat template and the vocabulary: each family, none, several, and those that a setting names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phonograph.errors import ConfigError
from phonograph.text.formats.find_formats import TOOL_FORMATS, Formats, find_formats
from phonograph.text.formats.reasoning import Opening, ReasoningFormat
from phonograph.text.formats.template_variables import template_variables
from phonograph.text.tokenizer import Tokenizer


class Vocabulary:
    """Stands for a tokenizer whose tokens are these texts, and which decodes ids as them."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def token_id(self, piece: str) -> int | None:
        return self.tokens.index(piece) if piece in self.tokens else None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(self.tokens[token_id] for token_id in token_ids)


EVERY = Vocabulary("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "[TOOL_CALLS]", "<｜tool▁call▁begin｜>")
# Each has the marks of one family's templates, in words of our own.
HERMES = """{{ tools }} call as <tool_call>{"name": ..., "arguments": ...}</tool_call>"""
QWEN3 = HERMES + "{% if '</think>' in text %}{% endif %}{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"
CODER = "<tool_call>\n<function=example>\n<parameter=one>\n</parameter>\n</function>\n</tool_call>"
LLAMA = """Answer as {"name": function name, "parameters": dictionary}"""
LLAMA_TURN = """{{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}{{- call.arguments | tojson }}"""
PYTHONIC = "Answer with [func_name(one=1, two=2), other()]"
MISTRAL = "{{ '[TOOL_CALLS]' + call.name + '[ARGS]' }}"
MAGISTRAL = MISTRAL + "[THINK]{{ message.reasoning }}[/THINK]"
V31 = "<｜Assistant｜><｜tool▁call▁begin｜>{% if thinking %}<think>{% else %}</think>{% endif %}"
R1 = "<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ type }}{{ text.split('</think>')[-1] }}<think>\n"
GLM = "<tool_call>{{ name }}<arg_key>{{ key }}</arg_key></tool_call>"
LFM = "<|tool_call_start|>[func_name(one=1)]<|tool_call_end|>"
TOOL_MARKS = {
    "hermes": HERMES,
    "qwen3_coder": CODER,
    "llama3_json": LLAMA,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "deepseek_v3": R1,
}


def found(template: str | None, vocabulary: Vocabulary = EVERY, **settings: Any) -> Formats:
    settings = {"reasoning_parser": None, "tool_call_parser": None, **settings}
    return find_formats(vocabulary, template, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        (QWEN3, "qwen3", "hermes"),
        (HERMES, None, "hermes"),
        (CODER, None, "qwen3_coder"),
        (LLAMA, None, "llama3_json"),
        (LLAMA_TURN, None, "llama3_json"),
        (PYTHONIC, None, "pythonic"),
        (MISTRAL, None, "mistral"),
        (MAGISTRAL, "mistral", "mistral"),
        (R1, "deepseek_r1", "deepseek_v3"),
        (V31, "qwen3", "deepseek_v3"),
        (GLM, None, None),
        (LFM, None, None),
        ("{{ messages }}", None, None),
        ("", None, None),
        (None, None, None),
    ],
)
def test_each_family_by_its_template(template: str | None, reasoning: str | None, tools: str | None) -> None:
    formats = found(template)
    assert (formats.reasoning and formats.reasoning.name, formats.tools and formats.tools.name) == (reasoning, tools)
    about_reasoning, about_tools = formats.notes
    assert about_reasoning.startswith(f"reasoning: {reasoning or 'none'} (the chat template has ")
    assert about_tools.startswith(f"tool calls: {tools or 'none'} (")
    assert ("tool_call_parser sets one" in about_tools) == (tools is None)


def test_every_form_has_a_template_here() -> None:
    assert TOOL_MARKS.keys() == TOOL_FORMATS.keys()


def test_of_two_that_fit_the_vocabulary_decides() -> None:
    both = MISTRAL + LLAMA
    formats = found(both)
    assert formats.tools is TOOL_FORMATS["mistral"] and "llama3_json would fit too" in formats.notes[1]
    both = HERMES + MISTRAL
    assert found(both, Vocabulary("[TOOL_CALLS]")).tools is TOOL_FORMATS["mistral"]
    assert found(both, Vocabulary("<tool_call>")).tools is TOOL_FORMATS["hermes"]
    formats = found(both, Vocabulary())
    assert formats.tools is TOOL_FORMATS["hermes"] and "mistral would fit too" in formats.notes[1]
    both = QWEN3 + MAGISTRAL
    assert "qwen3 would fit too: reasoning_parser chooses" in found(both).notes[0]
    one = found(both, Vocabulary("<think>", "</think>"))
    assert one.reasoning is not None and one.reasoning.name == "qwen3" and "would fit" not in one.notes[0]


def test_settings_go_before_the_template() -> None:
    formats = found(QWEN3, reasoning_parser="none", tool_call_parser="pythonic")
    assert formats.reasoning is None and formats.tools is TOOL_FORMATS["pythonic"]
    assert formats.notes == (
        "reasoning: none (set by reasoning_parser)",
        "tool calls: pythonic (set by tool_call_parser)",
    )
    formats = found("", reasoning_parser="deepseek_r1")
    assert formats.reasoning is not None and formats.reasoning.always and formats.reasoning.end_id == 1
    off = found(QWEN3, finds_tools=False, tool_call_parser="hermes")
    assert off.tools is None and off.notes[1] == "tool calls: none (enable_auto_tool_choice is false)"


def test_markers_that_are_no_tokens() -> None:
    formats = found(QWEN3, Vocabulary("<think>"))
    assert formats.reasoning is None and "</think>, which is no token of the vocabulary" in formats.notes[0]
    with pytest.raises(ConfigError, match=r"reasoning_parser='mistral'.*\[THINK\] and \[/THINK\].*none works"):
        found(QWEN3, Vocabulary("<think>", "</think>"), reasoning_parser="mistral")


@pytest.mark.parametrize(
    ("prompt", "continued", "opening"),
    [
        ("<u>Hi<a>\n", None, Opening.OPEN),
        ("<u>Hi<a>\n<think>\n", None, Opening.INSIDE),
        ("<u>Hi<a>\n<think>\n\n</think>\n\n", None, Opening.OUTSIDE),
        # What a user writes is not the template's.
        ("<u><think>Hi<a>\n", None, Opening.OPEN),
        ("<u>Hi<a>\n<think>So", {"content": "<think>So"}, Opening.INSIDE),
        ("<u>Hi<a>\n<think>So</think>Yes", {"content": "<think>So</think>Yes"}, Opening.OUTSIDE),
        ("<u>Hi<a>\nYes", {"content": "Yes"}, Opening.OUTSIDE),
        ("<u>Hi<a>\n", {"content": None}, Opening.OUTSIDE),
    ],
)
def test_the_prompt_opens_or_closes_reasoning(prompt: str, continued: Any, opening: Opening) -> None:
    vocabulary = Vocabulary(*dict.fromkeys(["<think>", "</think>", "<u>", "<a>", "\n", *prompt]))
    token_ids: list[int] = []
    while prompt:
        piece = next(one for one in vocabulary.tokens if prompt.startswith(one))
        token_ids.append(vocabulary.tokens.index(piece))
        prompt = prompt[len(piece) :]
    form = found(QWEN3, vocabulary).reasoning
    assert isinstance(form, ReasoningFormat)
    assert form.opening(vocabulary, token_ids, continued) is opening  # type: ignore[arg-type]


def test_variables_of_a_template() -> None:
    template = (
        "{% set own = 1 %}{% generation %}{% for message in messages %}{{ message.content ~ own }}"
        "{% if loop.first %}{% continue %}{% endif %}{% endfor %}{%- endgeneration -%}"
        "{% if enable_thinking is defined and not enable_thinking %}{{ effort | upper }}{% endif %}"
    )
    assert template_variables(template) == {"messages", "enable_thinking", "effort"}
    assert template_variables("{% if %}") is None


def test_the_text_of_several_templates() -> None:
    for template, text in (("one", "one"), (None, None), ({"default": "one", "tool_use": "two"}, "one\ntwo")):
        backend = SimpleNamespace(get_added_tokens_decoder=dict, decoder=None, truncation=None, padding=None)
        of_library = SimpleNamespace(backend_tokenizer=backend, chat_template=template, apply_chat_template=len)
        tokenizer = Tokenizer(of_library)
        assert tokenizer.template_text == text
