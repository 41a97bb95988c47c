"""`chat --url` and `generate --url`: the model of a server in place of an engine of the command."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import run, run_json
from scripted_server import OK, Script, events, scripted
from servers import EngineThread, Server, serving

from phonograph.cli.app import main
from phonograph.config.server_config import ServerConfig


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineThread]:
    with EngineThread() as thread:
        yield thread


@pytest.fixture
def server(engine: EngineThread) -> Iterator[Server]:
    with serving(engine, ServerConfig(api_key="secret", served_model_name="mine,other")) as server:
        yield server


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")


def test_a_prompt_is_streamed(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--url", f"{server.url}/v1", "--max-tokens", "8", "--raw"]
    text = run(capsys, "generate", "Tom has", *words)
    (sample,) = run_json(capsys, "generate", "Tom has", *words)["outputs"]
    assert text == sample["text"] + "\n" and sample["num_output_tokens"] == 8 and sample["finish_reason"] == "length"
    expected = server.post(
        "/v1/completions",
        {"prompt": "Tom has", "max_tokens": 8, "temperature": 0},
        headers={"authorization": "Bearer secret"},
    )
    assert sample["text"] == expected.json()["choices"][0]["text"]


def test_several_prompts_and_samples_are_sent_at_one_time(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--url", server.url, "--max-tokens", "3", "--n", "2", "--temperature", "1", "--token-ids", "5,6,7"]
    record = run_json(capsys, "generate", "other", "Hi", "Ho", *words)
    assert record["model"] == "other", "a first word that names a model of the server"
    assert [(row["prompt"], row["sample"]) for row in record["outputs"]] == [
        ("Hi", 0),
        ("Hi", 1),
        ("Ho", 0),
        ("Ho", 1),
        ([5, 6, 7], 0),
        ([5, 6, 7], 1),
    ]
    text = run(capsys, "generate", "Hi", "Ho", "--url", server.url, "--max-tokens", "3")
    assert [line for line in text.splitlines() if line.startswith("> ")] == ["> Hi", "> Ho"]


def test_a_conversation(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "Tom has 12 apples. How many?\n/nothing\nAnd then?\n/clear\nHi\n/exit\nno more\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    words = ["--url", server.url, "--model", "other", "--max-tokens", "5", "--system", "Be brief."]
    records = [json.loads(line) for line in run(capsys, "chat", *words, "--json").splitlines()]
    assert [record["prompt"] for record in records] == ["Tom has 12 apples. How many?", "And then?", "Hi"]
    first, second, third = (record["num_prompt_tokens"] for record in records)
    assert second > first > third, "turns are sent again, until /clear"
    assert all(record["model"] == "other" and record["ttft_seconds"] > 0 for record in records)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    assert main(["chat", *words, "--quiet"]) == 0
    assert capsys.readouterr() == (records[2]["text"] + "\n", "")


def test_a_refused_turn_is_told_and_the_conversation_goes_on(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'a b ' * 2000}\nHi\n"))
    first, second = run(capsys, "chat", "--url", server.url, "--max-tokens", "5", "--json").splitlines()
    assert "the server answered 400: messages has more than" in json.loads(first)["error"]
    assert json.loads(second)["finish_reason"]
    assert main(["generate", "a b " * 2000, "--url", server.url]) == 2
    assert "refused: url=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "localhost:8000"], "url='localhost:8000': must be an address such as http://127.0.0.1:8000"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9 cannot be reached (Connection refused"),
        (["--url", "URL", "--max-num-seqs", "4"], "max_num_seqs='4': is for an engine of this command"),
        (["--url", "URL", "--config", "a.yaml"], "config='a.yaml': is for an engine of this command"),
        (["--url", "URL", "--logprobs", "1", "--json"], "logprobs=1: is not available with --url"),
        (["--url", "URL", "--model", "absent"], "the server answered 404: the model 'absent' does not exist"),
        (["--url", "URL", "--api-key", "wrong"], "/v1/models answered 401: a valid API key is needed"),
    ],
)
def test_what_does_not_work_is_named(
    words: list[str], said: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "Hi", *(server.url if word == "URL" else word for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_without_a_url_a_key_is_no_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "Hi", "--api-key", "a"]) == 2
    assert "api_key needs --url, the server that it is for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ([OK, events({"choices": [{"index": 0, "text": "ab"}]}, {"error": {"message": "it failed"}})], "it failed"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n", b"data: {}\n\n"], "the answer broke off"),
        ([OK, b"data: no JSON\n\n"], "the answer broke off (Expecting value"),
        ([b"HTTP/1.1 500 No\r\ncontent-length: 3\r\n\r\n", b"<p>"], "answered 500: <p>"),
    ],
)
def test_answers_that_fail(script: Script, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(lambda _: script) as server:
        assert main(["generate", "Hi", "--url", server.url]) == 2
    assert said in capsys.readouterr().err


def test_parameters_are_sent_only_if_they_differ_from_the_defaults(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Servers of other makers refuse some by name."""
    script: Script = [OK, events({"choices": [{"index": 0, "delta": {"content": "ab"}, "finish_reason": "stop"}]})]
    with scripted(lambda _: script) as server:
        assert run(capsys, "generate", "Hi", "--url", server.url) == "ab\n"
        run(capsys, "generate", "Hi", "--url", server.url, "--top-k", "5", "--stop", "x", "--sampling-seed", "7")
        (tmp_path / "a.gbnf").write_text('root ::= "a"')
        run(capsys, "generate", "Hi", "--url", server.url, "--grammar-file", str(tmp_path / "a.gbnf"))
        schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
        run(capsys, "generate", "Hi", "--url", server.url, "--json-schema", schema)
        run(capsys, "generate", "Hi", "--url", server.url, "--format", "json")
    plain, more, grammar, of_schema, of_json = server.bodies
    assert plain == {
        "messages": [{"role": "user", "content": "Hi"}],
        "model": "scripted",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "max_tokens": 256,
    }
    assert more == {**plain, "top_k": 5, "stop": ["x"], "seed": 7}
    assert grammar == {**plain, "structured_outputs": {"grammar": 'root ::= "a"'}}
    meant = {"type": "json_schema", "json_schema": {"name": "answer", "schema": json.loads(schema)}}
    assert of_schema == {**plain, "response_format": meant}
    assert of_json == {**plain, "response_format": {"type": "json_object"}}
    assert b"authorization: bearer secret" in server.heads[0].lower()
