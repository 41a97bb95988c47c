"""Starting an engine: what is reported meanwhile, and how graphs are captured that a capture refused at first."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

from phonograph.engine.llm import LLM
from phonograph.errors import CaptureError
from phonograph.graphs.modes import GraphKey, GraphSet


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
    llm = LLM(model=str(tmp_path), device="cpu", enforce_eager=True, max_num_seqs=1, max_model_len=64, num_kv_blocks=8)
    assert "no use for: model.layers.0.self_attn.prob_scale" in llm.plan.notes[-1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torchs_compiler_is_not_imported(device: str) -> None:
    """It takes nearly a second, and nothing here uses it."""
    program = (
        "import sys; from phonograph.engine.llm import LLM; "
        f"llm = LLM(model='demo', device='{device}', max_num_seqs=2, max_model_len=64, num_kv_blocks=64); "
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


KEYS = (
    GraphKey(GraphSet.MIXED, 64, 4),
    GraphKey(GraphSet.PIECEWISE, 32, 4),
    GraphKey(GraphSet.MIXED, 24, 4),
    GraphKey(GraphSet.DECODE, 2, 2),
)


def capture(monkeypatch: pytest.MonkeyPatch, failures: dict[GraphKey, int]) -> list[tuple[str, int]]:
    """What CudaRunner.capture does with KEYS on a runtime that refuses each key as often as `failures` says."""
    cuda_runner = pytest.importorskip("phonograph.runner.cuda_runner")
    done: list[tuple[str, int]] = []
    dry = False

    @contextmanager
    def compile_only() -> Iterator[set[object]]:
        nonlocal dry
        dry = True
        yield {"kernel"}
        dry = False

    def load(kernels: set[object]) -> None:
        assert kernels == {"kernel"} and not dry
        done.append(("load", 0))

    def prepared(self: object, key: GraphKey) -> Callable[[], None]:
        def run() -> None:
            done.append(("dry" if dry else "run", key.num_tokens))

        return run

    def graphs(keys: tuple[GraphKey, ...], step: Callable[[GraphKey], object]) -> None:
        for key in keys:
            step(key)
            failures[key] = failures.get(key, 0) - 1
            if failures[key] >= 0:
                done.append(("refused", key.num_tokens))
                raise CaptureError("a library loads something")
            done.append(("capture", key.num_tokens))

    monkeypatch.setattr(cuda_runner, "compile_only", compile_only)
    monkeypatch.setattr(cuda_runner, "load_kernels", load)
    monkeypatch.setattr(cuda_runner.CudaRunner, "_prepared", prepared)
    monkeypatch.setattr(cuda_runner.CudaRunner, "_eager_shapes", lambda self: [])
    runner = cuda_runner.CudaRunner.__new__(cuda_runner.CudaRunner)
    runner.dispatcher = SimpleNamespace(captures=SimpleNamespace(largest_first=lambda: KEYS))
    runner.runtime = SimpleNamespace(memory_bytes=7)
    runner._graphs = SimpleNamespace(capture=graphs)
    runner.runtime.scope = nullcontext
    runner._program = SimpleNamespace(few_layers=nullcontext)
    runner._masked = SimpleNamespace(
        sizes=(1, 2),
        run=lambda size: done.append(("dry masks" if dry else "run masks", size)),
        capture=lambda runtime: done.append(("capture masks", 0)) or 2,
    )
    seen: list[int] = []
    runner.load_kernels()
    report = runner.capture(lambda number, total, key: seen.append(key.num_tokens))
    assert (report.num_graphs, report.memory_bytes) == (len(KEYS) + 2, 7)
    assert seen == [key.num_tokens for key in KEYS]
    assert done.pop() == ("capture masks", 0)
    return done


def test_kernels_are_loaded_and_only_broken_graphs_run_before_their_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    dry = [("dry", key.num_tokens) for key in KEYS]
    captures = [("capture", 64), ("run", 32), ("capture", 32), ("capture", 24), ("capture", 2)]
    masks = [("dry masks", size) for size in (1, 2)]
    assert capture(monkeypatch, {}) == [*dry, *masks, ("load", 0), *captures]


def test_a_refused_capture_is_repeated_once_after_an_eager_run(monkeypatch: pytest.MonkeyPatch) -> None:
    done = capture(monkeypatch, {KEYS[2]: 1})
    assert done[-4:] == [("refused", 24), ("run", 24), ("capture", 24), ("capture", 2)]
    with pytest.raises(CaptureError):
        capture(monkeypatch, {KEYS[2]: 2})
