"""Grammars of strict calls in every form: what they allow is parsed to calls whose arguments fit their schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from phonograph.config.engine_config import EngineConfig
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import RequestError
from phonograph.server.chat.answer_reader import AnswerReader
from phonograph.server.chat.tools import ToolChoice, read_tools
from phonograph.server.http.api_errors import ApiError
from phonograph.structured.compiler import GrammarCompiler
from phonograph.structured.vocabulary import Vocabulary
from phonograph.text.formats.answer_parts import Found
from phonograph.text.formats.call_layouts import (
    DEEPSEEK,
    HERMES,
    LLAMA,
    MISTRAL,
    PYTHONIC,
    XML,
    CallLayout,
)
from phonograph.text.formats.find_formats import TOOL_FORMATS
from phonograph.text.tokenizer import Tokenizer, load_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["C", 'F"', "<b>"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "place": {"$ref": "#/$defs/place"},
        "code": {"type": "string", "pattern": "^[a-c]{1,3}$"},
        "short": {"type": "string", "minLength": 1, "maxLength": 3},
        "either": {"type": ["string", "null"], "maxLength": 2},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["unit", "place"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}},
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY: dict[str, Any] = {"type": "object"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
    for name, schema, strict in (("add", SCHEMA, True), ("now", EMPTY, True), ("free", ANY, False))
]
ARGUMENTS = '{"unit": "C", "days": 3, "place": {"x": 1}, "either": null, "flags": [true]}'
KEYWORDS = 'unit="C", days=3, place={"x": 1}, either=null, flags=[true]'
TAGS = "".join(
    f"<parameter={name}>\n{value}\n</parameter>\n"
    for name, value in (("unit", "C"), ("days", "3"), ("place", '{"x": 1}'), ("either", "null"), ("flags", "[true]"))
)
CALL_END = "<｜tool▁call▁end｜>"
BEGINS, BEGIN, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CASES: dict[str, tuple[str, CallLayout, str, str, str]] = {
    "hermes": (
        *("hermes", HERMES[0]),
        f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>',
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Yes. ",
    ),
    "qwen3_coder": (
        *("qwen3_coder", XML[0]),
        f"<tool_call>\n<function=add>\n{TAGS}</function>\n</tool_call>",
        "\n<function=now>\n</function>\n</tool_call>",
        "Yes. ",
    ),
    "mistral": (*("mistral", MISTRAL[0], f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}", "[TOOL_CALLS]now[ARGS]{}", "Yes. "),),
    "mistral list": (
        *("mistral", MISTRAL[2]),
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}',
        ', {"name": "now", "arguments": {}}]',
        "Yes. ",
    ),
    "deepseek v3": (
        *("deepseek_v3", DEEPSEEK[0]),
        f"{BEGINS}{BEGIN}function{SEP}add\n```json\n{ARGUMENTS}\n```{CALL_END}",
        f"\n{BEGIN}function{SEP}now\n```json\n{{}}\n```{CALL_END}<｜tool▁calls▁end｜>",
        "Yes. ",
    ),
    "deepseek v3.1": (
        *("deepseek_v3", DEEPSEEK[1], f"{BEGINS}{BEGIN}add{SEP}{ARGUMENTS}{CALL_END}"),
        *(f"{BEGIN}now{SEP}{{}}{CALL_END}<｜tool▁calls▁end｜>", "Yes. "),
    ),
    "pythonic": ("pythonic", PYTHONIC[0], f"[add({KEYWORDS})", ", now()]", ""),
    "llama": (
        *("llama3_json", LLAMA[0], f'{{"name": "add", "parameters": {ARGUMENTS}}}'),
        *('; {"name": "now", "parameters": {}}', ""),
    ),
}
"""Form, layout, a call, what a second call adds, and text that may come first."""
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|python_start|>", "<|python_end|>", "<|python_tag|>")
SIZE = 2048
TEXTS = ("", "Hello [1].", '["a"] {', "a < b <tool", "[add] [foo(1)]", "add(1)")
CHOICE = ToolChoice(form="parsed", tools=TOOLS)


class Setting:
    """The demo model's vocabulary, with special tokens if `has_special`, and its compiler."""

    def __init__(self, tokenizer: Tokenizer, has_special: bool) -> None:
        self.tokenizer = tokenizer
        self.tokens = {name: SIZE + index for index, name in enumerate(SPECIAL)} if has_special else {}
        self.eos = tokenizer.eos_token_id or 0
        vocabulary = Vocabulary.of_tokenizer(tokenizer, SIZE, (self.eos,))
        vocabulary = Vocabulary(
            [*vocabulary.tokens, *(name.encode() for name in self.tokens)],
            vocabulary.special | {*self.tokens.values()},
            (self.eos,),
            SIZE + len(self.tokens),
        )
        self.size = vocabulary.size
        self.compiler = GrammarCompiler(lambda: vocabulary, (self.eos,))

    def encode(self, text: str) -> list[int]:
        for name, token_id in self.tokens.items():
            before, marker, after = text.partition(name)
            if marker:
                return [*self.encode(before), token_id, *self.encode(after)]
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def decode(self, token_ids: list[int]) -> str:
        names = {token_id: name for name, token_id in self.tokens.items()}
        data = b"".join(
            names[one].encode() if one in names else self.tokenizer.token_bytes.next(one) or b"" for one in token_ids
        )
        return data.decode("utf-8", "replace")

    def tagged(self, layout: CallLayout, choice: ToolChoice = CHOICE) -> StructuredOutputs:
        names = (*layout.triggers, *layout.markers, *layout.around)
        return choice.tagged(layout, {name: self.tokens[name] for name in names if name in self.tokens})

    def allows(self, structured: StructuredOutputs, text: str) -> bool:
        token_ids = [*self.encode(text), self.eos]
        return self.compiler.request(structured).result(60).matcher().validate(token_ids) == len(token_ids)

    def allowed(self, structured: StructuredOutputs, text: str) -> str:
        """Return the beginning of a text that the grammar allows."""
        token_ids = self.encode(text)
        return self.decode(token_ids[: self.compiler.request(structured).result(60).matcher().validate(token_ids)])


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    tokenizer = load_tokenizer(EngineConfig(model="demo"))
    assert tokenizer is not None
    found = Setting(tokenizer, request.param)
    yield found
    found.compiler.close()


def calls_of(form: str, text: str, choice: ToolChoice = CHOICE) -> tuple[str, list[tuple[str, str]]]:
    """Return content and calls that the form's parser finds."""
    found: Found = AnswerReader(choice, TOOL_FORMATS[form], None).read(text, ended=True)  # type: ignore[index]
    calls: dict[int, tuple[str, str]] = {}
    for delta in found.calls:
        name, arguments = calls.get(delta.index, ("", ""))
        calls[delta.index] = (name or delta.name or "", arguments + delta.arguments)
    return found.content, [*calls.values()]


@pytest.mark.parametrize("case", CASES)
def test_text_and_whole_calls(setting: Setting, case: str) -> None:
    form, layout, call, further, before = CASES[case]
    structured = setting.tagged(layout)
    for text in TEXTS:
        if case == "llama" or "{" not in text:
            assert setting.allows(structured, text) == (case != "llama" or not text.startswith("{")), text
    whole = before + call + further
    assert setting.allows(structured, whole)
    content, calls = calls_of(form, whole)
    assert content.strip() == before.strip()
    assert [name for name, _ in calls] == ["add", "now"]
    assert json.loads(calls[0][1]) == json.loads(ARGUMENTS) and json.loads(calls[1][1]) == {}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("part", "wrong"),
    [("add", "sub"), ("3", "0"), ('"x": 1', '"x": 3'), ("null", '"abc"'), ("[true]", "[1]"), ("days", "hours")],
)
def test_wrong_calls_end_where_they_are_wrong(setting: Setting, case: str, part: str, wrong: str) -> None:
    _, layout, call, _, before = CASES[case]
    structured = setting.tagged(layout)
    place = call.rindex(part) if part in ("3", "add") else call.index(part)
    broken = before + call[:place] + wrong + call[place + len(part) :]
    allowed = setting.allowed(structured, broken)
    end = len(before) + place
    if case == "pythonic" and part == "add":
        assert not setting.allows(structured, "[add(days=1)]")
    else:
        assert broken.startswith(allowed) and len(allowed) < end + len(wrong) + 1
    assert not setting.allows(structured, before + call[: call.index("3")])


@pytest.mark.parametrize("case", CASES)
def test_functions_that_are_not_strict_take_any_arguments(setting: Setting, case: str) -> None:
    form, layout, call, _, _ = CASES[case]
    values = {"a": [1, {"b": None}], "c": 'x "y"'}
    text = call.replace(KEYWORDS, ", ".join(f"{name}={json.dumps(value)}" for name, value in values.items()))
    tags = "".join(f"<parameter={name}>\n{json.dumps(value)}\n</parameter>\n" for name, value in values.items())
    text = text.replace(TAGS, tags).replace(ARGUMENTS, json.dumps(values))
    for name in ('"add"', "=add", "[add", "]add", "｜>add"):
        text = text.replace(name, name.replace("add", "free"))
    text += "]" if text.startswith(("[free(", "[TOOL_CALLS] [")) else ""
    assert "free" in text and setting.allows(setting.tagged(layout), text)
    ((name, found),) = calls_of(form, text)[1]
    # Values of tags without a schema are text.
    assert name == "free" and json.loads(found) in (values, {key: json.dumps(one) for key, one in values.items()})


@pytest.mark.parametrize("case", CASES)
def test_random_outputs_are_calls_that_fit(setting: Setting, case: str) -> None:
    """Walks at random from the beginning of a call."""
    form, layout, call, _, before = CASES[case]
    structured, rng = setting.tagged(layout), random.Random(case)
    start = setting.encode(before + call[: call.index("add") + (4 if form == "pythonic" else 3)])
    num_ended = 0
    for _ in range(12):
        matcher = setting.compiler.request(structured).result(60).matcher()
        for token_id in start:
            matcher.accept(token_id)
        output, words_RW = [*start], np.zeros((1, -(-setting.size // 32)), np.int32)
        while not matcher.ended and len(output) < 400:
            matcher.fill(words_RW, 0)
            bits = np.unpackbits(words_RW.view(np.uint8), bitorder="little")[: setting.size]
            token_id = setting.eos if bits[setting.eos] else int(rng.choice(np.flatnonzero(bits)))
            matcher.accept(token_id)
            output.append(token_id)
        text = setting.decode(output[:-1])
        if not matcher.ended or "\ufffd" in text:
            continue
        num_ended += 1
        _, ((name, arguments), *_) = calls_of(form, text)
        assert name == "add", text
        jsonschema.validate(json.loads(arguments), SCHEMA)
    assert num_ended >= 3


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_taken_back(setting: Setting, case: str) -> None:
    """Also those that are special, as drafts are that the model refuses."""
    _, layout, call, further, before = CASES[case]
    grammar = setting.compiler.request(setting.tagged(layout)).result(60)
    token_ids, rng = [*setting.encode(before + call + further), setting.eos], random.Random(case)

    def mask(matcher: Any) -> list[int]:
        words_RW = np.zeros((1, -(-setting.size // 32)), np.int32)
        matcher.fill(words_RW, 0)
        return words_RW[0].tolist()

    first, expected = grammar.matcher(), []
    for token_id in token_ids:
        expected.append(mask(first))
        first.accept(token_id)
    matcher, place = grammar.matcher(), 0
    for _ in range(200):
        if place < len(token_ids) and rng.random() < 0.6:
            matcher.accept(token_ids[place])
            place += 1
        elif place:
            count = rng.randint(1, min(place, 6))
            matcher.rollback(count)
            place -= count
        assert place == len(token_ids) or mask(matcher) == expected[place]
        ahead = token_ids[place : place + 5]
        assert matcher.validate(ahead) == len(ahead)


def test_texts_of_tags(setting: Setting) -> None:
    """Values that are text have no quotes, and end with their tag."""
    schema = {"properties": {"a": {"type": "string", "format": "date"}, "b": {"type": "string"}}, "required": ["b"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    choice = ToolChoice(form="parsed", tools=tools)
    structured = setting.tagged(XML[0], choice)
    text = "<function=f>\n<parameter=a>\n2024-02-29\n</parameter>\n<parameter=b>\n{}\n</function>\n\n</parameter>\n"
    assert setting.allows(structured, f"{text}</function>\n</tool_call>")
    found = calls_of("qwen3_coder", f"{text}</function>", choice)[1]
    assert json.loads(found[0][1]) == {"a": "2024-02-29", "b": "{}\n</function>\n"}
    assert not setting.allows(structured, f"{text}</function>\n</tool_call>".replace("29", "30"))
    for value, is_allowed in (("xy", True), ("x</parameter>y", False), ("xy\r", False)):
        text = f"<function=f>\n<parameter=b>\n{value}\n</parameter>\n</function>\n</tool_call>"
        assert setting.allows(structured, text) == is_allowed


def test_a_list_ends_the_answer(setting: Setting) -> None:
    """The parser would read objects after it as more calls."""
    _, layout, call, further, _ = CASES["mistral list"]
    structured = setting.tagged(layout)
    assert setting.allowed(structured, f'{call}{further} {{"name": "add", "arguments": {{}}}}') == call + further


LARK = 'start: WORD ("," WORD)*\nWORD: /[a-z]+/'


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("syntax", ["regex", "lark"])
def test_grammars_of_custom_tools(setting: Setting, case: str, syntax: str) -> None:
    form, layout, call, _, _ = CASES[case]
    definition = LARK if syntax == "lark" else "[a-z]+(,[a-z]+)*"
    about = {"name": "add", "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    choice = read_tools([{"type": "custom", "custom": about}], None, None)
    assert choice is not None and choice.formed == {"add"}
    structured = setting.tagged(layout, choice)

    def written(value: str) -> str:
        text = call.replace(KEYWORDS, f"input={json.dumps(value)}")
        text = text.replace(TAGS, f"<parameter=input>\n{value}\n</parameter>\n")
        text = text.replace(ARGUMENTS, json.dumps({"input": value}))
        return text + ("]" if text.startswith(("[add(", "[TOOL_CALLS] [")) else "")

    assert setting.allows(structured, written("ab,c"))
    assert json.loads(calls_of(form, written("ab,c"), choice)[1][0][1]) == {"input": "ab,c"}
    # The library cannot hold the escapes of JSON to a grammar.
    assert setting.allows(structured, written("ab,")) == (syntax == "lark" and form != "qwen3_coder")


@pytest.mark.parametrize(
    ("layout", "schema", "problem"),
    [
        (PYTHONIC[0], {"properties": {"a-b": True}}, "the parameter 'a-b' is no name of a keyword"),
        (PYTHONIC[0], {"properties": {"from": True}}, "the parameter 'from' is no name of a keyword"),
        (PYTHONIC[0], {"anyOf": [{}]}, "anyOf of the parameters cannot be enforced"),
        (PYTHONIC[0], {"properties": {"a": False}, "required": ["a"]}, "required parameter 'a' allows nothing"),
        (XML[0], {"minProperties": 1}, "minProperties of the parameters cannot be enforced"),
        (XML[0], {"properties": {"a>b": True}}, "the parameter 'a>b' is no name of a tag"),
        (XML[0], {"properties": {"a": {"type": "string", "not": {}}}}, "not of a text cannot be enforced"),
        (XML[0], {"properties": {"a": {"type": "string", "pattern": "a$b"}}}, "has anchors within it"),
        (XML[0], {"properties": {"a": {"type": "string", "minLength": -1}}}, "a text cannot have -1 characters"),
        (XML[0], {"properties": {"a": {"type": "string", "maxLength": "3"}}}, "wrong type|cannot have 3 characters"),
        (XML[0], {"properties": []}, "after '<tool_call>\\\\n<function=f>\\\\n': a keyword .* wrong type"),
        (LLAMA[0], {"properties": {"a": {"uniqueItems": True}}}, "uniqueItems cannot be enforced"),
    ],
)
def test_schemas_that_a_form_cannot_hold(
    setting: Setting, layout: CallLayout, schema: dict[str, Any], problem: str
) -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}, "strict": True}}
    ]
    structured = setting.tagged(layout, ToolChoice(form="parsed", tools=tools))
    with pytest.raises(RequestError, match=problem):
        setting.compiler.request(structured).result(60)


@pytest.mark.parametrize("case", CASES)
def test_many_optional_parameters(setting: Setting, case: str) -> None:
    """Tags have the limits of schemas, not those of a user's grammar."""
    _, layout, call, _, before = CASES[case]
    properties = {f"p{index}": {"type": "string", "minLength": 1, "maxLength": 10**12} for index in range(600)}
    function = {"name": "add", "parameters": {"type": "object", "properties": properties}, "strict": True}
    choice = ToolChoice(form="parsed", tools=[{"type": "function", "function": function}])
    parameter = {"tags": "<parameter=p599>\nx\n</parameter>\n", "keywords": 'p599="x"', "json": '{"p599": "x"}'}
    text = call.replace(KEYWORDS, parameter["keywords"]).replace(TAGS, parameter["tags"])
    text = before + text.replace(ARGUMENTS, parameter["json"])
    token_ids = setting.encode(text)
    matcher = setting.compiler.request(setting.tagged(layout, choice)).result(60).matcher()
    words_RW = np.zeros((1, -(-setting.size // 32)), np.int32)
    for token_id in token_ids:
        matcher.fill(words_RW, 0)
        matcher.accept(token_id)


@pytest.mark.parametrize(("layout", "name"), [(PYTHONIC[0], "a b"), (XML[0], "a>b"), (MISTRAL[0], "a[ARGS]")])
def test_names_that_a_form_cannot_hold(setting: Setting, layout: CallLayout, name: str) -> None:
    tools = [{"type": "function", "function": {"name": name, "strict": True}}]
    with pytest.raises(ApiError, match="so that no grammar holds the name"):
        setting.tagged(layout, ToolChoice(form="parsed", tools=tools))


@pytest.mark.parametrize(
    ("form", "template", "expected"),
    [
        ("mistral", "[TOOL_CALLS]x[ARGS]", MISTRAL[0]),
        ("mistral", "[TOOL_CALLS][", MISTRAL[1]),
        ("mistral", "[TOOL_CALLS] [", MISTRAL[2]),
        ("deepseek_v3", "function\n```json", DEEPSEEK[0]),
        ("deepseek_v3", "", DEEPSEEK[1]),
    ],
)
def test_the_template_shows_the_layout(form: Any, template: str, expected: CallLayout) -> None:
    assert TOOL_FORMATS[form].layout_of(template) == expected
