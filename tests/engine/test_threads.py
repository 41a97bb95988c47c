"""Threads of a CPU engine: chosen by the size of the model, unless the caller chose them; its steps alone have them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phonograph import LLM, SamplingParams
from phonograph.cli.app import main
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.engine import build
from phonograph.engine import plan as plans
from phonograph.engine.plan import make_plan
from phonograph.engine.startup import cpu_platform, threads
from phonograph.engine.startup.threads import Threads, plan_threads, start_threads
from phonograph.models.spec import ModelSpec, read_model_spec
from phonograph.sampling.sampler import Sampler

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Imitate a machine with this many cores and torch threads and a CPU quota, without environment variables."""

    def make(num_cores: int, num_threads: int, quota: int | None = None) -> None:
        monkeypatch.setattr(threads, "num_cores", lambda: num_cores)
        monkeypatch.setattr(threads, "usable_cpus", lambda: quota or num_cores)
        monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return make


class Sized:
    """The size of a model that generates, which is all that the choice looks at."""

    pooler = None

    def __init__(self, num_layers: int, mib: float) -> None:
        self.num_layers, self.bytes = num_layers, int(mib * 1024**2)

    def weight_bytes(self, dtype: str) -> int:
        return self.bytes if dtype == "float32" else self.bytes // 2


def chosen(model: Any, dtype: str = "float32") -> Threads:
    return plan_threads(model, dtype)


def test_a_thread_for_each_2_mib_of_an_average_product(machine: Machine) -> None:
    machine(16, 16)
    for layers, mib, count in (
        (8, 23, 1),
        (12, 49 * 3.9, 1),
        (30, 121 * 4.2, 2),
        (30, 121 * 12.1, 6),
        (32, 30_000, 16),
    ):
        found = chosen(Sized(layers, mib))
        assert found.count == count
        assert f"{mib / (4 * layers + 1):.1f} MiB of weights on average" in found.reason
        assert "OMP_NUM_THREADS sets another number" in found.reason
    assert chosen(Sized(30, 121 * 12.1), "bfloat16").count == 3
    machine(16, 8)  # two hardware threads to a core
    assert chosen(Sized(32, 30_000)).count == 8 and chosen(Sized(8, 23)).count == 1


def test_the_callers_number_goes_before(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(16, 5)
    assert chosen(Sized(8, 23)) == Threads(5, "set by torch.set_num_threads")
    machine(16, 16)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "16")
            assert plan_threads(_demo(), "float32") == Threads(16, f"{name}=16")


def test_a_cpu_quota_bounds_torchs_number_and_not_the_callers(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = Sized(32, 30_000)
    for num_threads in (64, 32):
        machine(64, num_threads, quota=3)
        found = chosen(large)
        assert found.count == start_threads() == 3 and "quota of the control group (container) allows 3" in found.reason
        assert plan_threads(large, "float32", 2).count == 1
    assert chosen(Sized(8, 23)).count == 1
    pooling: Any = SimpleNamespace(pooler=object())
    assert chosen(pooling).count == 3 and "allows 3; OMP_NUM_THREADS" in chosen(pooling).reason
    machine(64, 5, quota=3)
    assert chosen(large) == Threads(5, "set by torch.set_num_threads") and start_threads() == 5
    machine(64, 64, quota=3)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert chosen(large).count == start_threads() == 64
    monkeypatch.delenv("OMP_NUM_THREADS")
    machine(64, 64)
    assert start_threads() == 64 and "quota" not in chosen(large).reason


def test_weights_are_loaded_within_a_cpu_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu_platform, "start_threads", lambda: before + 3)
    seen: list[int] = []
    begin = build.begin_loading

    def watched(*args: Any, **settings: Any) -> Any:
        seen.append(torch.get_num_threads())
        return begin(*args, **settings)

    monkeypatch.setattr(build, "begin_loading", watched)
    LLM(model="demo", enforce_eager=True, max_num_seqs=2, num_kv_blocks=16, max_model_len=64).close()
    assert seen == [before + 3] and torch.get_num_threads() == before


def test_the_plan_says_the_number_and_why(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine(4, 4)
    config = EngineConfig(model="demo")
    plan = make_plan(config, _demo(), known_device("cpu"))
    assert plan.threads is not None and plan.threads.count == 1
    assert f"threads 1: {plan.threads.reason}" in plan.notes
    assert make_plan(EngineConfig(model="demo"), _demo(), known_device("h100")).threads is None
    assert main(["explain", "--model", "demo", "--device", "cpu"]) == 0
    assert "threads 1: a product reads 0.7 MiB" in " ".join(capsys.readouterr().out.split())


def test_only_the_steps_of_an_engine_have_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(plans, "plan_threads", lambda *_: Threads(before + 2, "a test"))
    seen: list[int] = []
    sample = Sampler.sample

    def watched(self: Sampler, *args: Any) -> Any:
        seen.append(torch.get_num_threads())
        if len(seen) == 5:
            raise RuntimeError("a step that fails")
        return sample(self, *args)

    monkeypatch.setattr(Sampler, "sample", watched)
    llm = LLM(model="demo", enforce_eager=True, max_num_seqs=2, num_kv_blocks=16, max_model_len=64)
    assert torch.get_num_threads() == before
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert seen == [before + 2] * 4 and torch.get_num_threads() == before
    with pytest.raises(Exception, match="a step that fails"):
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert torch.get_num_threads() == before


def _demo() -> ModelSpec:
    return read_model_spec("demo")
