"""Command lines of llama.cpp, Ollama and vLLM's clients: replaced by ours, or answered with what works."""

from __future__ import annotations

import re
import shlex
import sys
from typing import Any

import pytest
from commands import run

from phonograph.cli.app import COMMANDS as OURS
from phonograph.cli.app import app, main
from phonograph.cli.commands import chat as chat_module
from phonograph.cli.other_programs import (
    ABSENT,
    ABSENT_FLAGS,
    BENCH_FLAGS,
    CLIENT_FLAGS,
    COMMANDS,
    FLAGS,
    LOAD_FLAGS,
    NO_EFFECT,
    SERVER_ABSENT_FLAGS,
    SWITCHES,
    VALUES_WITHOUT_EFFECT,
    our_words,
)
from phonograph.config.engine_config import EngineConfig

LINES = {
    "run demo 'Why is the sky blue?'": "chat demo 'Why is the sky blue?'",
    "ls": "list",
    "cli -hf owner/repo": "chat --model owner/repo:Q4_K_M",
    "serve -hf owner/repo:Q8_0 --port 8080": "serve --model owner/repo:Q8_0 --port 8080",
    "serve -m model.gguf -c 16384 -np 4": "serve --model model.gguf --max-model-len 4096 --max-num-seqs 4",
    "serve -m m.gguf --parallel 3 --ctx-size 100": "serve --model m.gguf --max-num-seqs 3 --max-model-len 33",
    "serve -m m.gguf -c 0 -np 4": "serve --model m.gguf --max-model-len auto --max-num-seqs 4",
    "serve -m m.gguf -c 64 -np 1": "serve --model m.gguf --max-model-len 64 --max-num-seqs 1",
    "serve -m m.gguf -c 64 -np": "serve --model m.gguf --max-model-len 64 --max-num-seqs",
    "serve -m model.gguf -c 0 -ngl 0": "serve --model model.gguf --max-model-len auto --device cpu",
    "chat -m m.gguf -cnv -p 'Hi there' -n 9": "chat --model m.gguf 'Hi there' --max-tokens 9",
    "generate demo hi --temp 0.7 --repeat-penalty 1.1": "generate demo hi --temperature 0.7 --repetition-penalty 1.1",
    "chat --quick hi": "chat hi --url http://127.0.0.1:8000",
    "complete --url http://a --quick hi": "generate --raw --url http://a hi",
    "generate demo -- -m -c": "generate demo -- -m -c",
    "chat -m": "chat --model",
    "serve demo -n 2": "serve demo -n 2",
    "chat -p": "chat",
    "chat demo -fa on hi": "chat demo hi",
    "chat demo -fa hi -ub 64 --keepalive=5m": "chat demo hi",
    "chat -m m.gguf -r User: -s 3 hi": "chat --model m.gguf --stop User: --sampling-seed 3 hi",
    "serve -m m.gguf -b 512 -ub 512 -to 60": "serve --model m.gguf --max-num-batched-tokens 512 --request-timeout 60",
    "bench -m m.gguf -p 512 -n 128 -r 3": "bench latency --model m.gguf --input-len 512 --output-len 128 --num-iters 3",
    "bench serve -m a": "bench serve -m a",
    "bench serve --random-input-len 9 --random-output-len 8": "bench serve --input-len 9 --output-len 8",
    "chat -m m.gguf -j {} hi": "chat --model m.gguf --json-schema {} hi",
    "generate -m m.gguf -jf a.json hi": "generate --model m.gguf --json-schema-file a.json hi",
    "run demo --format json hi": "chat demo --format json hi",
    "bench": "bench",
    "bench -h": "bench -h",
    "eval run -m hf -b 4 -f 3": "eval run -m hf -b 4 -f 3",
    "run-batch -i in -o out --format x": "run-batch -i in -o out --format x",
    "serve demo --api-key a b c --port 1": "serve demo --api-key a,b,c --port 1",
    "serve demo --api-key a --port 1 --api-key=b": "serve demo --api-key a,b --port 1",
    "serve --api-key a --api-key b demo": "serve --api-key a,b demo",
    "serve demo --served-model-name a b --admin-api-key c --admin-api-key d": "serve demo --served-model-name a,b "
    "--admin-api-key c,d",
    "serve demo --api-key=a": "serve demo --api-key a",
    "serve demo --api-key a --api-key": "serve demo --api-key a --api-key",
    "serve --api-key a demo": "serve --api-key a demo",
    "chat demo --api-key a hi": "chat demo --api-key a hi",
    "serve demo --api-key": "serve demo --api-key",
    "help": "--help",
    "serve --help=max-num-seqs": "serve --help",
    "version": "--version",
    "": "",
}


@pytest.mark.parametrize("line", LINES)
def test_words_are_replaced(line: str) -> None:
    found = our_words(shlex.split(line))
    assert found.words == shlex.split(LINES[line]) and found.problem is None
    assert our_words(found.words).words == found.words, "our words stay"


def test_words_without_effect_are_told() -> None:
    valued = [f"{flag}=1" for flag in VALUES_WITHOUT_EFFECT]
    found = our_words(["chat", "-m", "m.gguf", "-ngl", "99", *NO_EFFECT, *valued])
    assert found.words == ["chat", "--model", "m.gguf"]
    assert len(found.notes) == 1 + len(NO_EFFECT) + len(valued)
    assert found.notes[0] == "-ngl 99 has no effect here: a model is on one device as a whole"
    assert "-cnv has no effect here: chat always has the chat template" in found.notes


def test_the_tables_name_commands_and_flags_that_exist() -> None:
    assert {words[0] for words in COMMANDS.values()} <= {*OURS, "--help", "--version"}
    assert not {*COMMANDS, *ABSENT} & set(OURS)
    flags = {
        name
        for command in (app["serve"], app["chat"], app["generate"], app["bench"]["latency"])
        for argument in command.assemble_argument_collection()
        for name in argument.names
    }
    others = {**FLAGS, **CLIENT_FLAGS, **BENCH_FLAGS, **LOAD_FLAGS}
    without = {*NO_EFFECT, *VALUES_WITHOUT_EFFECT, *ABSENT_FLAGS}
    assert set(others.values()) <= flags and not {*others, *without} & flags
    assert not {*others} & without and set(SWITCHES) <= set(VALUES_WITHOUT_EFFECT)
    server = {name for argument in app["serve"].assemble_argument_collection() for name in argument.names}
    assert not set(SERVER_ABSENT_FLAGS) & server and set(SERVER_ABSENT_FLAGS) <= flags | {*CLIENT_FLAGS}
    texts = " ".join([*ABSENT.values(), *VALUES_WITHOUT_EFFECT.values(), *ABSENT_FLAGS.values()])
    assert {word for word in re.findall(r"--[a-z-]+", texts)} <= flags | {"--install-completion"}
    assert {word for word in re.findall(r"`phonograph ([a-z-]+)", texts)} <= set(OURS)


@pytest.mark.parametrize("command", ABSENT)
def test_commands_that_are_absent_name_what_works(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"phonograph: error: there is no command {command}; {ABSENT[command]}"


@pytest.mark.parametrize("flag", [*ABSENT_FLAGS, *SERVER_ABSENT_FLAGS])
def test_flags_that_are_absent_name_what_works(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([flag, "a"], [f"{flag}=a"]):
        assert main(["serve", "demo", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"phonograph: error: {flag} is not here; {({**ABSENT_FLAGS, **SERVER_ABSENT_FLAGS})[flag]}"


def test_run_answers_one_turn(demo: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    question = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"
    assert run(capsys, "run", *demo, question, "--quiet") == "12 + 7 = 19. #### 19\n"
    assert run(capsys, "run", *demo, *question.split(), "--quiet") == "12 + 7 = 19. #### 19\n"
    assert main(["run", *demo, "a b " * 9000]) == 2
    assert "refused: " in capsys.readouterr().err


def test_a_client_without_a_model_asks_the_local_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phonograph.cli.options.LOCAL_URL", "http://127.0.0.1:9")
    for command in ("chat", "generate", "complete"):
        assert main([command]) == 2
        assert re.fullmatch(
            r"phonograph: error: model is required without a server: http://127.0.0.1:9 cannot be reached \(.*\); "
            r"`phonograph serve MODEL` starts a server\n",
            capsys.readouterr().err,
        )
    asked: list[Any] = []
    monkeypatch.setattr(chat_module, "start", lambda config: asked.append(config) or sys.exit(7))
    monkeypatch.setenv("PHONOGRAPH_MODEL", "demo")
    with pytest.raises(SystemExit):
        main(["chat"])
    assert asked == [EngineConfig(model="demo")]


@pytest.mark.parametrize("prefix", ["hf.co/", "huggingface.co/", "https://huggingface.co/", "https://hf.co/", ""])
def test_a_model_with_the_address_of_the_hub(prefix: str) -> None:
    assert EngineConfig(model=f"{prefix}owner/repo:Q4_K_M").model == "owner/repo:Q4_K_M"
    assert EngineConfig(model="hf.co/").model == "hf.co"


def test_a_server_takes_several_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[tuple[str, ...]] = []
    monkeypatch.setattr("phonograph.server.http.run.serve", lambda _, server, *__: keys.append(server.api_key) or 0)
    for line in ("demo --api-key a b", "demo --api-key a --api-key b", "--api-key=a --api-key b demo"):
        assert main(["serve", *line.split()]) == 0
    assert keys == [("a", "b")] * 3
