"""Sleep of several ranks on a CPU: they sleep and wake up together, with the tokens from before, or none does."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import thread_ranks
import torch
from checkpoints import make_checkpoint, without_norms
from fake_memory_driver import FakeMemoryDriver
from quantized_checkpoints import FORMATS, quantize_checkpoint
from rank_sessions import GREEDY, finish, plan_of, random_prompts
from safetensors.torch import load_file

from phonograph import LLM, SamplingParams
from phonograph.core.host_resources import FreeMemory
from phonograph.engine import build
from phonograph.engine.process.ranks import follow_rank
from phonograph.engine.session import Session
from phonograph.engine.startup import host_copy, static_memory
from phonograph.engine.startup.cpu_platform import CpuPlatform
from phonograph.engine.startup.sleeper import Sleeper
from phonograph.engine.startup.start import verify_engine
from phonograph.engine.startup.static_memory import HostMemory
from phonograph.engine.startup.virtual_memory import VirtualMemory
from phonograph.errors import EngineUnavailable, MemoryLimitError, PhonographError, RankError, WeightError
from phonograph.kernels.ranks import Ranks
from phonograph.structured.compiler import GrammarCompiler

PROMPTS = [[3 + token % 90 for token in prompt] for prompt in random_prompts(3, 50, 1, 20)]


class VirtualPlatform(CpuPlatform):
    """CPU of a rank whose static memory is that of a fake GPU: graphs are tapes with frozen addresses."""

    drivers: dict[int, list[FakeMemoryDriver]]

    def static_memory(self) -> VirtualMemory:
        driver = FakeMemoryDriver(64 << 20)
        rank, size = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.size)
        self.drivers.setdefault(rank, []).append(driver)
        return VirtualMemory(driver, 1 << 16, num_ranks=size)


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[FakeMemoryDriver]]:
    """Return the drivers of weights and KV cache of each rank."""
    VirtualPlatform.drivers = {}

    def make(kind: str, ranks: Ranks | None = None) -> VirtualPlatform:
        return VirtualPlatform(ranks)

    for module in (build, follow_rank):
        monkeypatch.setattr(module, "make_platform", make)
    return VirtualPlatform.drivers


class Bench:
    """An engine of two ranks on threads, with a sleeper."""

    def __init__(self, engine: build.Engine) -> None:
        assert engine.sleeper is not None
        self.engine, self.sleeper = engine, engine.sleeper
        self._session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))

    def tokens(self) -> list[list[int]]:
        outputs = [self._session.add(prompt, GREEDY) for prompt in PROMPTS]
        finish(self._session)
        assert all(output.error is None and output.num_cached_tokens == 0 for output in outputs)
        self.engine.core.scheduler.reset_prefix_cache()
        return [output.outputs[0].token_ids for output in outputs]


@contextmanager
def two_ranks(folder: Path, **settings: Any) -> Generator[Bench]:
    sizes = {"dtype": "float32", "num_kv_blocks": 64, "max_model_len": 96, "cudagraph_capture_sizes": [1, 2, 8]}
    plan = plan_of(2, model=str(folder), enable_sleep_mode=True, **sizes, **settings)
    with thread_ranks.engine_on_threads(plan) as engine:
        yield Bench(engine)


def tokens_of_one(folder: Path) -> list[list[int]]:
    engine = build.build_engine(plan_of(1, model=str(folder), dtype="float32", enable_sleep_mode=True))
    return Bench(engine).tokens()


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "gemma3", "qwen3_5"])
def test_both_ranks_wake_up_with_their_graphs(
    family: str, tmp_path: Path, drivers: dict[int, list[FakeMemoryDriver]]
) -> None:
    make_checkpoint(family, tmp_path, seed=3)
    expected = tokens_of_one(tmp_path)
    drivers.clear()
    with two_ranks(tmp_path) as bench:
        assert bench.tokens() == expected
        both = [*drivers[0], *drivers[1]]
        sizes = [len(one.mapped) for one in both]
        assert len(both) == 4 and all(sizes)
        for level in (1, 2, 2, 1):
            bench.sleeper.sleep(level)
            assert bench.engine.core.asleep and not any(one.mapped for one in both)
            bench.sleeper.wake_up(["weights"])
            assert [bool(one.mapped) for one in both] == [True, False, True, False]
            bench.sleeper.wake_up()
            assert [len(one.mapped) for one in both] == sizes
            assert bench.tokens() == expected
        report = verify_engine(bench.engine, num_replays=3)
        assert report.ok, report.mismatches


@pytest.mark.parametrize("on_gpus", [False, True], ids=["host", "fake GPUs"])
@pytest.mark.parametrize(("method", "model"), [("eagle3", "demo-eagle3"), ("draft_model", "demo")])
def test_draft_models_sleep_with_their_target(
    method: str, model: str, on_gpus: bool, request: pytest.FixtureRequest
) -> None:
    """Copies of what all ranks have stay, also where weights are read again."""
    drivers: dict[int, list[FakeMemoryDriver]] = request.getfixturevalue("drivers") if on_gpus else {}
    speculation = {"method": method, "model": model, "num_speculative_tokens": 3, "adaptive_depth": False}
    sizes = {"dtype": "float32", "num_kv_blocks": 64, "max_model_len": 96, "cudagraph_capture_sizes": [1, 2, 8]}
    found: list[tuple[list[list[int]], int]] = []
    plan = plan_of(2, model="demo", enable_sleep_mode=True, speculative_config=speculation, **sizes)
    with thread_ranks.engine_on_threads(plan) as engine:
        bench, scheduler, before = Bench(engine), engine.core.scheduler, 0
        for level in (1, 2, 2, 1, None):
            found.append((bench.tokens(), scheduler.stats.drafts.accepted - before))
            before = scheduler.stats.drafts.accepted
            if level is None:
                break
            bench.sleeper.sleep(level)
            assert not any(one.mapped for of_rank in drivers.values() for one in of_rank)
            bench.sleeper.wake_up()
    assert found[0][1] > 10 and found[1:] == [found[0]] * 4


@pytest.mark.parametrize(("form", "products"), [("gptq", "int4"), ("awq", "float32"), ("fp8", "float32")])
def test_parts_of_quantized_weights_come_back(
    form: str, products: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []

    def release(self: HostMemory, storages: Any, *, keep: bool) -> None:
        for storage in () if keep else storages:
            released.append(threading.current_thread().name)
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)

    monkeypatch.setattr(HostMemory, "release", release)
    make_checkpoint("qwen2", tmp_path, hidden_size=128, intermediate_size=128)
    quantize_checkpoint(tmp_path, FORMATS[form])
    with two_ranks(tmp_path, cpu_products=products) as bench:
        expected = bench.tokens()
        for level in (2, 1, 2):
            bench.sleeper.sleep(level)
            bench.sleeper.wake_up()
            assert bench.tokens() == expected
    assert len(set(released)) == 2, "both ranks have released memory"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("level", "part"), [(1, 0), (2, 0), (1, 1), (2, 1)])
def test_all_ranks_sleep_on_if_one_has_no_memory(
    rank: int, level: int, part: int, tmp_path: Path, drivers: dict[int, list[FakeMemoryDriver]]
) -> None:
    make_checkpoint("qwen3", tmp_path)
    with two_ranks(tmp_path) as bench:
        expected = bench.tokens()
        bench.sleeper.sleep(level)
        driver = drivers[rank][part]
        driver.taken = driver.device_bytes
        for tags in (["kv_cache", "weights"], ["weights"] if part == 0 else ["kv_cache"]):
            with pytest.raises(MemoryLimitError, match=f"^rank {rank}: no memory to wake up: .* end them and wake up"):
                bench.sleeper.wake_up(tags)
            assert bench.sleeper.asleep == {"weights", "kv_cache"} and bench.sleeper.level == level
            assert not any(one.mapped for pair in drivers.values() for one in pair), "no rank is awake alone"
            with pytest.raises(EngineUnavailable, match="sleeps"):
                bench.tokens()
        driver.taken = 0
        bench.sleeper.wake_up()
        assert bench.tokens() == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_sleeps_if_one_cannot_keep_its_weights(
    rank: int, tmp_path: Path, drivers: dict[int, list[FakeMemoryDriver]], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.main_thread()
    make_checkpoint("qwen3", tmp_path)
    with two_ranks(tmp_path) as bench:
        expected = bench.tokens()
        bench.sleeper.sleep(2)  # drops the copies that the start has prepared
        bench.sleeper.wake_up()
        with monkeypatch.context() as patch:
            free, none = FreeMemory(1 << 40, None), FreeMemory(20_000, 1_000_000)
            patch.setattr(
                host_copy, "free_memory", lambda: none if (threading.current_thread() is main) == (rank == 0) else free
            )
            with pytest.raises(MemoryLimitError, match=f"^rank {rank}: no host memory to keep .*level 2 keeps nothing"):
                bench.sleeper.sleep(1)
        assert not bench.sleeper.asleep and not bench.engine.core.asleep
        assert all(one.mapped for pair in drivers.values() for one in pair)
        assert bench.tokens() == expected


def test_a_rank_that_cannot_go_back_ends_the_engine(
    tmp_path: Path, drivers: dict[int, list[FakeMemoryDriver]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has no memory for its KV cache, and rank 0 cannot sleep again, as the copy of its weights is gone."""
    reasons: list[str] = []
    monkeypatch.setattr(thread_ranks.ThreadGroup, "fail", lambda self, reason: reasons.append(reason))
    make_checkpoint("qwen3", tmp_path)
    with two_ranks(tmp_path) as bench:
        bench.sleeper.sleep(1)
        drivers[1][1].taken = drivers[1][1].device_bytes
        keep = VirtualMemory._keep

        def failing(self: VirtualMemory) -> None:
            if self._driver is drivers[0][0]:
                raise MemoryError
            keep(self)

        monkeypatch.setattr(VirtualMemory, "_keep", failing)
        with pytest.raises(RankError, match="^rank 0: no host memory to keep") as caught:
            bench.sleeper.wake_up()
        assert "rank 1: no memory to wake up" in str(caught.value.__cause__) and reasons == [str(caught.value)]


def test_ranks_share_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.zeros(1000, dtype=torch.uint8)
    monkeypatch.setattr(static_memory, "free_memory", lambda: FreeMemory(2500))
    for num_ranks, enough in ((2, True), (3, False)):
        memory = HostMemory(num_ranks)
        memory.release([weights.untyped_storage()], keep=False)
        if enough:
            memory.claim()
        else:
            with pytest.raises(MemoryLimitError, match="3000 bytes are needed, and 2500 are free"):
                memory.claim()
    monkeypatch.setattr(host_copy, "free_memory", lambda: FreeMemory(10_000, 10_000))
    host_copy.HostCopy(4096, 2).close()
    with pytest.raises(MemoryError):
        host_copy.HostCopy(4096, 3)


SETTINGS: dict[str, Any] = {
    **{"device": "cpu", "tensor_parallel_size": 2, "max_num_seqs": 2, "num_kv_blocks": 64, "max_model_len": 128},
    **{"cudagraph_capture_sizes": [1, 2], "enable_sleep_mode": True, "dtype": "float32"},
}
SHORT = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def tokens(llm: LLM) -> list[int]:
    (output,) = llm.generate([PROMPTS[0]], SHORT)
    return output.outputs[0].token_ids


def rank_1_of(llm: LLM) -> psutil.Process:
    assert llm.engine.group is not None
    (process,) = llm.engine.group._processes
    return psutil.Process(process.pid)


def test_processes_sleep_and_files_that_have_changed_are_told(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path, hidden_size=256, intermediate_size=2048, vocab_size=4096)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        rank = rank_1_of(llm)
        expected, size = tokens(llm), sum(one.nbytes for one in load_file(tmp_path / "model.safetensors").values()) // 2
        for level in (1, 2, 2):
            before = rank.memory_info().rss
            llm.sleep(level)
            if level == 2:
                assert rank.memory_info().rss < before - size * 0.9, "rank 1 gives its part back"
            with pytest.raises(EngineUnavailable, match="the engine sleeps"):
                tokens(llm)
            llm.wake_up()
            assert tokens(llm) == expected
        llm.sleep(2)
        with without_norms(tmp_path):
            with pytest.raises(WeightError, match=r"^rank 0: tensor .* is in none of model\.safetensors"):
                llm.wake_up()
            assert llm.is_sleeping()
        llm.wake_up()
        assert tokens(llm) == expected and llm.verify(num_replays=2).ok


@pytest.mark.parametrize("case", ["rank 1 fails", "rank 1 is killed", "rank 0 fails"])
def test_other_errors_end_the_engine(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("demo", **SETTINGS) as llm:
        tokens(llm)
        rank = rank_1_of(llm)
        llm.sleep(2)
        reason = "rank 1 failed: .*(Error|error)"
        if case == "rank 1 fails":
            rank.rlimit(psutil.RLIMIT_AS, (1 << 20, 1 << 20))
        elif case == "rank 1 is killed":
            rank.kill()
            reason = "the process of rank 1 ended by SIGKILL"
        else:
            monkeypatch.setattr(Sleeper, "_reload", lambda self: (_ for _ in ()).throw(OSError("disk")))
            reason = "rank 0 failed: OSError: disk"
        with pytest.raises(RankError, match=reason):
            llm.wake_up()
        monkeypatch.undo()
        assert llm.engine.group is not None
        llm.engine.group._watch.thread.join(5)
        with pytest.raises(PhonographError, match=reason):
            llm.wake_up()
    assert not rank.is_running()
