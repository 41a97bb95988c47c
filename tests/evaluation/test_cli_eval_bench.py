"""`phonograph bench`, the developers' benches and the demo's evaluation as they are typed."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from commands import Program, run, run_json

from bench import workloads
from bench.__main__ import main as bench
from bench.result_files import output_file, write_result
from demo_evaluation.__main__ import main as evaluation
from phonograph.bench.records.output import check_output
from phonograph.bench.records.results import append_record
from phonograph.cli.app import main
from phonograph.errors import ConfigError

FEW_GRAPHS = ["--max-num-seqs", "4", "--cudagraph-capture-sizes", "1,4,512"]


def test_eval_demo_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = str(tmp_path / "first.json"), str(tmp_path / "second.json")
    few = ["--problems", "5", "--recalls", "2", "--recall-tokens", "100", "--eval-seed", "9"]
    # The demo model is the default.
    shown = run_json(capsys, *few, *FEW_GRAPHS, "--output", first, program=evaluation)
    assert shown["model"] == "demo" and shown["mode"]["resolved"] == "FULL"
    assert [(task["task"], task["count"]) for task in shown["tasks"]] == [("problems", 5), ("recalls", 2)]
    assert sum(shown["tasks"][0]["steps"].values()) > 0 and "eager" not in shown["tasks"][0]["steps"]
    written = json.loads(Path(first).read_text())
    assert {"date", "commit", "hardware", "command"} < written.keys() & shown.keys()
    assert written["tasks"] == shown["tasks"] and len(written["items"]) == 7
    assert sum(item["correct"] for item in written["items"]) == sum(task["correct"] for task in shown["tasks"])

    assert evaluation(["--model", "demo", *few, "--enforce-eager", "--output", second]) == 0
    table, notes = capsys.readouterr()
    assert "problems" in table and "of 5" in table
    assert re.match(r"5 problems and 2 recalls, about \d+ s\n", notes)
    same = run_json(capsys, "compare", first, second, program=evaluation)
    assert [(task["task"], task["difference"], task["divergences"]) for task in same["tasks"]] == [
        ("problems", 0.0, []),
        ("recalls", 0.0, []),
    ]
    written["items"][3]["token_ids"][-1] += 1
    Path(second).write_text(json.dumps(written))
    assert "problems 3: from token" in run(capsys, "compare", first, second, code=1, program=evaluation)


def _bench(capsys: pytest.CaptureFixture[str], *tokens: str) -> dict[str, Any]:
    return run_json(capsys, *tokens, "--model", "demo", *FEW_GRAPHS, program=bench)


def test_bench_of_the_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    latency = ["latency", "--input-len", "5,9", "--output-len", "4", "--batch-size", "2"]
    settings = ["--model", "demo", *FEW_GRAPHS]
    found = run_json(capsys, "bench", *latency, "--num-iters-warmup", "1", "--num-iters", "2", *settings)
    assert [row["steps"] for row in found["rows"]] == [{"full mixed": 2, "full decode": 6}] * 2
    assert [(row["input_len"], row["bs"], row["out_len"]) for row in found["rows"]] == [(5, 2, 4), (9, 2, 4)]
    assert {"date", "commit", "hardware", "command"} < found.keys()

    throughput = ["throughput", "--num-prompts", "6", "--input-len", "3-9", "--output-len", "5"]
    (row,) = run_json(capsys, "bench", *throughput, *settings)["rows"]
    assert row["out_tok"] == 6 * 5 and row["out_tok_s"] == pytest.approx(30 / row["s"], rel=0.01)

    output = tmp_path / "results.jsonl"
    suites = ["suite", "--suites", "decode,latency", "--decode-cases", "2x30", "--latency-cases", "7"]
    shown = run(capsys, *suites, *settings, "--output", str(output), program=bench)
    assert any("2x30" in text and "full decode" in text for text in shown.splitlines()) and "{" not in shown
    (found,) = map(json.loads, output.read_text().splitlines())
    assert [(row["suite"], row["case"]) for row in found["rows"]] == [("decode", "2x30"), ("latency", "7")]
    assert found["max_model_len"] == 8192 and found["max_num_seqs"] == 4


def test_bench_mixed_takes_two_at_a_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "MIXED_SHORT_PROMPTS", 10)
    monkeypatch.setattr(workloads, "MIXED_TOKENS", 10)
    mixed = ["mixed", "--cases", "40", "--model", "demo", "--cudagraph-capture-sizes", "2,8,512"]
    found = run_json(capsys, *mixed, program=bench)
    assert found["max_num_seqs"] == 2 and found["rows"][0]["mixed_steps"] == 9


def test_rows_before_a_failure_are_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    # The second suite is found not to fit only when its turn comes.
    suites = ["suite", "--suites", "decode,latency", "--decode-cases", "1x9", "--latency-cases", "9k", "--json"]
    shown = run(capsys, *suites, "--model", "demo", *FEW_GRAPHS, "--output", str(output), code=2, program=bench)
    assert [row["case"] for row in json.loads(shown)["rows"]] == ["1x9"]
    assert json.loads(output.read_text())["complete"] is False


def test_bench_attention(capsys: pytest.CaptureFixture[str]) -> None:
    found = _bench(capsys, "attention", "--cases", "3*1@40+5@9,decode_1x1k")
    assert found["attention_backend"] == "reference"
    first, second = found["rows"]
    assert (first["case"], second["case"]) == ("3*1@40+5@9", "decode_1x1k")
    assert first["us"] > 0 and first["schedule_us"] > 0 and first["err"] < 1e-5 and not first["graph"]


def test_bench_startup(capsys: pytest.CaptureFixture[str]) -> None:
    found = _bench(capsys, "startup", "--load-format", "dummy")
    assert [row["case"] for row in found["rows"]] == ["first", "second"]
    for row in found["rows"]:
        assert sum(row["phases"].values()) == pytest.approx(row["seconds"], abs=0.01)
        assert list(row["phases"])[:3] == ["interpreter", "imports", "configuration"] and "graphs" in row["phases"]
        assert row["engine_seconds"] < row["seconds"] and row["first_tokens_seconds"] > 0


@pytest.mark.parametrize(
    "tokens",
    [
        ["bench", "throughput", "--model", "demo", "--input-len", "9-3"],
        ["bench", "latency", "--model", "demo", "--batch-size", "3", "--max-num-seqs", "2", "--enforce-eager"],
        ["bench", "latency"],
        ["bench", "decode", "demo"],
        ["eval", "demo", "--problems", "4"],
        ["bench", "latency", "--model", "demo", "--num-iters", "0"],
    ],
)
def test_a_mistake_is_one_line_and_code_2(tokens: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tokens) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("phonograph: error: ")


@pytest.mark.parametrize(
    ("program", "tokens"),
    [
        (bench, ["decode", "--model", "demo", "--cases", "eight"]),
        (bench, ["suite", "--model", "demo", "--suites", "decode,mixed"]),
        (bench, ["suite", "--model", "demo", "--suites", "decode,speed"]),
        (bench, ["attention", "--model", "demo", "--cases", "2@1"]),
        (bench, ["decode", "--no-such-flag"]),
        (evaluation, ["compare", "nowhere.json", "nowhere.json"]),
    ],
)
def test_a_mistake_in_a_program_for_developers_is_one_line_too(
    program: Program, tokens: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(tokens) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ": error: " in line


@pytest.mark.parametrize(
    ("program", "command"),
    [
        (evaluation, []),
        *((bench, [name, "--model", "demo"]) for name in ("decode", "mixed", "idle", "step", "attention", "startup")),
        (bench, ["suite", "--model", "demo", "--suites", "decode"]),
        *((main, ["bench", name, "--model", "demo"]) for name in ("latency", "throughput")),
        (main, ["bench", "serve"]),
    ],
)
def test_output_that_cannot_be_written_is_refused_before_the_work(
    program: Program,
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("the work began")

    for place in ("phonograph.bench.records.record", "bench.__main__", "demo_evaluation.__main__"):
        monkeypatch.setattr(f"{place}.provenance", work)
    assert program([*command, "--output", str(tmp_path)]) == 2
    assert f"output='{tmp_path}': cannot be written: [Errno 21] Is a directory" in capsys.readouterr().err


def test_the_try_leaves_nothing_behind(tmp_path: Path) -> None:
    new, old = tmp_path / "folder" / "new", tmp_path / "old"
    old.write_text("kept")
    check_output(new)
    check_output(old)
    assert not new.exists() and old.read_text() == "kept"
    with pytest.raises(ConfigError, match=r"output='.*old/below': cannot be written: .*'.*old'"):
        check_output(old / "below")


def test_programs_of_their_own_try_their_output_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    parser.add_argument("--output", type=output_file)
    assert parser.parse_args(["--output", str(tmp_path / "new")]).output == tmp_path / "new"
    with pytest.raises(SystemExit):
        parser.parse_args(["--output", str(tmp_path)])
    assert f"argument --output: output='{tmp_path}': cannot be written" in capsys.readouterr().err


def test_results_are_shown_where_the_disk_has_become_full(capsys: pytest.CaptureFixture[str]) -> None:
    full = Path("/dev/full")
    for write in (lambda: write_result(full, {}, {}), lambda: append_record(full, {})):
        with pytest.raises(ConfigError, match="output='/dev/full': cannot be written: .* No space left on device"):
            write()
    few = ["--problems", "1", "--recalls", "0", "--output", str(full)]
    assert evaluation([*few, *FEW_GRAPHS, "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tasks"][0]["count"] == 1 and "output='/dev/full'" in captured.err
