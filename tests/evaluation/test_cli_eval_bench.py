"""`phonograph eval` and `phonograph bench` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phonograph.cli.app import main

FEW_GRAPHS = ["--max-num-seqs", "4", "--cudagraph-capture-sizes", "1,4,512"]


def _run(capsys: pytest.CaptureFixture[str], *tokens: str, code: int = 0) -> str:
    got = main(list(tokens))
    captured = capsys.readouterr()
    assert got == code, captured.err
    return captured.out


def _json(capsys: pytest.CaptureFixture[str], *tokens: str, code: int = 0) -> dict[str, Any]:
    (line,) = _run(capsys, *tokens, "--json", code=code).splitlines()
    return json.loads(line)


def test_eval_demo_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = str(tmp_path / "first.json"), str(tmp_path / "second.json")
    few = ["--problems", "5", "--recalls", "2", "--recall-tokens", "100", "--eval-seed", "9"]
    # The demo model is the default.
    shown = _json(capsys, "eval", "demo", *few, *FEW_GRAPHS, "--output", first)
    assert shown["model"] == "demo" and shown["mode"]["resolved"] == "FULL"
    assert [(task["task"], task["count"]) for task in shown["tasks"]] == [("problems", 5), ("recalls", 2)]
    assert sum(shown["tasks"][0]["steps"].values()) > 0 and "eager" not in shown["tasks"][0]["steps"]
    written = json.loads(Path(first).read_text())
    assert {"date", "commit", "hardware", "command"} < written.keys() & shown.keys()
    assert written["tasks"] == shown["tasks"] and len(written["items"]) == 7
    assert sum(item["correct"] for item in written["items"]) == sum(task["correct"] for task in shown["tasks"])

    table = _run(capsys, "eval", "demo", "--model", "demo", *few, "--enforce-eager", "--output", second)
    assert "problems" in table and "of 5" in table
    same = _json(capsys, "eval", "compare", first, second)
    assert [(task["task"], task["difference"], task["divergences"]) for task in same["tasks"]] == [
        ("problems", 0.0, []),
        ("recalls", 0.0, []),
    ]
    written["items"][3]["token_ids"][-1] += 1
    Path(second).write_text(json.dumps(written))
    assert "problems 3: from token" in _run(capsys, "eval", "compare", first, second, code=1)


def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    latency = ["bench", "latency", "--model", "demo", *FEW_GRAPHS, "--input-len", "5", "--output-len", "4"]
    latency += ["--batch-size", "2", "--num-iters-warmup", "1", "--num-iters", "2"]
    found = _json(capsys, *latency)
    assert found["steps"] == {"full mixed": 2, "full decode": 6}
    assert found["batch_size"] == 2 and found["latency_seconds"]["p50"] > found["itl_seconds"]["p50"] > 0
    assert found["output_tokens_per_second"] == pytest.approx(2 * 4 / found["latency_seconds"]["mean"])
    assert {"date", "commit", "hardware", "command"} < found.keys()

    throughput = ["bench", "throughput", "--model", "demo", *FEW_GRAPHS, "--num-prompts", "6", "--input-len", "3-9"]
    found = _json(capsys, *throughput, "--output-len", "5")
    assert found["output_tokens_per_second"] == pytest.approx(6 * 5 / found["seconds"])
    assert found["requests_per_second"] == pytest.approx(6 / found["seconds"])
    table = _run(capsys, *throughput, "--output-len", "1")
    assert "ttft" in table and "itl" not in table, "one token has no gap"


@pytest.mark.parametrize(
    "tokens",
    [
        ["bench", "throughput", "--model", "demo", "--input-len", "9-3"],
        ["bench", "latency", "--model", "demo", "--batch-size", "3", "--max-num-seqs", "2", "--enforce-eager"],
        ["bench", "latency"],
        ["eval", "compare", "nowhere.json", "nowhere.json"],
    ],
)
def test_a_mistake_is_one_line_and_code_2(tokens: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tokens) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("phonograph: error: ")
