"""Flags of vLLM's that are not here: an error names the flag that takes their place, or says that there is none."""

from __future__ import annotations

import json
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from phonograph.cli.app import COMMANDS, app, main
from phonograph.cli.options import ENGINE_FIELDS, SERVER_FIELDS
from phonograph.config.engine_config import EngineConfig
from phonograph.config.sources import OTHER_VARIABLES
from phonograph.config.vllm_flag_table import (
    ALWAYS,
    MISSING,
    NEUTRAL,
    NO_MEANING,
    RENAMED,
    SWITCHES,
    VARIABLES,
)
from phonograph.config.vllm_flags import SAMPLING, explain_flag, is_neutral
from phonograph.core.sampling_params import SamplingParams
from phonograph.errors import ConfigError


def flags_of(*command: str) -> set[str]:
    found = app
    for name in command:
        found = found[name]
    return {name for argument in found.assemble_argument_collection() for name in argument.names}


FLAGS = Path(__file__).parents[2] / "scripts" / "vllm-flags.txt"
BENCHES = ("latency", "throughput", "serve")


@pytest.fixture(scope="module")
def ours() -> dict[tuple[str, ...], set[str]]:
    commands = [(name,) for name in COMMANDS if name != "bench"] + [("bench", name) for name in BENCHES]
    return {command: flags_of(*command) for command in commands}


def test_every_flag_that_is_named_exists(ours: dict[tuple[str, ...], set[str]]) -> None:
    everywhere = set[str]().union(*ours.values())
    assert set(RENAMED.values()) <= everywhere
    tables = (RENAMED, ALWAYS, MISSING, NO_MEANING)
    assert sum(map(len, tables)) == len(set().union(*tables)), "a flag is in one table"
    # What an engine here takes needs no table.
    for command in (("serve",), ("explain",), ("generate",)):
        assert not (ALWAYS.keys() | MISSING.keys() | NO_MEANING.keys()) & ours[command], command


def test_every_flag_of_vllm_has_a_state(ours: dict[tuple[str, ...], set[str]]) -> None:
    """The same here, or in one of the tables."""
    version, *names = FLAGS.read_text().splitlines()
    assert version == "# vLLM 0.33.0" and len([name for name in names if name.startswith("--")]) == 321
    states = {*RENAMED, *ALWAYS, *MISSING, *NO_MEANING, *ours[("serve",)]}
    assert [name for name in names if name not in states] == []


def test_the_page_has_every_flag_once() -> None:
    page = runpy.run_path(str(FLAGS.with_name("vllm_flags_page.py")))["page"]()
    for name in FLAGS.read_text().splitlines()[1:]:
        rows = [line for line in page.partition("## Values")[0].splitlines() if line.startswith(f"| `{name}` |")]
        assert len(rows) == 1, name
    assert "vLLM 0.33.0" in page and all(f"`{name}`" in page for name in VARIABLES)


def test_variables_that_replace_vllms_exist() -> None:
    names = {f"PHONOGRAPH_{name.upper()}" for name in {**ENGINE_FIELDS, **SERVER_FIELDS}} | set(OTHER_VARIABLES)
    assert {ours.partition(",")[0] for ours in VARIABLES.values() if ours.startswith("PHONOGRAPH")} <= names


def test_each_flag_of_the_table_is_explained_where_it_is_unknown(
    ours: dict[tuple[str, ...], set[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints the sentence of the tables, which is seen once for each. Flags that are always on: below."""
    for table in (RENAMED, MISSING):
        seen = False
        for flag in table:
            if is_neutral(flag, "2") or is_neutral(flag, True):
                continue
            command = next(
                one
                for one in (("serve",), ("bench", "serve"), ("bench", "latency"))
                if flag not in ours[one] and RENAMED.get(flag, "--help") in {*ours[one], "--help"}
            )
            line = explain_flag(flag, ours[command]) or ""
            said = f"here it is {RENAMED[flag]}" if flag in RENAMED else "; leave it out"
            assert line.startswith(f"{flag} is vLLM's") and line.endswith(said)
            if not seen:
                assert main([*command, flag, "2"]) == 2
                assert capsys.readouterr().err == f"phonograph: error: {line}\n"
                seen = True
        assert seen


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (
            ["serve", "demo", "--pipeline_parallel_size=2"],
            "--pipeline-parallel-size is vLLM's and not here yet (-tp N runs an engine on GPUs of one host, -dp N "
            "several engines); leave it out",
        ),
        (
            ["serve", "demo", "--no-enable-chunked-prefill"],
            "--no-enable-chunked-prefill is vLLM's and cannot be set here: prefills are always chunked; leave it out",
        ),
        (["serve", "demo", "--max-modellen", "9"], "Unknown option: --max-modellen. Did you mean --max-model-len?"),
        (
            ["serve", "demo", "--temprature", "1"],
            "Unknown option: --temprature. temperature is a sampling parameter: SamplingParams, requests and the "
            "command generate take it",
        ),
        (["serve", "demo", "--brink"], "Unknown option: --brink."),
        (["generate", "demo", "a", "--temprature", "1"], "Unknown option: --temprature. Did you mean --temperature?"),
        # Its place is in another command.
        (["explain", "demo", "--random-input-len", "9"], "Unknown option: --random-input-len."),
    ],
)
def test_lines_of_unknown_flags(tokens: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tokens) == 2
    assert capsys.readouterr().err == f"phonograph: error: {line}\n"


def test_the_table_of_neutral_values_is_of_flags_that_are_not_here() -> None:
    assert NEUTRAL.keys() <= ALWAYS.keys() | MISSING.keys() | NO_MEANING.keys()
    assert NEUTRAL.keys() >= SWITCHES
    assert {*SAMPLING, "output_kind"} == {one.name for one in fields(SamplingParams)} - set(EngineConfig.model_fields)


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [
        ("pipeline_parallel_size", 1, 2),
        ("data_parallel_size_local", 1, 4),
        ("cpu_offload_gb", 0.0, 4),
        ("swap_space", 4, None),
        ("enable_chunked_prefill", True, False),
        ("enable_lora", False, True),
        ("task", "generate", "embed"),
        ("distributed_executor_backend", "mp", "ray"),
        ("disable_custom_all_reduce", True, None),
    ],
)
def test_a_value_that_changes_nothing_is_taken_everywhere(
    name: str, neutral: Any, other: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Python, in a file, in the environment and as a flag; another value is refused by name with the reason."""
    plain = EngineConfig(model="demo")
    assert EngineConfig(model="demo", **{name: neutral}) == plain
    flag, text = "--" + name.replace("_", "-"), json.dumps(neutral).strip('"')
    file = tmp_path / "settings.yaml"
    file.write_text(f"model: demo\n{name}: {text}\n")
    variables = {f"PHONOGRAPH_{name.upper()}": text}
    assert EngineConfig.load(flags={}, config_file=file, environ=variables) == plain
    if isinstance(neutral, bool):
        words = [flag if neutral else flag.replace("--", "--no-", 1)]
    else:
        words = [flag, text] if neutral is not None else []
    assert main(["config", "demo", *words, "--max-num-seqs", "3"]) == 0
    out = capsys.readouterr().out
    assert "max_num_seqs" in out and name not in out
    if other is None:
        return
    with pytest.raises(ConfigError, match=f"^{name}=.*is vLLM's"):
        EngineConfig(model="demo", **{name: other})
    file.write_text(f"model: demo\n{name}: {json.dumps(other)}\n")
    with pytest.raises(ConfigError, match=f"^{name}=.*is vLLM's.*settings.yaml:2"):
        EngineConfig.load(flags={}, config_file=file, environ={})
    word = f"{flag}={other}" if not isinstance(other, bool) else flag if other else flag.replace("--", "--no-", 1)
    assert main(["config", "demo", word]) == 2
    assert "is vLLM's" in capsys.readouterr().err


def test_flags_that_change_nothing_are_taken_between_others(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config", "-tp", "1", "demo", "--enable-chunked-prefill", "--tensor_parallel_size=1", "--swap-space=4"]
    assert main([*words, "--max-num-seqs", "7", "-pp=1"]) == 0
    assert main(["config", "demo", "--tensor-parallel-size"]) == 2, "without its value"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--max-num-seqs", "4", "--max-num-seqs", "8"], 8),
        (["--max-num-seqs=4", "--max_num_seqs", "6", "--max-num-seqs=8"], 8),
        (["--max-num-seqs", "8", "--enforce-eager", "--no-enforce-eager", "--enforce-eager"], 8),
    ],
)
def test_the_last_of_a_repeated_flag_counts(words: list[str], value: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *words, "demo", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert settings["max_num_seqs"]["value"] == value
    assert settings["enforce_eager"]["value"] == ("--enforce-eager" in words)


def test_a_repeated_flag_without_its_last_value_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "demo", "--max-num-seqs", "4", "--max-num-seqs"]) == 2
    assert "--max-num-seqs" in capsys.readouterr().err


def test_a_flag_without_meaning_is_taken_and_told(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--moe-backend", "triton", "--no-use-tqdm-on-load", "--optimization_level=3"]
    assert main(["config", "demo", *words, "--max-num-seqs", "3"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["--moe-backend", "--use-tqdm-on-load", "--optimization-level"]
    assert lines[0] == (
        "phonograph: --moe-backend is vLLM's and has no effect here: kernels are chosen by device, weights and "
        "attention backend; explain prints them"
    )
    assert not caplog.messages
    assert EngineConfig(model="demo", moe_backend="triton") == EngineConfig(model="demo")
    assert caplog.messages == [lines[0].removeprefix("phonograph: ")]


def test_variables_of_vllm_are_told_once_without_their_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_SOMETHING", "1")
    assert main(["config", "demo"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "environment variables of vLLM are not read: VLLM_API_KEY (here it is PHONOGRAPH_API_KEY), VLLM_SOMETHING"
    )


def test_a_key_of_vllm_leaves_no_server_open(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert main(["serve", "demo"]) == 2
    said = capsys.readouterr().err
    assert "api_key is needed: VLLM_API_KEY is set" in said and "PHONOGRAPH_API_KEY" in said and "secret" not in said


def test_settings_of_python_get_the_right_hint() -> None:
    for name, said in (
        ("temprature", "temperature is a sampling parameter: SamplingParams"),
        ("temperature", "temperature is a sampling parameter: SamplingParams"),
        ("num_gpu_blocks_override", "is vLLM's name; here it is num_kv_blocks"),
        ("max_modellen", "did you mean max_model_len?"),
    ):
        with pytest.raises(ConfigError) as error:
            EngineConfig(model="demo", **{name: 1})
        assert said in str(error.value) and str(error.value).startswith(f"{name}=1: ")
