"""`phonograph generate`: the answer, what it says about the graphs, prompts of every kind, and refusals."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run

from phonograph.cli.app import main
from phonograph.cli.commands import generate as generate_module
from phonograph.cli.sampling_flags import SamplingFlags
from phonograph.core.sampling_params import SamplingParams
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import PhonographError
from phonograph.graphs.modes import GraphMode, GraphSupport, Support
from phonograph.graphs.resolve import Resolution

QUESTION = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"


def test_the_command_answers_and_counts_its_steps() -> None:
    command = [sys.executable, "-m", "phonograph", "generate", "--model", "demo", "--json", QUESTION]
    small = ["--max-num-seqs", "4", "--max-cudagraph-capture-size", "32"]
    result = subprocess.run(
        [*command, *small], capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    (output,) = facts["outputs"]
    assert output["prompt"] == QUESTION and output["finish_reason"] == "stop"
    assert output["text"].split()[-1] == "19"
    assert facts["mode"]["asked"] is None and facts["mode"]["resolved"] == "FULL"
    assert "ALWAYS" in facts["mode"]["reasons"][0]
    # One step of prefill, which makes the first token, and one for each token after it.
    assert facts["steps"] == {"full mixed": 1, "full decode": len(output["token_ids"]) - 1}
    assert facts["seconds"] > 0 and facts["start_seconds"] > 0


def test_five_modes_give_the_same_tokens_by_the_graphs_they_name(run_json: Any, demo: list[str]) -> None:
    kinds = {
        "NONE": {"eager"},
        "PIECEWISE": {"piecewise"},
        "FULL": {"full decode", "full mixed"},
        "FULL_DECODE_ONLY": {"full decode", "eager"},
        "FULL_AND_PIECEWISE": {"full decode", "piecewise"},
    }
    tokens = {}
    for mode in GraphMode.__members__:
        (facts,) = run_json("generate", *demo, "--cudagraph-mode", mode, QUESTION)
        assert facts["mode"]["asked"] == facts["mode"]["resolved"] == mode
        assert set(facts["steps"]) == kinds[mode]
        tokens[mode] = facts["outputs"][0]["token_ids"]
    assert len(tokens["NONE"]) > 5
    assert all(ids == tokens["NONE"] for ids in tokens.values())


def test_one_prompt_is_streamed_and_followed_by_graph_decisions(
    run_json: Any, demo: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (facts,) = run_json("generate", *demo, QUESTION)
    pieces: list[str] = []
    monkeypatch.setattr(generate_module, "print_piece", pieces.append)
    assert main(["generate", *demo, QUESTION]) == 0
    captured = capsys.readouterr()
    assert captured.out == "\n", "the text comes in pieces, and the end of its line here"
    assert len(pieces) > 5 and "".join(pieces) == facts["outputs"][0]["text"]
    (line,) = captured.err.splitlines()
    assert re.fullmatch(r"mode FULL \(default\), \d+ steps: \d+ full decode, 1 full mixed", line)


def test_ctrl_c_ends_the_answer_between_two_steps(
    demo: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[str] = []

    def interrupt(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(generate_module, "print_piece", interrupt)
    assert main(["generate", *demo, QUESTION]) == 130
    assert len(pieces) == 3
    assert " steps: " in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_prompts_from_arguments_standard_input_and_token_ids_keep_their_order(
    run_json: Any, demo: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"hello\n\n{QUESTION}\n"))
    ids = "1,7,9,12"
    (facts,) = run_json("generate", *demo, "first", "-", "--token-ids", ids, "--max-tokens", "3")
    assert [output["prompt"] for output in facts["outputs"]] == ["first", "hello", QUESTION, ids]
    assert all(0 < len(output["token_ids"]) <= 3 for output in facts["outputs"])
    assert facts["outputs"][3]["num_prompt_tokens"] == 4


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_lines_that_are_not_utf8_are_named(
    command: str, errors: str, demo: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = io.TextIOWrapper(io.BytesIO("déjà vu\n".encode("latin-1")), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", given)
    assert main([command, *demo, *(["-"] if command == "generate" else [])]) == 2
    assert "standard input='d\\udce9j\\udce0 vu': is not utf-8; convert it" in capsys.readouterr().err


def test_an_argument_that_is_not_utf8_is_named(demo: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *demo, "d\udce9j"]) == 2
    assert "prompt='d\\udce9j': is not utf-8; convert it" in capsys.readouterr().err.lower()


def test_raw_leaves_the_chat_template_out(run_json: Any, demo: list[str]) -> None:
    (chat,) = run_json("generate", *demo, QUESTION, "--max-tokens", "1")
    (raw,) = run_json("generate", *demo, QUESTION, "--max-tokens", "1", "--raw")
    assert chat["outputs"][0]["num_prompt_tokens"] > raw["outputs"][0]["num_prompt_tokens"]


def test_a_refused_prompt_does_not_stop_the_others(
    run_json: Any, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["--token-ids", "3,4", "--token-ids", "3,97", "--token-ids", ",".join(["5"] * 250), "--max-tokens", "4"]
    (facts,) = run_json("generate", *tiny, *prompts, "--ignore-eos", code=2)
    good, unknown, too_long = facts["outputs"]
    assert len(good["token_ids"]) == 4 and "error" not in good
    assert "97: the model's token ids are 0 to 96" in unknown["error"]
    assert "250" in too_long["error"] and "token_ids" not in too_long

    assert main(["generate", *tiny, *prompts, "--ignore-eos"]) == 2
    captured = capsys.readouterr()
    answer = ",".join(map(str, good["token_ids"]))
    assert f"> 3,4\n{answer}\n" in captured.out, "without a tokenizer the tokens are the answer"
    assert captured.err.count("refused: ") == 2


def test_samples_and_their_seed(run_json: Any, tiny: list[str]) -> None:
    def sample(*flags: str) -> list[list[int]]:
        (facts,) = run_json("generate", *tiny, "--token-ids", "8,9", "--max-tokens", "12", "--temperature", "2", *flags)
        assert [output["sample"] for output in facts["outputs"]] == [0, 1, 2]
        return [output["token_ids"] for output in facts["outputs"]]

    seeded = sample("--n", "3", "--sampling-seed", "5")
    assert seeded == sample("--n", "3", "--sampling-seed", "5")
    assert seeded != sample("--n", "3", "--sampling-seed", "6")
    assert seeded[0] != seeded[1] != seeded[2]


def test_log_probabilities(run_json: Any, tiny: list[str]) -> None:
    (facts,) = run_json(
        "generate", *tiny, "--token-ids", "8,9", "--max-tokens", "5", "--ignore-eos", "--logprobs", "97"
    )
    (output,) = facts["outputs"]
    assert len(output["logprobs"]) == 5
    for token_id, position in zip(output["token_ids"], output["logprobs"], strict=True):
        assert position["token_id"] == token_id == position["top"][0]["token_id"], "greedy takes the most likely"
        assert position["rank"] == 1
        assert sum(math.exp(one["logprob"]) for one in position["top"]) == pytest.approx(1.0, abs=1e-5)


def test_flags_become_sampling_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []

    class Engine:
        tokenizer = None

        def generate(self, prompts: Any, params: SamplingParams, **_: Any) -> None:
            seen.append(params)
            raise PhonographError("enough")

    monkeypatch.setattr(generate_module, "start", lambda config: Engine())
    text = (
        "--temperature 0.5 --max-tokens 9 --min-tokens 2 --top-k 7 --top-p 0.9 --min-p 0.05 --repetition-penalty 1.2 "
        "--presence-penalty 0.3 --frequency-penalty -0.4 --sampling-seed 11 --stop ab --stop c --stop-token-id 4 "
        "--stop-token-id 5 --ignore-eos --n 2 --logprobs 3"
    )
    flags = text.split()
    assert main(["generate", "--model", "none", "--token-ids", "1", "--json"]) == 2
    assert main(["generate", "--model", "none", "--token-ids", "1", "--json", "--seed", "3", *flags]) == 2
    assert seen == [
        SamplingParams(temperature=0.0, max_tokens=256),
        SamplingParams(
            temperature=0.5,
            max_tokens=9,
            min_tokens=2,
            top_k=7,
            top_p=0.9,
            min_p=0.05,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=-0.4,
            seed=11,
            stop=["ab", "c"],
            stop_token_ids=[4, 5],
            ignore_eos=True,
            n=2,
            logprobs=3,
        ),
    ]


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([], "prompts=[]: give a prompt after the model ('demo')"),
        (["x", "--temperature", "-1"], "temperature=-1.0: must be a finite number >= 0"),
        (["x", "--temperature", "warm"], 'unable to convert "warm" into float'),
        (["x", "--logprobs", "2"], "logprobs=2: is printed with --json only"),
        (["--token-ids", "1,b"], "token_ids='1,b': must be token ids"),
        (["x", "--max-token", "3"], "Did you mean --max-tokens?"),
        (["x", "--stop", ""], "stop='': each stop must be a non-empty string"),
        (["x", "--grammar-file", "absent.gbnf"], "grammar_file='absent.gbnf': cannot be read: No such file"),
        (["x", "--grammar-file", os.devnull], "grammar='': must be a non-empty string"),
        (["x", "--grammar-file", sys.executable], "cannot be read: 'utf-8' codec can't decode"),
        (["x", "--json-schema", "{"], "json_schema='{': is not valid JSON"),
        (["x", "--json-schema", "[1]"], "json_schema='[1]': must be a JSON schema: an object"),
        (["x", "-jf", "absent.json"], "json_schema_file='absent.json': cannot be read: No such file"),
        (["x", "--json-schema-file", os.devnull], f"json_schema_file='{os.devnull}': is not valid JSON"),
        (["x", "--format", "yaml"], "format='yaml': is not valid JSON: Expecting value"),
        (["x", "--format", "yaml"], "; json is any JSON object"),
        (["x", "--format", "json", "-j", "{}"], "format='json': contradicts json_schema; give one of them"),
        (["x", "--grammar-file", "a", "-j", "{}"], "json_schema='{}': contradicts grammar_file; give one of them"),
    ],
)
def test_an_error_is_printed_before_an_engine_starts(
    tokens: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_module, "start", lambda config: pytest.fail("an engine was started"))
    assert main(["generate", "--model", "demo", *tokens]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert says in captured.err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_grammar_of_a_file_holds_the_output(
    command: str, demo: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answer.gbnf"
    file.write_text('root ::= "quite " ("blue" | "green")', encoding="utf-8")
    text = run(capsys, command, *demo, "What is the sky?", "--grammar-file", str(file))
    assert text in ("quite blue\n", "quite green\n")


SCHEMA = {"type": "object", "properties": {"sky": {"enum": ["blue", "green"]}}, "required": ["sky"]}


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("flag", ["--json-schema", "-j", "-jf", "--json-schema-file", "--format"])
def test_a_schema_holds_the_output(
    command: str, flag: str, demo: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = json.dumps(SCHEMA)
    if "f" in flag.removeprefix("--f"):
        (tmp_path / "schema.json").write_text(schema, encoding="utf-8")
        schema = str(tmp_path / "schema.json")
    text = run(capsys, command, *demo, "What is the sky?", flag, schema)
    assert json.loads(text)["sky"] in ("blue", "green") and len(json.loads(text)) == 1


def test_an_empty_schema_is_any_object() -> None:
    for flags in (SamplingFlags(format="json"), SamplingFlags(format=" {\n }"), SamplingFlags(json_schema="{}")):
        assert flags.params().structured_outputs == StructuredOutputs(json_object=True)
    assert SamplingFlags().params().structured_outputs is None
    assert SamplingFlags(json_schema="true").params().structured_outputs == StructuredOutputs(json=True)


def test_text_for_a_model_without_tokenizer_is_refused(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *tiny, "hello"]) == 2
    assert "prompt='hello': is text, and the engine runs without a tokenizer" in capsys.readouterr().err


def test_running_a_declared_backend_names_the_missing_part(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *tiny, "--attention-backend", "flashinfer", "--token-ids", "1"]) == 2
    error = capsys.readouterr().err
    assert "flashinfer refuses: " in error and "Would serve: reference" in error


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from phonograph.cli.app import main\n"
        "sys.exit(max(main([name, '--help']) for name in ('generate', 'chat', 'explain', 'verify')))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert all(flag in result.stdout for flag in ("--token-ids", "--system", "--batch", "--replays", "--max-num-seqs"))


def test_the_resolved_mode_is_printed_with_the_requested_one(
    capsys: pytest.CaptureFixture[str], demo: list[str]
) -> None:
    for mode, said in (("FULL_DECODE_ONLY", "mode FULL_DECODE_ONLY, "), ("NONE", "mode NONE, ")):
        assert main(["generate", *demo, "--cudagraph-mode", mode, "--max-tokens", "2", QUESTION]) == 0
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(said)
    plan = Resolution(
        asked=GraphMode.FULL, mode=GraphMode.FULL_AND_PIECEWISE, support=Support(GraphSupport.ALWAYS, ""), reasons=()
    )
    assert plan.label == "mode FULL_AND_PIECEWISE (FULL was asked for)"
