"""Requests that agents and Open WebUI sent, recorded and shortened, under the chats of four families.

Each file of tests/data/agents has a request without tools, if the program sends some, and the last request of a
conversation in which a file was read and edited and a command was run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_forms import CHAT_FORMS, Calls, ChatForm
from scripted_engine import scripted_engine

RECORDS = Path(__file__).parent.parent / "data" / "agents"
CALLS: dict[str, Calls] = {
    "claude_code": [("Bash", {"command": "ls", "description": "List"})],
    "codex": [("multi_agent_v1__close_agent", {"target": "7"})],
    "codex_known_model": [("apply_patch", {"input": "*** Begin Patch\n*** End Patch"})],
    "open_webui": [("add_numbers", {"a": 12, "b": 7})],
    "opencode": [("bash", {"command": "ls", "description": "List"})],
}
"""A call of one of its tools for each program, with the name that the model knows."""


@pytest.fixture(scope="module", params=CHAT_FORMS)
def form(request: pytest.FixtureRequest) -> ChatForm:
    return CHAT_FORMS[request.param]


@pytest.fixture(scope="module")
def servers(form: ChatForm) -> Iterator[dict[str, str]]:
    """Start a server for each program, whose model answers with the program's call."""
    with ExitStack() as stack:
        yield {
            program: stack.enter_context(
                scripted_engine(
                    lambda _, calls=calls: form.answer("I work.", calls),
                    form=form,
                    served_model_name=("scripted", "claude", "gpt-5.5"),
                )
            )
            for program, calls in CALLS.items()
        }


def events(url: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of the answer to a recorded request."""
    answer = httpx.post(url + record["path"], json=record["body"], headers=record["headers"], timeout=60)
    assert answer.status_code == 200, answer.text
    if not record["body"].get("stream"):
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def call_of(path: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the one call of an answer: its name, its arguments or input, and perhaps its namespace."""
    if path.startswith("/v1/responses"):
        output = found[-1]["response"]["output"]
        (call,) = [item for item in output if item["type"] in ("function_call", "custom_tool_call")]
        return {key: call[key] for key in ("namespace", "name", "arguments", "input") if key in call}
    if path.startswith("/v1/messages"):
        (start,) = [event for event in found if event.get("content_block", {}).get("type") == "tool_use"]
        pieces = [event["delta"]["partial_json"] for event in found if "partial_json" in event.get("delta", {})]
        return {"name": start["content_block"]["name"], "arguments": "".join(pieces)}
    deltas = [event["choices"][0]["delta"] for event in found if event["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    (name,) = [call["name"] for call in calls if call.get("name")]
    return {"name": name, "arguments": "".join(call.get("arguments") or "" for call in calls)}


@pytest.mark.parametrize("program", CALLS)
def test_recorded_requests(servers: dict[str, str], program: str) -> None:
    *_, last = records = json.loads((RECORDS / f"{program}.json").read_text(encoding="utf-8"))
    for record in records:
        found = events(servers[program], record)
        assert not any(event.get("type") in ("error", "response.failed") for event in found)
    call = call_of(last["path"], found)
    (name, arguments), *_ = CALLS[program]
    if program == "codex_known_model":
        assert call == {"name": name, "input": arguments["input"]}
        return
    assert json.loads(call.pop("arguments")) == arguments
    namespace, _, plain = name.rpartition("__")
    assert call == ({"namespace": namespace, "name": plain} if namespace else {"name": name})


CONVERSATION = [
    {"role": "system", "content": "Rule one."},
    {"role": "user", "content": "Add them."},
    {"role": "system", "content": "Rule two."},
    {"role": "user", "content": "Now."},
    {
        "role": "assistant",
        "tool_calls": [{"id": "call_123456789", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_123456789", "content": "19"},
    {"role": "user", "content": "Go on."},
]


def test_strict_templates_get_all_texts() -> None:
    prompts: list[str] = []
    form = CHAT_FORMS["mistral"]
    with scripted_engine(lambda prompt: prompts.append(prompt) or "Done.", form=form) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": CONVERSATION}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert prompts == [
        "[INST]Add them.\n\nRule two.\n\nNow.[/INST]"
        '[TOOL_CALLS][{"name": "add", "arguments": {}}]</s>[TOOL_RESULTS]{"content": "19\\n\\nGo on."}[/TOOL_RESULTS]'
    ]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_later_system_messages_do_not_replace_the_first(path: str) -> None:
    prompts: list[str] = []
    turns = [{"role": "user", "content": "Add them."}, {"role": "system", "content": "Rule two."}]
    body = {
        "/v1/messages": {"system": "Rule one.", "messages": turns, "max_tokens": 9},
        "/v1/responses": {"instructions": "Rule one.", "input": turns},
    }[path]
    with scripted_engine(lambda prompt: prompts.append(prompt) or "Done.", form=CHAT_FORMS["r1"]) as url:
        assert httpx.post(url + path, json=body, timeout=60).status_code == 200
    assert prompts == ["Rule one.<｜User｜>Add them.\n\nRule two.<｜Assistant｜><think>\n"]
