"""Texts that are nearly tool calls."""

from __future__ import annotations

from typing import Any

import pytest

from phonograph.server.chat.answer_reader import AnswerReader
from phonograph.server.chat.tools import ToolChoice
from phonograph.server.openai.chat_message import delta_of, message_of
from phonograph.text.formats.find_formats import TOOL_FORMATS
from phonograph.text.formats.json_calls import Hermes

TOOLS: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]
AUTO = ToolChoice(form="parsed", tools=TOOLS)
CASES = [
    ("hermes", 'If 1 <tool 2 < 3: <tool_call>{"name": "now"}</tool_call>', "If 1 <tool 2 < 3: ", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "add"', '<tool_call>{"name": "add"', []),
    ("hermes", '<tool_call>{"name": "now"}</tool', None, [("now", "{}")]),
    ("llama3_json", '{"name": "add", "type": "function", "parameters": {}}', None, [("add", "{}")]),
    ("llama3_json", '<|python_tag|>\n{"name": "now", "parameters": {}}', None, [("now", "{}")]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_whole_text_and_single_characters(
    form: Any, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    message = message_of(AnswerReader(AUTO, TOOL_FORMATS[form], None).read(text, ended=True))
    assert message["content"] == content
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert found == calls
    reader, streamed = AnswerReader(AUTO, TOOL_FORMATS[form], None), ""
    for place, character in enumerate(text):
        streamed += reader.read(character, ended=place == len(text) - 1).content
    assert streamed == (content or "")


@pytest.mark.parametrize("text", ["[", '[{"name": "ad', '[{"name"'])
def test_the_rest_of_a_truncated_list_is_not_content(text: str) -> None:
    reader = AnswerReader(ToolChoice(form="required", tools=TOOLS), None, None)
    assert not message_of(reader.read(text, ended=True))["content"]


def test_a_named_call_has_its_name_though_its_first_token_has_no_text() -> None:
    reader = AnswerReader(ToolChoice(form="named", tools=TOOLS, function="add"), None, None)
    texts = enumerate(["", '{"a"', ": 1}", ""])
    deltas = [delta_of(reader.read(text, ended=not text and bool(place))) for place, text in texts]
    (call,) = deltas[0]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": ""} and call["id"]
    assert "".join(one["function"]["arguments"] for d in deltas for one in d.get("tool_calls", [])) == '{"a": 1}'


def test_only_whitespace_right_behind_a_call_is_dropped() -> None:
    parser = Hermes({"f"})
    found = parser.push('<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\nDone, see you.\n')
    assert found.content + parser.finish().content == "Done, see you.\n"
