"""Libraries that are not installed: each absence ends a command or a start with what to install, before any weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fake_flash
import pytest

from phonograph.attention.flash_attn import providers
from phonograph.cli.app import main
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.engine import build
from phonograph.engine.startup import start as engine_start
from phonograph.errors import ConfigError


def hide(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package look as if it were not installed."""
    for loaded in [one for one in sys.modules if one.partition(".")[0] == name]:
        monkeypatch.setitem(sys.modules, loaded, None)
    monkeypatch.setitem(sys.modules, name, None)


def start_on_gpu(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> ConfigError:
    """Start an engine for a GPU that is not here; return its error, which must come before any weights."""

    def allocated(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(engine_start, "this_device", lambda kind: known_device("h200"))
    monkeypatch.setattr(build, "begin_loading", allocated)
    config = EngineConfig(model="demo", max_model_len=64, max_num_seqs=2, num_kv_blocks=8, **settings)
    with pytest.raises(ConfigError) as caught:
        engine_start.start_engine(config)
    return caught.value


@pytest.mark.parametrize("backend", ["triton", "flash_attn"])
def test_triton(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide("triton", monkeypatch)
    error = start_on_gpu(monkeypatch, attention_backend=backend)
    assert error.setting == "device" and "pip install triton" in error.problem


@pytest.mark.parametrize(
    ("settings", "names", "install"),
    [
        (
            {"attention_backend": "flash_attn", "flash_attn_version": 2},
            ("vllm", "flash_attn"),
            "pip install flash-attn",
        ),
        (
            {"attention_backend": "flash_attn", "flash_attn_version": 3},
            ("vllm", "flash_attn_interface", "kernels"),
            "pip install kernels",
        ),
        ({"flash_attn_version": 4}, ("vllm", "flash_attn"), "pip install flash-attn-4"),
        ({"attention_backend": "flashinfer"}, ("flashinfer",), "pip install flashinfer-python"),
    ],
    ids=["FlashAttention 2", "FlashAttention 3", "FlashAttention 4", "FlashInfer"],
)
def test_attention_libraries(
    settings: dict[str, Any], names: tuple[str, ...], install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    for name in names:
        hide(name, monkeypatch)
    error = start_on_gpu(monkeypatch, **settings)
    assert error.setting == "attention_backend" and install in error.problem


@pytest.mark.parametrize("package", ["vllm 4", "cute 4"])
@pytest.mark.parametrize(("absent", "install"), [("cutlass", "nvidia-cutlass-dsl"), ("quack", "quack-kernels")])
def test_libraries_of_flash_attention_4(
    package: str, absent: str, install: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention 4 imports the CuTe DSL in its first call, which is behind the weights."""
    pytest.importorskip("triton")
    fake_flash.write_packages(tmp_path, package)
    (path,) = tmp_path.glob("**/cute/interface.py")
    path.write_text("import cutlass\nimport quack.copy_utils\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("vllm", "flash_attn", "cutlass", "quack"):
        for loaded in [one for one in sys.modules if one.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
    hide(absent, monkeypatch)
    assert (providers.missing("4") is None) == (absent == "quack")
    error = start_on_gpu(monkeypatch, flash_attn_version=4)
    assert error.setting == "attention_backend" and f"pip install {install}" in error.problem
    for name in ("vllm", "flash_attn"):
        for loaded in [one for one in sys.modules if one.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)


@pytest.mark.parametrize("name", ["fastapi", "prometheus_client", "uvicorn"])
def test_libraries_of_the_server(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(name, monkeypatch)
    assert main(["serve", "demo", "--device", "cpu"]) == 2
    assert f"serve='{name}': not installed; pip install 'phonograph[server]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["httptools", "uvloop"])
def test_libraries_of_the_client(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(name, monkeypatch)
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 2
    assert f"bench serve='{name}': not installed; pip install 'phonograph[bench]'" in capsys.readouterr().err


def test_the_evaluation_harness(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hide("lm_eval", monkeypatch)
    assert main(["eval", "ls", "tasks"]) == 2
    assert "pip install 'phonograph[eval]'" in capsys.readouterr().err
