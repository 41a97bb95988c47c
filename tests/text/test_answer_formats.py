"""Answers of each family of models, cut at every character: a stream has the parts of the whole answer."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph.text.formats.answer_parser import AnswerParser
from phonograph.text.formats.find_formats import TOOL_FORMATS
from phonograph.text.formats.json_calls import NamedCall
from phonograph.text.formats.reasoning import Opening, ReasoningFormat, ReasoningReader, ReasoningTokens

FUNCTIONS: dict[str, Any] = {
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": ["number", "null"]},
            "text": {"type": "string"},
            "on": {"type": "boolean"},
            "more": {"type": "object"},
            "any": {"$ref": "#/$defs/x"},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "one": {"enum": ["x", "5"]},
        },
    },
    "now": {},
    "get.time-zone": {},
}
TRICKY = '{"a": "} ] \\" </tool_call> [TOOL_CALLS] {", "b": [1, {"name": "x"}], "é": null, "s": "\\ud83d"}'
Parts = tuple[str, str, list[tuple[str, str]]]

CALLS = "<｜tool▁calls▁begin｜>"
CALL, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def v3(name: str, arguments: str) -> str:
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{END}"


def xml(name: str, *parameters: tuple[str, str]) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


TOOL_ANSWERS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # Mistral: a list, and a name before each object.
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "", [("add", '{"a": 1}')]),
    (
        "mistral",
        f'I look.\n[TOOL_CALLS][{{"name": "add", "arguments": {TRICKY}, "id": "123456789"}}, '
        '{"arguments": {}, "name": "now"}]',
        "I look.\n",
        [("add", TRICKY), ("now", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]{"name": "now", "arguments": {}}', "", [("now", "{}")]),
    (
        "mistral",
        f"Well.[TOOL_CALLS]add[ARGS]{TRICKY}[TOOL_CALLS] now {{}}\n Done.",
        "Well.Done.",
        [("add", TRICKY), ("now", "{}")],
    ),
    ("mistral", "[TOOL_CALLS]get.time-zone[CALL_ID]abcdefghi[ARGS]{}", "", [("get.time-zone", "{}")]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": [1', "", [("add", '{"a": [1')]),
    ("mistral", '[TOOL_CALLS]now{}[TOOL_CALLS][{"name": "add", "arguments": {}}]', "", [("now", "{}"), ("add", "{}")]),
    ("mistral", "[TOOL_CALLS] no [TOOL_CALLS]now{}", "[TOOL_CALLS] no ", [("now", "{}")]),
    *(
        ("mistral", text, text, [])
        for text in (
            "[TOOL_CALLS]",
            "[TOOL_CALLS]rain[ARGS]{}",
            "[TOOL_CALLS]add[ARGS]",
            "[TOOL_CALLS]add[ARGS]{a}",
            "[TOOL_CALLS]add{ [TOOL_CALLS]x{",
            "[TOOL_CALLS] is a marker, and so on" * 10,
            '[TOOL_CALLS][{"name": "rain", "arguments": {}}]',
            '[TOOL_CALLS] [{"name": "add", "argu',
            "a [TOOL_CAL",
            "[TOOL[TOOL_C",
            '[{"name": "add", "arguments": {}}]',
        )
    ),
    # DeepSeek V3 and R1, and V3.1.
    ("deepseek_v3", f"{CALLS}{v3('add', TRICKY)}<｜tool▁calls▁end｜>", "", [("add", TRICKY)]),
    (
        "deepseek_v3",
        f"Well.\n{CALLS}{v3('add', '{}')}\n{v3('now', '{}')}<｜tool▁calls▁end｜>",
        "Well.\n",
        [("add", "{}"), ("now", "{}")],
    ),
    (
        "deepseek_v3",
        f"{CALLS}{CALL}add{SEP}{TRICKY}{END}{CALL}now{SEP}{{}}{END}<｜tool▁calls▁end｜> Then.",
        "Then.",
        [("add", TRICKY), ("now", "{}")],
    ),
    ("deepseek_v3", f'{CALLS}{CALL}function{SEP}add\n```json\n{{"a": "', "", [("add", '{"a": "')]),
    ("deepseek_v3", f"{CALLS}no {v3('now', '{}')}``", f"{CALLS}no ", [("now", "{}")]),
    *(
        ("deepseek_v3", text, text, [])
        for text in (
            CALLS,
            f"{CALLS}{CALL}rain{SEP}{{}}{END}",
            f"{CALLS}{CALL}function{SEP}add\n{{}}",
            f"{CALLS}{CALL}function{SEP}add\n```json\n[1]",
            f"a < b and {CALLS[:-1]}",
        )
    ),
    # Qwen3-Coder: values by the types of the schema.
    (
        "qwen3_coder",
        "Let me.\n" + xml("add", ("a", "5"), ("text", 'x "1"\n</function> </tool_call>\\n'), ("on", "true")),
        "Let me.\n",
        [("add", '{"a": 5, "text": "x \\"1\\"\\n</function> </tool_call>\\\\n", "on": true}')],
    ),
    (
        "qwen3_coder",
        xml("now") + "\n" + xml("add", ("b", "null"), ("more", "{'x': [1, True]}"), ("any", '{"y": 2}')),
        "",
        [("now", "{}"), ("add", '{"b": null, "more": {"x": [1, true]}, "any": {"y": 2}}')],
    ),
    (
        "qwen3_coder",
        xml("add", ("a", "five"), ("b", "NaN"), ("either", "5"), ("one", "5"), ("zip", "01"), ("more", "[" * 5000)),
        "",
        [
            (
                "add",
                '{"a": "five", "b": "NaN", "either": 5, "one": "5", "zip": "01", "more": "' + "[" * 5000 + '"}',
            )
        ],
    ),
    ("qwen3_coder", "<function=now>\n</function>", "", [("now", "{}")]),
    *(
        (
            "qwen3_coder",
            "<tool_call>" + " " * spaces + "<function=now></function>",
            "<tool_call>" + " " * spaces if spaces > 255 else "",
            [("now", "{}")],
        )
        for spaces in (255, 256, 300)
    ),
    ("qwen3_coder", xml("add", ("a", "true"), ("b", "1.5")), "", [("add", '{"a": "true", "b": 1.5}')]),
    ("qwen3_coder", xml("add", ("a", "1.5"), ("on", "1")), "", [("add", '{"a": "1.5", "on": "1"}')]),
    ("qwen3_coder", xml("add", ("a", "2.0")), "", [("add", '{"a": 2.0}')]),
    ("qwen3_coder", "<tool_call><function=now></tool_call> and", "and", [("now", "{}")]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=text>\r\nline\r\n</parameter> or\n<parameter=a>\n1",
        "",
        [("add", '{"text": "line", "a": ')],
    ),
    (
        "qwen3_coder",
        "<function=add>\n<parameter=text>\n</para",
        "",
        [("add", '{"text": "</para')],
    ),
    *(
        ("qwen3_coder", text, text, [])
        for text in (
            "<tool_call>",
            "<tool_call>\n<function=",
            xml("rain", ("a", "1")),
            '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
            "<function=" + "x" * 300 + ">",
            "1 <tool 2 <func",
        )
    ),
    # Lists of Python.
    ("pythonic", "[add(a=1, b=-0.5), now()]", "", [("add", '{"a": 1, "b": -0.5}'), ("now", "{}")]),
    (
        "pythonic",
        """<|python_start|>[add(text="a)] 'b' \\" \\n", more={"x": [True, None, (1,)], 'y': false}), now( )]""",
        "",
        [("add", '{"text": "a)] \'b\' \\" \\n", "more": {"x": [true, null, [1]], "y": false}}'), ("now", "{}")],
    ),
    ("pythonic", " [get.time-zone()] <|python_end|>", "", [("get.time-zone", "{}")]),
    ("pythonic", "[add(a='\\ud800\\d é')]", "", [("add", '{"a": "\\ud800\\\\d \\u00e9"}')]),
    ("pythonic", "[now(), add(a=1", ", add(a=1", [("now", "{}")]),
    ("pythonic", "[now()] is it", " is it", [("now", "{}")]),
    *(
        ("pythonic", text, text, [])
        for text in (
            "[1, 2]",
            "[add]",
            "[]",
            "[rain(a=1)]",
            "[add(1)]",
            "[add(**{'a': 1})]",
            "[add(a=b)]",
            "[add(a=1, a=2)]",
            "[add(a=float('nan'))]",
            "[add(a=1e999)]",
            "[add(a={1})]",
            "[add(a='x)]",
            "[add(a=" + "[" * 3000 + "]" * 3000 + ")]",
            "now()",
            "[add(a=1, b=2",
            "<|python",
            " ",
            "[" + "x" * 100,
        )
    ),
]


def parser(tools: str | None, reasoning: str | None = None, opening: Opening = Opening.OPEN) -> AnswerParser:
    reader = None if reasoning is None else ReasoningReader(REASONING[reasoning], opening)
    return AnswerParser(reader, None if tools is None else TOOL_FORMATS[tools].parser(FUNCTIONS))  # type: ignore[index]


def parts(parsed: AnswerParser, pieces: Iterable[str]) -> Parts:
    """Return reasoning, content and calls of an answer in pieces."""
    reasoning, content, calls = "", "", list[tuple[str, str]]()
    for found in (*map(parsed.push, pieces), parsed.finish()):
        reasoning, content = reasoning + found.reasoning, content + found.content
        for call in found.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append((call.name, ""))
            assert call.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    assert parsed.num_calls == len(calls)
    return reasoning, content, calls


def cuts(text: str) -> Iterable[list[str]]:
    """Return the pieces of a text cut at each character, in two, and at random."""
    yield list(text)
    places = range(len(text)) if len(text) < 500 else random.Random(1).sample(range(len(text)), 100)
    yield from ([text[:place], text[place:]] for place in places)
    for seed in range(10):
        rng, start, pieces = random.Random(seed), 0, list[str]()
        while start < len(text):
            end = start + rng.choice([1, 2, 5, 30])
            pieces.append(text[start:end])
            start = end
        yield pieces


@pytest.mark.parametrize(("form", "text", "content", "calls"), TOOL_ANSWERS)
def test_calls_of_each_family(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    whole = parts(parser(form), [text])
    assert whole == ("", content, calls)
    for pieces in cuts(text):
        assert parts(parser(form), pieces) == whole, pieces


def form(name: str, start: str = "<think>", end: str = "</think>") -> ReasoningFormat:
    return ReasoningFormat(name=name, start=start, end=end, start_id=1, end_id=2, always=name == "deepseek_r1")


REASONING = {
    "qwen3": form("qwen3"),
    "deepseek_r1": form("deepseek_r1"),
    "mistral": form("mistral", "[THINK]", "[/THINK]"),
}
IN, OPEN, OUT = Opening.INSIDE, Opening.OPEN, Opening.OUTSIDE
THINKING: list[tuple[str, Opening, str, str, str]] = [
    ("qwen3", OPEN, "<think>\nSo, 1 < 2.\n</think>\n\nYes.", "So, 1 < 2.", "Yes."),
    ("qwen3", IN, "So.\n</think>\n\nYes.\n", "So.", "Yes.\n"),
    ("qwen3", OUT, "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
    ("qwen3", OPEN, "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
    ("qwen3", OPEN, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    ("qwen3", OPEN, "</think>\n\nYes.", "", "Yes."),
    ("qwen3", IN, "<think>So.</think>Yes.", "So.", "Yes."),
    ("qwen3", OPEN, " \n<think>So </thin </think>Yes</think>", "So </thin", "Yes</think>"),
    ("qwen3", OPEN, "<think>It never ends </thi", "It never ends </thi", ""),
    ("qwen3", IN, "It never ends  \n", "It never ends", ""),
    ("qwen3", OPEN, "<thi", "", "<thi"),
    ("qwen3", OPEN, "\n", "", "\n"),
    ("qwen3", OPEN, " " * 100 + "<think>So.</think>", "", " " * 100 + "<think>So.</think>"),
    ("qwen3", IN, "So" + " " * 100 + "</think>Yes.", "So" + " " * 36, "Yes."),
    ("deepseek_r1", OPEN, "So.\n</think>\n\nYes.", "So.", "Yes."),
    ("deepseek_r1", OPEN, "<think>\nSo.\n</think>\n\nYes.", "So.", "Yes."),
    ("deepseek_r1", OPEN, "So it goes", "So it goes", ""),
    ("deepseek_r1", OPEN, "<thi", "<thi", ""),
    ("deepseek_r1", OUT, "Yes.", "", "Yes."),
    ("mistral", OPEN, "[THINK]So [1]. [/TOO[/THINK]Yes.", "So [1]. [/TOO", "Yes."),
    ("mistral", OPEN, "Yes.", "", "Yes."),
]


@pytest.mark.parametrize(("name", "opening", "text", "reasoning", "content"), THINKING)
def test_reasoning_of_each_family(name: str, opening: Opening, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], *cuts(text)):
        assert parts(parser(None, name, opening), pieces) == (reasoning, content, []), pieces


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_are_found_behind_reasoning_and_not_in_it(name: str) -> None:
    (text, calls) = next(
        (text, calls) for one, text, _, calls in ALL if one == name and calls and not text[0].isspace()
    )
    thought = f"<think>\n{text}\n</think>\n\n{text}"
    for pieces in ([thought], list(thought)):
        found = parts(parser(name, "qwen3"), pieces)
        assert found[0] == text and found[2] == calls
    assert parts(parser(name, "qwen3"), [f"<think>{text}"]) == (text, "", [])


def test_a_named_call_begins_after_the_reasoning() -> None:
    for text, expected in (
        ("<think>So</think>{}", ("So", "", [("add", "{}")])),
        ("<think>So", ("So", "", [])),
        ("{}", ("", "", [("add", "{}")])),
    ):
        for pieces in ([text], list(text)):
            named = AnswerParser(ReasoningReader(REASONING["qwen3"], OPEN), NamedCall("add"))
            assert parts(named, pieces) == expected


ALL = [
    *TOOL_ANSWERS,
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", [("add", '{"a": 1}')]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEY = st.from_regex(r"[a-z]{1,6}", fullmatch=True).filter(lambda key: key not in ("is", "in", "if", "or", "as"))


def written(name: str, function: str, arguments: dict[str, Any], escapes: bool) -> str:
    """Return a call as a model of the family writes it."""
    text = json.dumps(arguments, ensure_ascii=escapes)
    if name == "hermes":
        return f'<tool_call>\n{{"name": "{function}", "arguments": {text}}}\n</tool_call>\n'
    if name == "llama3_json":
        return f'{{"name": "{function}", "parameters": {text}}}'
    if name == "mistral":
        return f"[TOOL_CALLS]{function}[ARGS]{text}"
    if name == "deepseek_v3":
        return v3(function, text)
    return f"[{function}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "deepseek_v3", "pythonic"])
@given(arguments=st.dictionaries(KEY, VALUES, max_size=4), escapes=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_arguments(name: str, arguments: dict[str, Any], escapes: bool, data: st.DataObject) -> None:
    text = written(name, "add", arguments, escapes).encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    whole = parts(parser(name), [text])
    (call,) = whole[2]
    assert call[0] == "add" and json.loads(call[1]) == arguments
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert parts(parser(name), pieces) == whole


TEXTS = [
    *("", " ", "x", "a b", "\\n", "line\nline", "\t", "é👍", '"', "'", "\\", '\\"', "{}", "[]", "}]", "</tool_call>"),
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        END,
        "```",
        '{"name": "now", "arguments": {}}',
        "</think>",
        "<think>x",
        "<|python_tag|>",
    ),
]
ARGUMENTS: list[dict[str, Any]] = [
    {},
    *({"text": text} for text in TEXTS),
    *({"a": number} for number in (0, -7, 10**18)),
    *({"b": number} for number in (None, 0.5, -1e-9)),
    *({"on": True, "text": text} for text in ("x", '"}')),
    *({"more": value} for value in ({}, {"x": [1, {"y": None}]}, {"é": ["</tool_call>", "}"]}, {"": {"": ""}})),
    {"a": 1, "b": 2.5, "text": "t", "on": False, "more": {"k": [True, "v", None, -3]}},
    {"text": "x" * 300, "a": 1},
    {"more": {"list": list(range(40))}},
]
assert len(ARGUMENTS) == 40


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_forty_calls_of_each_family_cut_at_every_character(name: str) -> None:
    for number, arguments in enumerate(ARGUMENTS):
        before = "" if name in ("llama3_json", "pythonic") else ("", "I look.\n", "a < b: ")[number % 3]
        if name == "qwen3_coder":
            values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
            text = before + xml("add", *values.items())
        else:
            text = before + written(name, "add", arguments, number % 2 == 0)
        whole = parts(parser(name), [text])
        assert whole[:2] == ("", before) and [call for call, _ in whole[2]] == ["add"], text
        assert json.loads(whole[2][0][1]) == arguments, text
        for place in range(len(text)):
            assert parts(parser(name), [text[:place], text[place:]]) == whole, (text, place)
        assert parts(parser(name), list(text)) == whole, text


@given(value=st.text(st.characters(codec="utf-8"), max_size=60).filter(lambda text: "</parameter>" not in text))
@settings(max_examples=200, deadline=None)
def test_any_string_in_tags(value: str) -> None:
    text = xml("add", ("text", value))
    if value.endswith("\r"):  # as in a line break of Windows
        value = value[:-1]
    for pieces in ([text], list(text)):
        ((_, arguments),) = parts(parser("qwen3_coder"), pieces)[2]
        assert json.loads(arguments) == {"text": value}


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "add",
        ">",
        "<parameter=",
        "text",
        "a",
        "</parameter>",
        "</function>",
    ),
    *("[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}", "(", ")", "=", ",", ":", '"', "'", "\\", "\n", " ", "1", "é", "👍"),
    *(CALLS, CALL, SEP, END, "```json", "```", "function", '{"name": "add", "arguments": {', '"name"', '"arguments"'),
    *(
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "<|python_tag|>",
        "now",
        "{}",
        "[now()]",
        "add(a=1)",
        ";",
        "<",
        "｜",
    ),
]


@pytest.mark.parametrize("name", TOOL_FORMATS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_hostile_text(name: str, data: st.DataObject) -> None:
    """Nothing raises, a stream equals the whole, and without calls no character is lost."""
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=25)))
    reasoning = data.draw(st.sampled_from([None, *REASONING]))
    opening = data.draw(st.sampled_from(list(Opening)))
    whole = parts(parser(name, reasoning, opening), [text])
    assert parts(parser(name, reasoning, opening), list(text)) == whole
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert parts(parser(name, reasoning, opening), pieces) == whole
    if reasoning is None and not whole[2]:
        assert whole[1] == text
    for _, arguments in whole[2]:
        arguments.encode()


LONG = 100_000
HOSTILE: dict[str, tuple[str, ...]] = {
    "hermes": (
        '<tool_call>{"name": "add", "arguments": {"a": "',
        "<tool_call>",
        "<tool_call> ",
        "<",
        '{"',
        '<tool_call>{"name": "now"}',
        '"a",',
    ),
    "llama3_json": ('{"', '"\\', " ", '{"name": "add", "parameters": {}}; ', "[", '"a",'),
    "mistral": (
        '[TOOL_CALLS]add{"a": "',
        "[",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]add{x",
        "[TOOL_CALLS]now{}",
        "[TOOL_CALLS] [",
        '"a",',
    ),
    "deepseek_v3": (CALLS, CALL, "<", v3("now", "{}"), f"{CALL}add{SEP}{{", "`"),
    "qwen3_coder": (
        "<function=add><parameter=text>",
        "<tool_call> ",
        "</parameter",
        "<function=",
        "\n",
        "<function=now>",
    ),
    "pythonic": ("[add(a='", "[add(a=[", "now(),", "[", "(", "a="),
}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_time_is_proportional_to_the_length(name: str) -> None:
    """A whole answer of 100,000 characters, and the same in tokens, take little time whatever they are."""
    head = next(text for one, text, _, calls in ALL if one == name and calls)
    began, most = time.process_time(), 1.5
    for text in (piece * (LONG // len(piece)) for piece in HOSTILE[name]):
        for size, before in ((len(text), head), (4, head), (4, "")):
            parsed = parser(name, "qwen3")
            parsed.push(before)
            for start in range(0, len(text), size):
                parsed.push(text[start : start + size])
            parsed.finish()
            began, spent = time.process_time(), time.process_time() - began
            assert spent < most, (text[:20], size)


@pytest.mark.parametrize("text", ["<", "</think> ", "\n", " \n<think>", "</", "x "])
def test_the_time_of_reasoning_is_proportional_to_its_length(text: str) -> None:
    for before in ("", "<think>x"):
        reader = ReasoningReader(REASONING["qwen3"], OPEN)
        reader.push(before)
        began = time.process_time()
        for _ in range(LONG // len(text)):
            reader.push(text)
        assert time.process_time() - began < 1.5


@pytest.mark.parametrize(
    ("name", "opening", "token_ids", "number"),
    [
        ("qwen3", OPEN, [1, 5, 6, 2, 7, 8], 2),
        ("qwen3", OPEN, [9, 1, 5, 2, 1, 2], 1),
        ("qwen3", OPEN, [5, 6, 2], 0),
        ("qwen3", IN, [5, 6, 2, 7], 2),
        ("qwen3", IN, [5, 6, 7], 3),
        ("qwen3", OUT, [1, 5, 2], 0),
        ("deepseek_r1", OPEN, [5, 6, 2, 7], 2),
        ("deepseek_r1", OPEN, [1, 5, 6, 2, 7], 2),
        ("qwen3", OPEN, [], 0),
    ],
)
def test_tokens_of_reasoning(name: str, opening: Opening, token_ids: list[int], number: int) -> None:
    counted = ReasoningTokens(REASONING[name], opening)
    for end in range(len(token_ids) + 1):
        last = counted.count(token_ids[:end])
    assert last == number == ReasoningTokens(REASONING[name], opening).count(token_ids)


def test_the_time_of_counting_is_proportional_to_the_length() -> None:
    counted, token_ids = ReasoningTokens(REASONING["qwen3"], IN), list[int]()
    began = time.process_time()
    for number in range(20_000):
        token_ids.append(5)
        assert counted.count(token_ids) == number + 1
    assert time.process_time() - began < 3
