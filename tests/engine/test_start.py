"""Starting an engine: what is reported meanwhile."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

from phonograph.engine.llm import LLM
from phonograph.engine.startup import start
from phonograph.errors import ModelError
from phonograph.files.catalog import HUB_IDS


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_phases_come_in_order_and_end(device: str, load_format: str) -> None:
    phases: dict[str, list[tuple[int, int]]] = {}

    def report(phase: str, done: int, total: int) -> None:
        phases.setdefault(phase, []).append((done, total))

    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "num_kv_blocks": 64}
    LLM(model="demo", device=device, load_format=load_format, progress=report, **settings)
    assert list(phases) == ["weights", *(["kernels"] if device == "cuda" else []), "graphs"]
    for phase, steps in phases.items():
        assert all(done <= total for done, total in steps)
        assert steps[0][0] == 0 and steps[-1][0] == steps[-1][1] - (phase == "graphs")


def test_notes_of_the_weights_are_among_those_of_the_plan(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.self_attn.prob_scale": torch.ones(1)}, file)
    phases = list[str]()
    settings = {"max_num_seqs": 1, "max_model_len": 64, "num_kv_blocks": 8, "enforce_eager": True}
    llm = LLM(model=str(tmp_path), device="cpu", progress=lambda phase, *_: phases.append(phase), **settings)
    assert set(phases) == {"weights"}
    assert "does not use: model.layers.0.self_attn.prob_scale" in llm.plan.notes[-1]


def test_the_start_is_timed(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    begin = time.perf_counter()
    llm = LLM(model=str(tmp_path), device="cpu", max_num_seqs=1, max_model_len=64, num_kv_blocks=8, enforce_eager=True)
    assert 0 < llm.start_seconds < time.perf_counter() - begin


def test_names_of_the_catalog_have_dummy_weights_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Planned(Exception):
        """The configuration was read."""

    def planned(*_: object) -> None:
        raise Planned

    monkeypatch.setattr(start, "make_plan", planned)
    name = next(iter(HUB_IDS))
    with pytest.raises(Planned):
        LLM(model=name, load_format="dummy", device="cpu")
    with pytest.raises(ModelError, match="explain takes it, and so does --load-format dummy"):
        LLM(model=name, device="cpu")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torchs_compiler_is_not_imported(device: str) -> None:
    """It takes nearly a second, and nothing here uses it."""
    program = (
        "import sys; from phonograph.engine.llm import LLM; "
        f"limits = dict(max_num_seqs=2, max_model_len=64, num_kv_blocks=64, cudagraph_capture_sizes=[1, 2, 16]); "
        f"llm = LLM(model='demo', device='{device}', **limits); "
        "llm.generate(['1+1=']); print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.gpu
def test_captures_neither_compile_nor_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    loaded: list[str] = []
    meanwhile: list[str] = []

    def note(module: object, function: object, name: str, *others: object) -> None:
        (meanwhile if torch.cuda.is_current_stream_capturing() else loaded).append(name)

    monkeypatch.setattr(knobs.runtime, "kernel_load_start_hook", note)
    # Unusual limits, so that some kernels are new to the process.
    LLM(model="demo", device="cuda", max_num_seqs=3, max_model_len=272, block_size=32, num_kv_blocks=96)
    assert loaded, "every kernel was known to this process: the limits are not unusual enough"
    assert not meanwhile
