"""Ollama's API: chats and prompts as lines or at once, the model's properties, and what is refused by name."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from servers import QUESTION, Server

from phonograph.config.server_config import ServerConfig
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.server.chat.chat_parts import TokenUsage
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import ApiError, failed
from phonograph.server.ollama.ollama_answer import Durations, OllamaWriter
from phonograph.server.ollama.ollama_turns import read_turns
from phonograph.text.formats import find_formats
from phonograph.text.formats.answer_parts import Found, ToolDelta

ASK: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": QUESTION}],
    "options": {"temperature": 0, "num_predict": 60},
}
PROMPT: dict[str, Any] = {"model": "demo", "prompt": QUESTION, "options": ASK["options"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TURNS = "{# <tool_call> #}{% for message in messages %}<|user|>{{ message.content or '' }}{% endfor %}<|assistant|>"
SWITCHED = TURNS + "{% if enable_thinking is false %}<|user|><|system|>{% else %}<|user|>{% endif %}"


def lines(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.post(path, body)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson", answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.parametrize(("path", "body"), [("/api/chat", ASK), ("/api/generate", PROMPT)])
def test_an_answer_streams_as_lines(server: Server, path: str, body: dict[str, Any]) -> None:
    *parts, last = lines(server, path, body)
    whole = server.post(path, {**body, "stream": False}).json()
    expected = server.post("/v1/chat/completions", {"messages": ASK["messages"], "temperature": 0}).json()

    def text(part: dict[str, Any]) -> str:
        return part["message"]["content"] if path == "/api/chat" else part["response"]

    content = expected["choices"][0]["message"]["content"]
    assert "".join(map(text, parts)) == text(whole) == content and text(last) == ""
    assert len(parts) > 1 and not any(part["done"] for part in parts) and last["done"] and whole["done"]
    assert last["done_reason"] == whole["done_reason"] == "stop" and last["model"] == "demo"
    counts = {"prompt_eval_count": "prompt_tokens", "eval_count": "completion_tokens"}
    for ours, name in counts.items():
        assert last[ours] == whole[ours] == expected["usage"][name]
    for found in (last, whole):
        durations = [found[f"{name}_duration"] for name in ("total", "prompt_eval", "eval")]
        assert all(isinstance(one, int) and one > 0 for one in durations)
        assert durations[0] >= durations[1] + durations[2]


def test_options_reach_the_engine(server: Server) -> None:
    def answer(**options: Any) -> dict[str, Any]:
        return server.post("/api/generate", {**PROMPT, "stream": False, "options": options}).json()

    short = answer(num_predict=2)
    assert (short["eval_count"], short["done_reason"]) == (2, "length")
    assert answer(num_predict=10**6, temperature=0)["done_reason"] == "stop"  # the context is shorter
    assert answer(num_predict=-1, temperature=0)["done_reason"] == "stop" and answer(seed=-1)["done"]
    assert answer(temperature=3.0, seed=5)["response"] == answer(temperature=3.0, seed=5)["response"]
    assert answer(temperature=0, stop=["1"])["response"] in answer(temperature=0)["response"].split("1")[:1]
    logprobs = server.post("/api/generate", {**PROMPT, "stream": False, "logprobs": True, "top_logprobs": 2}).json()
    assert len(logprobs["logprobs"]) == logprobs["eval_count"] and len(logprobs["logprobs"][0]["top_logprobs"]) == 2
    streamed = lines(server, "/api/chat", {**ASK, "logprobs": True})
    assert sum(len(line.get("logprobs", ())) for line in streamed) == streamed[-1]["eval_count"]


def test_formats(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    for form in (schema, "json"):
        body = {**ASK, "format": form, "stream": False, "options": {"num_predict": 300, "temperature": 0}}
        found = server.post("/api/chat", body).json()
        assert found["done_reason"] == "length" or isinstance(json.loads(found["message"]["content"]), dict)
    assert server.post("/api/chat", {**ASK, "format": ""}).status_code == 200


def test_a_raw_prompt_has_no_template(server: Server) -> None:
    raw = server.post("/api/generate", {**PROMPT, "raw": True, "stream": False}).json()
    plain = server.post("/v1/completions", {"prompt": QUESTION, "temperature": 0, "max_tokens": 60}).json()
    assert raw["response"] == plain["choices"][0]["text"]
    assert raw["prompt_eval_count"] == plain["usage"]["prompt_tokens"]
    system = server.post("/api/generate", {**PROMPT, "system": "Be brief.", "stream": False}).json()
    assert system["prompt_eval_count"] > raw["prompt_eval_count"]


def test_calls_come_whole_and_go_back(serve_with: Callable[..., Server]) -> None:
    text = 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    server = serve_with({"structured_outputs": StructuredOutputs(choice=[text])}, chat_template=TURNS)
    asked = {**ASK, "tools": [TOOL], "options": {"num_predict": 200}}
    streamed = lines(server, "/api/chat", asked)
    whole = server.post("/api/chat", {**asked, "stream": False}).json()["message"]
    (calls,) = [line["message"]["tool_calls"] for line in streamed if "tool_calls" in line["message"]]
    for (call,) in (calls, whole["tool_calls"]):
        assert call["function"] == {"index": 0, "name": "add", "arguments": {"a": 1}} and call["id"]
    assert whole["content"] == "".join(line["message"]["content"] for line in streamed) == "I add. "
    assert streamed[-1]["done_reason"] == "stop"
    turns = [*ASK["messages"], whole, {"role": "tool", "tool_name": "add", "content": "2"}]
    assert server.post("/api/chat", {**asked, "messages": turns}).status_code == 200


def test_thinking(serve_with: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    # The demo model does not reason. Tokens of its vocabulary stand for the markers; its reasoning has no end.
    monkeypatch.setitem(find_formats._MARKERS, "qwen3", ("<|user|>", "<|system|>"))  # type: ignore[index]
    server = serve_with(chat_template=SWITCHED, reasoning_parser="qwen3")
    for think in (True, None, "high"):
        body = {**ASK, "think": think}
        whole = server.post("/api/chat", {**body, "stream": False}).json()
        assert whole["message"]["thinking"] and whole["message"]["content"] == ""
        streamed = "".join(line["message"].get("thinking", "") for line in lines(server, "/api/chat", body))
        assert streamed == whole["message"]["thinking"]
        assert server.post("/api/generate", {**PROMPT, "think": think, "stream": False}).json()["thinking"]
    plain = server.post("/api/chat", {**ASK, "think": False, "stream": False}).json()["message"]
    assert "thinking" not in plain and plain["content"]
    assert "thinking" in server.post("/api/show", {"model": "demo"}).json()["capabilities"]
    without = serve_with().post("/api/chat", {**ASK, "think": True})
    assert without.headers["warning"] == '299 - "no effect: think"'


def test_turns() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call, call]},
        {"role": "tool", "tool_name": "add", "content": "2"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "tool_calls": [{**call, "id": "mine"}]},
        {"role": "tool", "tool_call_id": "mine", "content": "4"},
    ]
    _, first, *results, second, last = read_turns(turns, ServerConfig())
    assert first["reasoning"] == first["reasoning_content"] == "Hm." and second["tool_calls"][0]["id"] == "mine"
    ids = [one["id"] for one in first["tool_calls"]]
    assert [one["tool_call_id"] for one in results] == ids == ["call00000", "call00001"]
    assert last["tool_call_id"] == "mine" and all(one["name"] == "add" for one in (*results, last))
    for wrong in (turns[2:3], [*turns, turns[2]], [*turns[:2], {**turns[2], "tool_name": "sub"}]):
        with pytest.raises(ApiError, match="no earlier tool call"):
            read_turns(wrong, ServerConfig())


def test_the_writer_needs_no_engine() -> None:
    writer = OllamaWriter("1", "demo", "message", lambda: Durations(3.0, 1.0, 2.0))
    usage = TokenUsage(5, 0, 7, None)
    data = writer.begin(usage) + writer.write(Found("", [], "Hm."), [])
    data += writer.write(Found("Yes.", [ToolDelta(0, '{"a": ', "add")]), []) + writer.write(Found(), [])
    data += writer.write(Found("", [ToolDelta(0, "1}")]), []) + writer.end("stop", None, usage)
    found = [json.loads(line) for line in data.splitlines()]
    messages = [line["message"] for line in found]
    assert messages[0] == {"role": "assistant", "content": "", "thinking": "Hm."}
    assert messages[1] == {"role": "assistant", "content": "Yes."}
    assert [one["function"]["arguments"] for one in messages[2]["tool_calls"]] == [{"a": 1}]
    assert found[3]["total_duration"] == 3_000_000_000 and found[3]["eval_duration"] == 2_000_000_000
    assert len(found) == 4 and json.loads(writer.error(failed("no", code="x"))) == {"error": "no"}


def test_the_model_and_its_names(serve_with: Callable[..., Server]) -> None:
    server = serve_with({"temperature": 0.5}, served_model_name=("mine", "other:8b"))
    listed = server.get("/api/tags").json()["models"]
    assert [one["name"] for one in listed] == [one["model"] for one in listed] == ["mine:latest", "other:8b"]
    (running, _) = server.get("/api/ps").json()["models"]
    assert running["context_length"] == 1024 and running["size_vram"] == 0 and running["size"] > 1000
    assert server.get("/api/version").json() == server.get("/version").json()
    for name in ("mine", "mine:latest", "other:8b"):
        shown = server.post("/api/show", {"model": name}).json()
        assert shown["model_info"]["general.parameter_count"] > 1000 and "temperature 0.5" in shown["parameters"]
        assert shown["model_info"][f"{shown['details']['family']}.context_length"] == 1024
        assert "completion" in shown["capabilities"] and shown["template"]
        assert server.post("/api/chat", {**ASK, "model": name, "stream": False}).json()["model"] == name
        loaded = server.post("/api/generate", {"model": name}).json()
        assert (loaded["model"], loaded["done"], loaded["done_reason"]) == (name, True, "load")
    assert server.post("/api/show", {"model": "mine:8b"}).status_code == 404


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": "llama"}, "the model 'llama' does not exist"),
        ({"model": ""}, "model is missing"),
        ({"think": "much"}, "think='much' must be one of none, minimal"),
        ({"format": "xml"}, "format='xml' must be json or a JSON schema"),
        ({"format": {"type": "x"}}, "format"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"num_predicts": 1}}, "unknown field 'options.num_predicts': did you mean num_predict"),
        ({"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ({"options": {"repeat_penalty": 1.2, "repeat_last_n": 64}}, "options.repeat_last_n=64: repeat_penalty counts"),
        ({"options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        ({"options": {"stop": ["x"] * 10_000}}, "options.stop has 10000 items"),
        ({"keep_alive": []}, "keep_alive"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs=1000"),
        ({"magic": 1}, "unknown field 'magic'"),
    ],
)
def test_wrong_fields(server: Server, path: str, change: dict[str, Any], problem: str) -> None:
    answer = server.post(path, {**(ASK if path == "/api/chat" else PROMPT), **change})
    assert answer.status_code in (400, 404) and list(answer.json()) == ["error"]
    assert problem in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "images are not supported"),
        ("chat", {"messages": [{"role": "bot", "content": "a"}]}, "role='bot' must be"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content must be a string"),
        ("chat", {"messages": ["a"]}, "messages[0] must be an object"),
        (
            *("chat", {"messages": [{"role": "user", "content": "Hi " * 3000}], "truncate": False}),
            "messages has more than 1024 tokens",
        ),
        ("chat", {"options": {"num_ctx": 8}, "truncate": False}, "options.num_ctx=8 holds prompt and answer"),
        ("generate", {"options": {"num_ctx": 3}, "truncate": False, "raw": True}, "options.num_ctx=3 holds prompt"),
        ("chat", {"tools": [TOOL]}, "tools need the form of the model's calls"),
        ("chat", {"messages": [], "keep_alive": 0}, "keep_alive=0 unloads the model"),
        ("generate", {"template": "{{ .Prompt }}"}, "template is not supported by this server: start the server with"),
        ("generate", {"context": [1]}, "context is not supported by this server: send the earlier turns"),
        ("generate", {"images": ["x"]}, "images is not supported"),
        ("generate", {"raw": True, "system": "x"}, "system contradicts raw"),
        ("generate", {"prompt": "Hi " * 3000, "truncate": False}, "prompt has more than 1024 tokens"),
        ("generate", {"prompt": "Hi " * 3000, "truncate": False, "raw": True}, "prompt has more than 1024 tokens"),
        ("generate", {"prompt": "", "keep_alive": 0}, "keep_alive=0 unloads the model"),
        ("show", {"model": None}, "model is missing"),
        ("embed", {"input": "a"}, "/api/embed is not supported: /v1/embeddings makes embeddings"),
        ("embeddings", {"prompt": "a"}, "makes embeddings"),
        ("pull", {}, "started with; start another one with `phonograph serve`"),
    ],
)
def test_refused_by_name(server: Server, path: str, body: dict[str, Any], problem: str) -> None:
    whole = {**{"chat": ASK, "generate": PROMPT}.get(path, {"model": "demo"}), **body}
    answer = server.post(f"/api/{path}", whole)
    assert answer.status_code in (400, 404) and problem in answer.json()["error"]


def test_fields_without_effect_are_named(server: Server, serve_with: Callable[..., Server]) -> None:
    options = {**ASK["options"], "num_ctx": 4096, "repeat_last_n": 64}
    body = {**ASK, "keep_alive": "5m", "truncate": True, "options": options}
    assert server.post("/api/chat", body).headers["warning"] == (
        '299 - "no effect: options.repeat_last_n, keep_alive", 299 - "no effect: options.num_ctx"'
    )
    more = {**ASK, "magic": 1, "options": {**ASK["options"], "num_magic": 1}}
    answer = serve_with(unknown_fields="warn").post("/api/chat", more)
    assert answer.status_code == 200 and "magic, options.num_magic" in answer.headers["warning"]


SYSTEM = {"role": "system", "content": "Be brief."}
CALLS = [
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
    {"role": "tool", "content": "19", "tool_name": "add"},
]


def turns(count: int, *, calls: bool = False) -> list[dict[str, Any]]:
    """Return a conversation with a system message, and questions with their numbers."""
    found = [SYSTEM]
    for number in range(count):
        found += [{"role": "user", "content": f"Question {number}: {QUESTION}"}, *(CALLS if calls else [])]
        found.append({"role": "assistant", "content": f"Answer {number}."})
    return found[:-1]


@pytest.mark.parametrize("num_ctx", [None, 0, 300])
@pytest.mark.parametrize("calls", [False, True])
def test_the_oldest_messages_are_left_out(
    server: Server, monkeypatch: pytest.MonkeyPatch, num_ctx: int | None, calls: bool
) -> None:
    rendered: list[str] = []
    encode = Serving.encode_text

    def spy(self: Serving, text: str, **options: Any) -> list[int]:
        rendered.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(Serving, "encode_text", spy)
    messages, context = turns(80, calls=calls), num_ctx or 1024
    options = {"num_ctx": num_ctx} if num_ctx is not None else {}
    body = {"model": "demo", "messages": messages, "stream": False, "options": {**options, "num_predict": 40}}
    answer = server.post("/api/chat", body)
    assert answer.status_code == 200, answer.text
    assert "warning" not in answer.headers and answer.json()["prompt_eval_count"] <= context - 40
    text = rendered[-1]
    kept = [int(number) for number in re.findall(r"Question (\d+)", text)]
    # The last ones, as many as fit, from a question on.
    assert kept == [*range(80 - len(kept), 80)] and len(kept) > 3 and "Be brief." in text
    assert f"Answer {kept[0] - 1}." not in text and len(rendered) < 12
    number = server.post("/tokenize", {"prompt": f"Question 9: {QUESTION} Answer 9. 19"}).json()["count"]
    assert answer.json()["prompt_eval_count"] > context - 40 - 2 * number
    # So are those that fit the engine's context, and not the request's.
    body["messages"], body["options"] = turns(10, calls=calls), {"num_ctx": 200, "num_predict": 40}
    assert 5 < server.post("/api/chat", body).json()["prompt_eval_count"] <= 160
    assert "Question 9" in rendered[-1] and "Question 0" not in rendered[-1]
    # What fits stays whole.
    short = server.post("/api/chat", {**body, "messages": turns(3), "options": {"num_predict": 1}}).json()
    assert re.findall(r"Question (\d)", rendered[-1]) == ["0", "1", "2"] and short["eval_count"] == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat", {"messages": [SYSTEM, {"role": "user", "content": "Tom has 12 apples. " * 400 + QUESTION}]}),
        ("chat", {"messages": [{"role": "assistant", "content": "Tom has 12 apples. " * 400}]}),
        ("generate", {"prompt": "Tom has 12 apples. " * 400 + QUESTION}),
        ("generate", {"prompt": "Tom has 12 apples. " * 400 + QUESTION, "raw": True}),
    ],
)
@pytest.mark.parametrize(("predicted", "room"), [(None, 256), (20, 20), (-1, 256), (2000, 512)])
def test_of_a_message_that_is_too_long_the_last_tokens_stay(
    server: Server, path: str, body: dict[str, Any], predicted: int | None, room: int
) -> None:
    options = {} if predicted is None else {"options": {"num_predict": predicted}}
    answer = server.post(f"/api/{path}", {"model": "demo", "stream": False, **body, **options})
    assert answer.status_code == 200 and answer.json()["prompt_eval_count"] == 1024 - room
    assert answer.json()["eval_count"] <= room


def test_an_answer_ends_with_its_context(server: Server) -> None:
    for (path, body), predicted in itertools.product((("chat", ASK), ("generate", PROMPT)), (-1, 40)):
        whole = {**body, "stream": False, "options": {"temperature": 0, "num_ctx": 64, "num_predict": predicted}}
        count = server.post(f"/api/{path}", whole).json()["prompt_eval_count"]
        whole["options"]["num_ctx"] = count + 2
        answer = server.post(f"/api/{path}", whole).json()
        assert (answer["prompt_eval_count"], answer["eval_count"], answer["done_reason"]) == (count, 2, "length")


def test_the_request_that_looks_for_a_server(serve_with: Callable[..., Server]) -> None:
    answer = httpx.head(serve_with(api_key=("KEY",)).url)
    assert answer.status_code == 200 and not answer.content


def test_keys_and_unknown_paths_in_the_form_of_errors(serve_with: Callable[..., Server]) -> None:
    server = serve_with(api_key=("KEY",))
    assert "API key" in server.get("/api/tags").json()["error"]
    opened = {"authorization": "Bearer KEY"}
    assert server.get("/api/tags", headers=opened).status_code == 200
    assert isinstance(server.get("/api/other", headers=opened).json()["error"], str)
    assert "not JSON" in httpx.post(f"{server.url}/api/chat", headers=opened, content=b"{").json()["error"]
