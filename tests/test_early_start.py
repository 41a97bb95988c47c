"""Work that begins beside the imports of a start."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phonograph.cli.app import main
from phonograph.engine.startup import early_start
from phonograph.kernels.triton.launch import compile_helper


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_the_collector_is_as_it_was() -> None:
    early_start.pause_collector()
    early_start.pause_collector()
    assert not gc.isenabled()
    early_start.resume_collector()
    assert gc.isenabled()
    gc.disable()
    early_start.pause_collector()
    early_start.resume_collector()
    assert not gc.isenabled(), "who turned it off has it off"


def test_a_command_that_fails_leaves_it_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "/no/such/model", "x"]) == 2
    assert gc.isenabled() and "/no/such/model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (["generate", "a"], True),
        (["generate", "--device", "cpu"], False),
        (["chat", "--device=cpu"], False),
        (["bench", "latency"], True),
        (["bench", "serve"], False),
        (["serve"], False),  # the engine's process begins for itself
        (["explain"], False),
        ([], False),
    ],
)
def test_only_commands_with_an_engine_begin_early(
    words: list[str], starts: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr("phonograph.cli.app.start_early", lambda: begun.append(True))
    monkeypatch.setattr("phonograph.cli.app.app", lambda *_, **__: 0)
    assert main(words) == 0
    assert bool(begun) == starts


def test_without_a_driver_there_is_no_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(early_start, "DRIVER", str(tmp_path / "no-such-driver.so"))
    assert not early_start.make_context()


def test_without_a_gpu_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_start, "Path", lambda _: Path("/no/such/device"))
    monkeypatch.setattr(early_start, "make_context", lambda: pytest.fail("a context without a GPU"))
    monkeypatch.setattr(compile_helper, "start_early", lambda: pytest.fail("a helper without a GPU"))
    early_start.start_early()


@pytest.mark.gpu
def test_torch_finds_the_context() -> None:
    program = (
        "from phonograph.engine.startup.early_start import make_context; assert make_context(); "
        "import torch; assert torch.ones(3, device='cuda').sum().item() == 3"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
