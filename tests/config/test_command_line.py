"""The frame of the command line: help, version, one-line errors, and `phonograph config`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phonograph import __version__
from phonograph.cli.app import COMMANDS, main
from phonograph.cli.options import HEADINGS
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EngineConfig.model_fields:
        monkeypatch.delenv(f"PHONOGRAPH_{name.upper()}", raising=False)


def test_every_heading_begins_at_a_setting() -> None:
    fields = [*EngineConfig.model_fields, *ServerConfig.model_fields]
    assert set(HEADINGS) <= set(fields)
    assert {fields[0], next(iter(ServerConfig.model_fields))} <= set(HEADINGS), "settings without a heading"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_help_of_a_command_shows_every_setting_as_a_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # in 80, names of more than 28 characters are broken
    assert main(["config", "--help"]) == 0
    shown = capsys.readouterr().out
    flags = [f"--{name.replace('_', '-')}" for name in EngineConfig.model_fields]
    assert [flag for flag in [*flags, "--no-enable-prefix-caching", "--config"] if flag not in shown] == []


def test_help_needs_no_torch_and_lists_the_commands() -> None:
    program = "import sys; sys.modules['torch'] = None; from phonograph.cli.app import main; sys.exit(main(['--help']))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (["config", "--model", "demo", "--max-num-seqs", "-3"], "max_num_seqs='-3': must be a whole number >= 1"),
        (["config", "--model", "demo", "--max-num-seq", "3"], "Did you mean --max-num-seqs?"),
        (["config", "--model", "demo", "--compilation-config", '{"level": 3}'], "known keys are cudagraph_mode"),
        (["config", "--model", "demo", "--config", "absent.yaml"], "config='absent.yaml': cannot be read"),
        (["config"], "model is required"),
        (["confg"], 'Did you mean "config"?'),
    ],
)
def test_a_user_error_is_one_line_on_stderr(tokens: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tokens) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("phonograph: error: ") and says in captured.err
    assert captured.err.count("\n") == 1


def test_config_prints_values_with_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("model: demo\nblock_size: 32\n")
    monkeypatch.setenv("PHONOGRAPH_MAX_MODEL_LEN", "99")
    tokens = ["config", "--config", str(file), "--no-enable-prefix-caching", "--cudagraph-capture-sizes", "4,1"]
    assert main([*tokens, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["model"] == {"value": "demo", "source": "file", "where": f"{file}:1"}
    assert rows["max_model_len"] == {"value": 99, "source": "environment", "where": "PHONOGRAPH_MAX_MODEL_LEN"}
    assert rows["enable_prefix_caching"]["value"] is False and rows["enable_prefix_caching"]["source"] == "flag"
    assert rows["cudagraph_capture_sizes"]["value"] == [1, 4]
    assert rows["dtype"] == {"value": "auto", "source": "default"}
    assert set(rows) == set(EngineConfig.model_fields) - {"compilation_config"}

    assert main(tokens) == 0
    table = capsys.readouterr().out
    assert "PHONOGRAPH_MAX_MODEL_LEN" in table and "[1, 4]" in table and "--no-enable-prefix-caching" in table


def test_python_dash_m_runs_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "phonograph", "nope"], capture_output=True, text=True, check=False)
    assert result.returncode == 2 and 'Unknown command "nope"' in result.stderr


@pytest.mark.parametrize("tokens", [["--help"], ["config", "--model", "demo"]])
def test_a_closed_output_ends_the_command_quietly(tokens: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed, open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "phonograph", *tokens]
        gone = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
        no_room = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (gone.returncode, gone.stderr) == (141, "")
    assert no_room.returncode == 2 and "Traceback" not in no_room.stderr
    said = "phonograph: error: the output cannot be written: No space left on device; make room, or write elsewhere"
    assert no_room.stderr.splitlines() == [said]
