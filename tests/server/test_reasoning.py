"""Reasoning through the server: keys, usage, budget, grammars after it, and fields for the template.

The demo model does not reason. Two tokens of its vocabulary stand for the markers, and a budget forces the second one.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from servers import QUESTION, Server

from phonograph.config.server_config import ServerConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.process.calls import Delta, Sample
from phonograph.server.chat.chat_parts import ChatParts
from phonograph.server.openai.chat_completions import ChatAnswer
from phonograph.server.openai.protocol import ChatBody
from phonograph.text.formats import find_formats
from phonograph.text.formats.find_formats import TOOL_FORMATS
from phonograph.text.formats.reasoning import Opening, ReasoningFormat

START, END = "<|user|>", "<|system|>"
TURNS = "{% for message in messages %}<|user|>{{ message.content or '' }}{% endfor %}"
OPENED = TURNS + "<|assistant|>{% if think is not defined or think %}<|user|>{% else %}<|user|><|system|>{% endif %}"
SWITCHED = TURNS + "<|assistant|>{% if enable_thinking is false %}<|user|><|system|>{% else %}<|user|>{% endif %}"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 60}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


@pytest.fixture(autouse=True)
def markers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("qwen3", "deepseek_r1"):
        monkeypatch.setitem(find_formats._MARKERS, name, (START, END))  # type: ignore[index]


def chunks(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = server.post("/v1/chat/completions", {**body, "stream": True, "stream_options": options})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def message(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """Return the choice of a whole answer, and check that a stream has the same parts and usage."""
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    (choice,), usage = answer.json()["choices"], answer.json()["usage"]
    streamed: dict[str, str] = {}
    arguments = ""
    for chunk in (found := chunks(server, body)):
        for part in chunk["choices"]:
            for name, text in part["delta"].items():
                if name == "tool_calls":
                    arguments += "".join(call["function"]["arguments"] for call in text)
                elif name != "role":
                    streamed[name] = streamed.get(name, "") + text
    whole = choice["message"]
    assert streamed.get("content", "") == (whole["content"] or "")
    for key in ("reasoning", "reasoning_content"):
        assert streamed.get(key) == whole.get(key)
    assert arguments == "".join(call["function"]["arguments"] for call in whole.get("tool_calls", []))
    for name in ("completion_tokens", "completion_tokens_details"):
        assert found[-1]["usage"][name] == usage[name]
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in found]
    assert counts == sorted(counts)
    return {**choice, "usage": usage, "header": answer.headers.get("warning")}


def test_reasoning_content_and_usage(serve_with: Any) -> None:
    server = serve_with(chat_template=OPENED, reasoning_parser="qwen3")
    found = message(server, {**ASK, "thinking_token_budget": 7})
    text = found["message"]
    assert text["reasoning"] == text["reasoning_content"] and text["reasoning"] and END not in text["reasoning"]
    assert END not in text["content"] and found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}
    hidden = message(server, {**ASK, "thinking_token_budget": 7, "include_reasoning": False})
    assert hidden["message"]["reasoning"] is hidden["message"]["reasoning_content"] is None
    assert hidden["message"]["content"] == text["content"]
    # The prompt has closed the reasoning.
    closed = message(server, {**ASK, "chat_template_kwargs": {"think": False}, "thinking_token_budget": 7})
    assert closed["message"]["reasoning"] is None and closed["message"]["content"]
    assert closed["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    # It does not end within max_tokens.
    endless = message(server, {**ASK, "max_tokens": 5})
    assert endless["finish_reason"] == "length" and endless["message"]["content"] == ""
    assert endless["message"]["reasoning"] and endless["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    # No thought at all.
    none = message(server, {**ASK, "thinking_token_budget": 0})
    assert none["message"]["reasoning"] is None and none["message"]["content"]


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_one_key_by_a_setting(serve_with: Any, key: str) -> None:
    server = serve_with(chat_template=OPENED, reasoning_parser="qwen3", reasoning_key=key)
    text = message(server, {**ASK, "thinking_token_budget": 4})["message"]
    assert text.keys() & {"reasoning", "reasoning_content"} == {key}


def test_a_schema_holds_after_the_reasoning(serve_with: Any) -> None:
    server = serve_with(chat_template=OPENED, reasoning_parser="qwen3")
    body = {**ASK, "response_format": FORMAT}
    for _ in range(2):  # the second time the grammar is compiled already
        found = message(server, {**body, "thinking_token_budget": 6})
        assert json.loads(found["message"]["content"]) in ({"a": 1}, {"a": 2}) and found["finish_reason"] == "stop"
        assert found["message"]["reasoning"] and "{" not in found["message"]["reasoning"]
    several = server.post("/v1/chat/completions", {**body, "temperature": 1, "n": 4, "thinking_token_budget": 3}).json()
    for choice in several["choices"]:
        assert json.loads(choice["message"]["content"])["a"] in (1, 2) and choice["message"]["reasoning"]
    off = message(server, {**body, "chat_template_kwargs": {"think": False}})
    assert json.loads(off["message"]["content"])["a"] in (1, 2)
    # Where the model decides, one that does not begin to reason answers at once.
    undecided = serve_with(chat_template=TURNS + "<|assistant|>", reasoning_parser="qwen3")
    found = message(undecided, {**body, "logit_bias": {str(token(undecided, START)): -100}})
    assert json.loads(found["message"]["content"])["a"] in (1, 2) and found["message"]["reasoning"] is None
    biased = message(undecided, {**body, "logit_bias": {str(token(undecided, START)): 50}, "thinking_token_budget": 3})
    assert json.loads(biased["message"]["content"])["a"] in (1, 2) and biased["message"]["reasoning"]


def token(server: Server, text: str) -> int:
    (token_id,) = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    return token_id


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_calls_follow_the_reasoning(serve_with: Any, choice: Any) -> None:
    server = serve_with(chat_template=OPENED, reasoning_parser="deepseek_r1")
    body = {**ASK, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    found = message(server, {**body, "thinking_token_budget": 6})
    (call,) = found["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2) and found["message"]["reasoning"]
    assert found["message"]["content"] is None
    cut = message(server, {**body, "max_tokens": 4})
    assert "tool_calls" not in cut["message"] and cut["finish_reason"] == "length"


def test_effort_turns_reasoning_on_and_off(serve_with: Any) -> None:
    server = serve_with(chat_template=SWITCHED, reasoning_parser="qwen3")
    for effort, reasons in (("none", False), ("high", True), (None, True)):
        found = message(server, {**ASK, "reasoning_effort": effort, "thinking_token_budget": 5})
        assert (found["message"]["reasoning"] is not None) == reasons
        assert (found["header"] is not None) == (effort == "high")
    assert (
        "reasoning_effort but for turning reasoning on" in message(server, {**ASK, "reasoning_effort": "low"})["header"]
    )
    both = {**ASK, "reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}
    assert message(server, both)["message"]["reasoning"] is None
    answer = server.post("/v1/chat/completions", {**ASK, "reasoning_effort": "much"})
    assert answer.status_code == 400 and "must be one of none, minimal" in answer.json()["error"]["message"]


def test_effort_for_the_template_and_where_it_has_no_effect(serve_with: Any, server: Server) -> None:
    told = serve_with(chat_template="{{ reasoning_effort }}{{ messages[0].content }}")
    plain = told.post("/tokenize", {"prompt": "much" + QUESTION}).json()["count"]
    answer = told.post("/v1/chat/completions", {**ASK, "reasoning_effort": "much"})
    assert answer.json()["usage"]["prompt_tokens"] == plain and "warning" not in answer.headers
    fixed = serve_with(chat_template=OPENED, reasoning_parser="qwen3")
    answer = fixed.post("/v1/chat/completions", {**ASK, "reasoning_effort": "none"})
    assert answer.status_code == 400 and "cannot turn its reasoning off" in answer.json()["error"]["message"]
    body = {**ASK, "reasoning_effort": "low", "include_reasoning": False, "chat_template_kwargs": {'a"\n,é': 1}}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200
    names = r"chat_template_kwargs.a\"?,\\xe9, include_reasoning, reasoning_effort"
    assert answer.headers["warning"] == f'299 - "no effect: {names}"'
    assert server.post("/v1/chat/completions", {**ASK, "reasoning_effort": "none"}).headers.get("warning") is None
    answer = server.post("/v1/chat/completions", {**ASK, "thinking_token_budget": 5})
    assert answer.status_code == 400 and "--reasoning-parser" in answer.json()["error"]["message"]
    unlimited = {"thinking_token_budget": -1, "max_tokens": 1}
    assert server.post("/v1/chat/completions", {**ASK, **unlimited}).status_code == 200
    assert server.post("/v1/completions", {"prompt": "a", **unlimited}).status_code == 200


def test_a_header_names_few_variables(server: Server) -> None:
    names = {f"x{number}{'y' * 100}": 1 for number in range(20)}
    header = server.post("/v1/chat/completions", {**ASK, "max_tokens": 1, "chat_template_kwargs": names}).headers
    assert header["warning"].count("yyy, ") == 8 and "12 more of chat_template_kwargs" in header["warning"]
    assert len(header["warning"]) < 800


def test_earlier_reasoning_reaches_the_template_by_both_keys(serve_with: Any) -> None:
    keys = "{% for message in messages %}{{ message.reasoning }}|{{ message.reasoning_content }};{% endfor %}"
    server = serve_with(chat_template=keys)
    for key in ("reasoning", "reasoning_content"):
        body = {"messages": [{"role": "assistant", "content": "x", key: "So"}]}
        tokens = server.post("/tokenize", body).json()["tokens"]
        assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": "So|So;"}
    answer = server.post("/tokenize", {"messages": [{"role": "assistant", "content": "x", "reasoning": [1]}]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].reasoning"


def test_templates_that_join_arguments_to_text(serve_with: Any) -> None:
    call = {"function": {"name": "add", "arguments": '{"a":  1}'}}
    body = {"messages": [{"role": "assistant", "content": "x", "tool_calls": [call]}]}
    loops = "{% for message in messages %}{% for call in message.tool_calls %}"
    ends = "{% endfor %}{% endfor %}"
    for joined, text in (("'<' + call.function.arguments", '<{"a": 1}'), ("call.function.arguments.a", "1")):
        server = serve_with(chat_template=loops + "{{ " + joined + " }}" + ends)
        tokens = server.post("/tokenize", body).json()["tokens"]
        assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}
    server = serve_with(chat_template=loops + "{{ 1 + call.function.arguments }}" + ends)
    answer = server.post("/tokenize", body)
    assert answer.status_code == 400 and "unsupported operand" in answer.json()["error"]["message"]
    assert "'dict'" in answer.json()["error"]["message"], "the first error, of arguments as objects"


CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "pythonic": "[add(a=1)]",
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_by_the_model_without_a_flag(serve_with: Any, name: str) -> None:
    """The template shows the form; a grammar has the demo model write it."""
    marks = {
        "llama3_json": """{# '"parameters": ' #}""",
        "pythonic": "{# [f(a=1)] #}",
        "qwen3_coder": "{# <function= <parameter= #}",
    }
    mark = marks.get(name, "{# " + CALLS[name].replace("{", "").replace("}", "") + " #}")
    template = mark + TURNS + "<|assistant|>"
    server = serve_with(chat_template=template)
    tools = [TOOL, {"type": "function", "function": {"name": "now"}}]
    body = {**ASK, "max_tokens": 200, "tools": tools, "guided_choice": [CALLS[name]]}
    answer = server.post("/v1/chat/completions", body).json()
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert len(call["id"]) == (9 if name == "mistral" else 29)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tools[1]]}}
    (choice,) = server.post("/v1/chat/completions", {**body, "tool_choice": allowed}).json()["choices"]
    assert choice["message"]["content"] == CALLS[name] and choice["finish_reason"] == "stop"
    off = serve_with(chat_template=template, enable_auto_tool_choice=False)
    answer = off.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and "--no-enable-auto-tool-choice" in answer.json()["error"]["message"]


def test_notes_tell_the_formats(serve_with: Any) -> None:
    server = serve_with(reasoning_parser="qwen3", tool_call_parser="hermes")
    notes = server.get("/v1/graphs").json()["notes"]
    assert notes[-2:] == ["reasoning: qwen3 (set by reasoning_parser)", "tool calls: hermes (set by tool_call_parser)"]


@pytest.mark.parametrize(
    ("about", "param"),
    [
        (None, "tool_choice.allowed_tools"),
        ({"mode": "all", "tools": [TOOL]}, "tool_choice.allowed_tools"),
        ({"mode": "auto", "tools": []}, "tool_choice.allowed_tools"),
        (
            {"mode": "auto", "tools": [{"type": "function", "function": {"name": "rain"}}]},
            "tool_choice.allowed_tools.tools[0]",
        ),
        ({"mode": "auto", "tools": [TOOL, 5]}, "tool_choice.allowed_tools.tools[1]"),
    ],
)
def test_wrong_lists_of_allowed_tools(server: Server, about: Any, param: str) -> None:
    body = {**ASK, "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": about}}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_required_among_the_allowed_tools(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "now")]
    for tool in tools:
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool]}}
        answer = server.post("/v1/chat/completions", {**ASK, "tools": tools, "tool_choice": allowed}).json()
        names = {call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]}
        assert names == {tool["function"]["name"]}


def test_a_token_whose_text_is_kept_back_has_a_chunk() -> None:
    form = ReasoningFormat(name="qwen3", start="<think>", end="</think>", start_id=1, end_id=2, always=False)
    formats = find_formats.Formats(form, None, ())
    serving: Any = SimpleNamespace(names=("m",), harmony=None, config=ServerConfig(), texts=None, formats=formats)
    body = ChatBody(messages=ASK["messages"], stream=True)
    sample = Sample(0, None, SamplingParams(detokenize=False), [1])
    call: Any = SimpleNamespace(samples=[sample])
    answer = ChatAnswer(serving, ChatParts(call, formats, None, None, Opening.OPEN), body)
    deltas: list[Any] = []
    for number, text in enumerate(["<think>", "So", " \n", "</think>", "Yes", ""]):
        sample.grow([number], None, None, None)
        *_, last = answer.choices(sample, Delta(text, [number], []))
        deltas.append(last["delta"])
    kept = {"content": ""}
    assert deltas == [kept, {"reasoning": "So", "reasoning_content": "So"}, kept, kept, {"content": "Yes"}, kept]
