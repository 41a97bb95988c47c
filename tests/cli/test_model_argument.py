"""The model as the first argument of every command that takes engine flags, as `vllm serve MODEL` has it."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from phonograph.cli.app import main
from phonograph.cli.commands import chat, generate, verify
from phonograph.config.engine_config import EngineConfig
from phonograph.errors import PhonographError


class Started(PhonographError):
    """Ends a command where its engine would start."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models of the engines that commands would have started."""
    models: list[str] = []

    def start(config: Any, *_: Any, **__: Any) -> Any:
        models.append((config if isinstance(config, EngineConfig) else config[0]).model)
        raise Started("enough")

    for module in (chat, generate, verify):
        monkeypatch.setattr(module, "start", start)
    monkeypatch.setattr("phonograph.server.http.run.serve", start)
    monkeypatch.setattr("phonograph.cli.commands.bench.start", start)
    return models


@pytest.mark.parametrize(
    "command",
    [
        ["chat"],
        ["serve"],
        ["verify"],
        ["generate", "Hello"],
        ["generate", "Hello", "Bye"],
        ["generate", "--token-ids", "1,2"],
        ["bench", "latency"],
        ["bench", "throughput"],
    ],
)
def test_the_first_argument_is_the_model(
    command: list[str],
    tiny: list[str],
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = 2 if command[0] == "bench" else 1
    model = tiny[1]
    assert main([*command[:words], model, *command[words:], "--seed", "3"]) == 2
    assert main([*command, "--model", model]) == 2
    monkeypatch.setenv("PHONOGRAPH_MODEL", "other")
    assert main([*command[:words], "demo", *command[words:]]) == 2, "an argument goes before the environment, as a flag"
    assert started == [model, model, "demo"]
    capsys.readouterr()
    assert main([*command[:words], "demo", *command[words:], "--model", model]) == 2
    assert f"model={model!r}: contradicts the argument 'demo'; give one of them" in capsys.readouterr().err


def test_explain_and_config_take_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for model in (["demo"], ["--model", "demo"]):
        assert main(["explain", *model, "--device-name", "h200"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != ""
    assert main(["config", "demo", "--json"]) == 0
    assert '"value": "demo"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tokens", "environment", "prompts"),
    [
        (["demo", "Hello"], None, ["Hello"]),
        (["--model", "demo", "Hello"], None, ["Hello"]),
        (["Hello", "Bye"], "demo", ["Hello", "Bye"]),
        (["demo", "Hello"], "other", ["Hello"]),
        (["--model", "demo", "demo", "Hello"], None, ["Hello"]),
        (["demo", "-"], None, ["a line"]),
    ],
)
def test_arguments_of_generate_are_prompts_once_a_model_is_given(
    tokens: list[str], environment: str | None, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Engine:
        tokenizer = None

        def __init__(self, config: EngineConfig) -> None:
            seen.append(config.model)

        def generate(self, ready: Any, *_: Any, **__: Any) -> None:
            seen.append(ready)
            raise Started("enough")

    monkeypatch.setattr(generate, "start", Engine)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a line\n"))
    if environment is not None:
        monkeypatch.setenv("PHONOGRAPH_MODEL", environment)
    assert main(["generate", *tokens, "--json"]) == 2
    assert seen == ["demo", prompts]


@pytest.mark.parametrize("tokens", [["demo"], ["Tom has 12 apples"], ["--model", "demo", "demo"]])
def test_a_lone_argument_of_generate_is_the_model_and_no_prompt(
    tokens: list[str], started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *tokens]) == 2
    assert f"prompts=[]: give a prompt after the model ({tokens[-1]!r})" in capsys.readouterr().err
    assert started == []


def test_prompts_that_cannot_be_paths_are_no_models(capsys: pytest.CaptureFixture[str]) -> None:
    long = "word " * 300
    assert main(["generate", long, "Hello"]) == 2
    error = capsys.readouterr().err
    assert "no such folder" in error and len(error) < 300
