"""The forms in which models write tool calls, cut into pieces in every way: streams say what whole answers say."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from byte_grammars import byte_compiler, compiled, takes

from phonograph.server.chat.answer_reader import AnswerReader
from phonograph.server.chat.tools import ToolChoice, read_tools
from phonograph.server.openai.chat_message import delta_of, message_of
from phonograph.text.formats.find_formats import TOOL_FORMATS

TOOLS: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]
AUTO = ToolChoice(form="parsed", tools=TOOLS)
TRICKY = '{"a": "} ] \\" </tool_call> {", "b": [1, {"name": "x"}], "é": null}'

HERMES = [
    ("Just text, 1 < 2 <tool and <tool_cal", "Just text, 1 < 2 <tool and <tool_cal", []),
    ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', None, [("add", '{"a": 1}')]),
    (f'I will. <tool_call>{{"name":"add","arguments":{TRICKY}}}</tool_call>', "I will. ", [("add", TRICKY)]),
    (f'<tool_call>{{"arguments": {TRICKY}, "name": "add"}}</tool_call>', None, [("add", TRICKY)]),
    (
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "now"}\n</tool_call>\n',
        None,
        [("add", "{}"), ("now", "{}")],
    ),
    ('<tool_call>\n{"name": "add", "arguments": {"a": 1', None, [("add", '{"a": 1')]),
    ('<tool_call>{"nam', '<tool_call>{"nam', []),
    ('{"name": "add"}', '{"name": "add"}', []),
]
LLAMA = [
    ("The answer is {19}.", "The answer is {19}.", []),
    ('{"name": "add", "parameters": {"a": 1}}', None, [("add", '{"a": 1}')]),
    (f'<|python_tag|>{{"name": "add", "parameters": {TRICKY}}}', None, [("add", TRICKY)]),
    (
        ' {"type": "function", "name": "add", "parameters": {}}; {"name": "now", "parameters": {}}',
        None,
        [("add", "{}"), ("now", "{}")],
    ),
    ('{"answer": 19} is it', '{"answer": 19} is it', []),
    ("<|python", "<|python", []),
    ("[1, 2]", "[1, 2]", []),
]
NO_CALLS = [
    '{"name": "Anna", "age": 3}',
    '{"name": "add"}',
    '{"name": "add", "parameters": [1]}',
    '{"name": "add", "arguments": "{\\"a\\": 1}"}',
    '{"parameters": {"a": 1}, "name": "Anna"}',
    '{"parameters": {"a": 1}}',
    '{"name": "add", "parameters": {a}}',
    ' \n{"name": "Anna", "parameters": {}} is it',
    '<|python_tag|> {"name": "Anna"}; {"name": "now", "parameters": {}}',
]
LLAMA += [(text, text, []) for text in NO_CALLS]
LLAMA += [
    ('{"name": "add", "parameters": {}}; {"name": "Anna"} too', '; {"name": "Anna"} too', [("add", "{}")]),
    ('{"name": "add", "parameters": {}} is it.', " is it.", [("add", "{}")]),
    ('{"name": "add", "parameters": {"a": 1}, "arguments": {}}', None, [("add", '{"a": 1}')]),
    ('{"name": "add", "parameters": {"a": b}} ', None, [("add", '{"a": b}')]),
]
IN_TAGS = [
    "Write <tool_call> and </tool_call> around it: <tool_call>\n{ ... }</tool_call>",
    "<tool_call> add(1) </tool_call>\n",
    '<tool_call>\n{"name": "Anna", "arguments": {}}\n</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "Anna", "arguments": {}</tool_call',
    '<tool_call>[{"name": "add", "arguments": {}}]</tool_call>',
    "<tool_call>",
    "<tool_call>\n ",
    "<tool_call> <tool_",
]
NOW = '<tool_call>{"name": "now"}'
HERMES += [(text, text, []) for text in IN_TAGS]
HERMES += [
    (f"<tool_call>no</tool_call>{NOW}</tool_call>", "<tool_call>no</tool_call>", [("now", "{}")]),
    (f"<tool_call><tool_call>{NOW}</tool_call>", "<tool_call><tool_call>", [("now", "{}")]),
    (f"{NOW}{NOW} and</tool_call> so on </tool", "and so on </tool", [("now", "{}")] * 2),
    (
        f'{NOW}\n{{"name": "add"}}{{"name": "Anna"}}</tool_call>',
        '{"name": "Anna"}</tool_call>',
        [("now", "{}"), ("add", "{}")],
    ),
    ('<tool_call>{"name": "add", "arguments": {"a": 1} </tool_call>', None, [("add", '{"a": 1}')]),
    (f"{NOW}</tool_call>\n<tool_call>no</tool_call>", "<tool_call>no</tool_call>", [("now", "{}")]),
]
CASES = [("hermes", *case) for case in HERMES] + [("llama3_json", *case) for case in LLAMA]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_of_a_whole_text_and_of_a_stream(
    form: Any, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    message = message_of(AnswerReader(AUTO, TOOL_FORMATS[form], None).read(text, ended=True))
    assert message["content"] == content
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert found == calls
    for seed in range(20):
        rng, reader = random.Random(seed), AnswerReader(AUTO, TOOL_FORMATS[form], None)
        streamed, names, arguments, start = "", [], [""] * len(calls), 0
        while start <= len(text):
            end = start + rng.choice([1, 1, 2, 5, 30])
            delta = delta_of(reader.read(text[start:end], ended=end > len(text)))
            streamed += delta.get("content", "")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(names) and call["type"] == "function"
                    names.append(call["function"]["name"])
                arguments[call["index"]] += call["function"]["arguments"]
            start = end
        assert streamed == (content or "") and list(zip(names, arguments, strict=True)) == calls, seed
        assert reader.has_calls == bool(calls)


def test_text_that_is_not_json_is_content() -> None:
    text = '<tool_call>{"name": "add", "arguments": {a}}</tool_call><tool_call>{"name": "now"}</tool_call>'
    reader = AnswerReader(AUTO, TOOL_FORMATS["hermes"], None)
    assert message_of(reader.read(text, ended=True)) == {"content": text} and not reader.has_calls


def test_one_call_where_one_is_wanted() -> None:
    choice = read_tools(TOOLS, "auto", False)
    assert choice is not None
    text = '{"name": "add", "parameters": {}}; {"name": "now", "parameters": {}}'
    found = AnswerReader(choice, TOOL_FORMATS["llama3_json"], None).read(text, ended=True)
    assert len(message_of(found)["tool_calls"]) == 1


def test_references_of_parameters_still_hold() -> None:
    schema = {"$defs": {"x": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#"}}}
    choice = read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}], "required", None)
    assert choice is not None and choice.structured is not None
    grammar = compiled(byte_compiler(), json=choice.structured.json)
    call = '[{"name": "f", "arguments": {"b": {"b": {"a": %s}}}}]'
    assert takes(grammar, call % "1") and not takes(grammar, call % '"x"')


def test_anchors_of_several_tools_stay_apart() -> None:
    data = {"$ref": "#/data", "$anchor": "n"}
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "$id": "http://example.org/tool",
                    "properties": {
                        "a": {"$ref": "#n"},
                        "const": {"$ref": "#/$defs/x"},
                        "b": {"const": data},
                        "$anchor": {"$ref": "#"},
                    },
                    "additionalProperties": False,
                    "$defs": {"x": {"$anchor": "n", "type": kind}},
                },
            },
        }
        for name, kind in (("f", "integer"), ("g", "null"))
    ]
    choice = read_tools(tools, "required", False)
    assert choice is not None and choice.structured is not None
    schema = json.loads(choice.structured.source)
    assert schema["$defs"]["1"]["properties"]["b"] == {"const": data}
    grammar = compiled(byte_compiler(), json=schema)
    for name, own, other in (("f", "1", "null"), ("g", "null", "1")):
        call = '[{"name": "%s", "arguments": {%s}}]'
        for key in ("a", "const"):
            assert takes(grammar, call % (name, f'"{key}": {own}')), (name, key)
            assert not takes(grammar, call % (name, f'"{key}": {other}')), (name, key)
        assert takes(grammar, call % (name, f'"$anchor": {{"a": {own}}}'))
        assert not takes(grammar, call % (name, f'"$anchor": {{"a": {other}}}'))


def test_a_named_function_has_the_white_space_of_required_calls() -> None:
    kinds = {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}}
    schema = {"type": "object", "properties": kinds, "required": ["a", "b"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    compiler, grammars = byte_compiler(), []
    for asked in ({"type": "function", "function": {"name": "f"}}, "required"):
        choice = read_tools(tools, asked, None)
        assert choice is not None and choice.structured is not None
        grammars.append(compiler.request(choice.structured).result())
    named, required = grammars
    pieces = ["{", '"a"', ":", "1", ",", '"b"', ":", "[", '"x"', ",", '"y"', "]", "}"]
    for gap, blank in itertools.product(range(len(pieces) - 1), ("", " ", "\n", "\t", "   ")):
        usual = [" " if piece in ":," else "" for piece in pieces]
        usual[gap] = blank
        text = "".join(map("".join, zip(pieces, usual, strict=True)))
        accepted = takes(required, f'[{{"name": "f", "arguments": {text}}}]')
        assert takes(named, text) == accepted == (blank in (("", " ") if pieces[gap] in ":," else ("",))), text
