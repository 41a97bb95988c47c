"""Flags of vLLM's that are not here: an error names the flag that takes their place, or says that there is none."""

from __future__ import annotations

import pytest

from phonograph.cli.app import COMMANDS, app, main
from phonograph.cli.vllm_flags import ALWAYS, MISSING, RENAMED


def flags_of(*command: str) -> set[str]:
    found = app
    for name in command:
        found = found[name]
    return {name for argument in found.assemble_argument_collection() for name in argument.names}


BENCHES = ("decode", "latency", "mixed", "throughput", "idle", "step", "suite", "attention", "startup", "serve")


@pytest.fixture(scope="module")
def ours() -> dict[tuple[str, ...], set[str]]:
    commands = [(name,) for name in COMMANDS if name not in ("bench", "eval")]
    commands += [("eval", "demo"), ("eval", "compare"), *(("bench", name) for name in BENCHES)]
    return {command: flags_of(*command) for command in commands}


def test_every_flag_that_is_named_exists(ours: dict[tuple[str, ...], set[str]]) -> None:
    everywhere = set[str]().union(*ours.values())
    assert set(RENAMED.values()) <= everywhere
    assert not RENAMED.keys() & (ALWAYS.keys() | MISSING.keys()) and not ALWAYS.keys() & MISSING.keys()
    # What an engine here takes needs no table.
    for command in (("serve",), ("explain",), ("generate",)):
        assert not (ALWAYS.keys() | MISSING.keys()) & ours[command], command


def test_each_flag_of_the_table_is_explained_where_it_is_unknown(
    ours: dict[tuple[str, ...], set[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in (*RENAMED, *ALWAYS, *MISSING):
        command = next(
            one
            for one in (("serve",), ("bench", "serve"), ("bench", "latency"))
            if flag not in ours[one] and RENAMED.get(flag, "--help") in {*ours[one], "--help"}
        )
        assert main([*command, flag, "2"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        said = f"here it is {RENAMED[flag]}" if flag in RENAMED else "; leave it out"
        assert line.startswith(f"phonograph: error: {flag} is vLLM's") and line.endswith(said)


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (
            ["serve", "demo", "--tensor_parallel_size=2"],
            "--tensor-parallel-size is vLLM's and not here yet (an engine runs on one GPU); leave it out",
        ),
        (
            ["serve", "demo", "--no-enable-chunked-prefill"],
            "--no-enable-chunked-prefill is vLLM's and cannot be set here: prefills are always chunked; leave it out",
        ),
        (["serve", "demo", "--max-modellen", "9"], "Unknown option: --max-modellen. Did you mean --max-model-len?"),
        # Its place is in another command.
        (["explain", "demo", "--random-input-len", "9"], "Unknown option: --random-input-len."),
    ],
)
def test_lines_of_unknown_flags(tokens: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tokens) == 2
    assert capsys.readouterr().err == f"phonograph: error: {line}\n"
