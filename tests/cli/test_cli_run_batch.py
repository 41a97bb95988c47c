"""`phonograph run-batch`: OpenAI's files, answered in order; a file without requests is found before the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def test_a_file_is_answered_in_its_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        line("long", prompt="Tom has", max_tokens=40, ignore_eos=True),
        line("chat", "/v1/chat/completions", **CHAT, model="demo"),
        line("wrong", prompt="a", temperature=-1),
        line("elsewhere", "/v1/audio/transcriptions", prompt="a"),
        line("streamed", prompt="a", stream="True"),
        line("response", "/v1/responses", input="a", max_output_tokens=1),
        *(line(f"n{number}", prompt="a", max_tokens=2, n=4) for number in range(9)),
    ]
    requests.write_text("\n".join([*lines, "", ""]))
    answers.write_text("of an earlier run\n")
    flags = ["--max-num-seqs", "2", "--max-queued-requests", "3", "--enforce-eager", "--max-model-len", "256"]
    run(capsys, "run-batch", "demo", "-i", str(requests), "-o", str(answers), *flags)
    found = [json.loads(text) for text in answers.read_text().splitlines()]
    names = ["long", "chat", "wrong", "elsewhere", "streamed", "response", *(f"n{number}" for number in range(9))]
    assert [one["custom_id"] for one in found] == names
    assert len({one["id"] for one in found}) == 15 and all(one["error"] is None for one in found)
    responses = [one["response"] for one in found]
    assert [one["status_code"] for one in responses] == [200, 200, 400, 400, 400, *[200] * 10]
    long, chat, wrong, elsewhere, streamed, response, *others = (one["body"] for one in responses)
    assert long["usage"]["completion_tokens"] == 40 and long["id"] == f"cmpl-{responses[0]['request_id']}"
    assert chat["object"] == "chat.completion" and wrong["error"]["param"] == "temperature"
    assert "must be one of /v1/chat/completions" in elsewhere["error"]["message"]
    assert "not streamed" in streamed["error"]["message"] and response["object"] == "response"
    assert all(len(other["choices"]) == 4 for other in others)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: "),
        ("[]", "line 1: is not a JSON object such as"),
        (f"{line('a', prompt='b')}\n{line('a', prompt='b')}", "line 2: custom_id 'a' is in an earlier line"),
        ('{"url": "/v1/completions", "body": {}}', "line 1: custom_id must be a text"),
        (
            line("a", "/embeddings"),
            "no line can be answered; the first one: url='/embeddings': must be one of /v1/chat",
        ),
        (line("a", stream=True), "no line can be answered; the first one: stream=true"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": 5}', "body must be a JSON object"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "method='GET': must be POST"),
    ],
)
def test_lines_that_are_no_requests_are_named_with_their_number(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from phonograph.cli.app import main

    (tmp_path / "in").write_text(text)
    assert main(["run-batch", "demo", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("phonograph: error: input_file=") and said in error
    assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from phonograph.cli.app import main

    (tmp_path / "in").write_text(line("a", prompt="b"))
    for words, said in (
        (["-i", str(tmp_path / "absent"), "-o", "x"], "input_file='"),
        (["-i", str(tmp_path / "in"), "-o", str(tmp_path / "no" / "out")], "output_file='"),
    ):
        assert main(["run-batch", "demo", *words]) == 2
        assert said in capsys.readouterr().err


def test_a_file_without_lines_has_no_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text("\n")
    run(capsys, "run-batch", "demo", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == ""
