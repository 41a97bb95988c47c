"""Ranks with all that runs on a GPU, in Triton's interpreter: ranks are threads, and graphs are calls.

`test_gpu_ranks` has the same on GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import eagle_heads
import pytest
import thread_ranks
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from fake_memory_driver import FakeMemoryDriver
from gguf_files import write_gguf
from host_runtime import CallRuntime, HostRing, tiles_of_small_models
from thread_ranks import ThreadRanks, engine_on_threads

from phonograph.config.engine_config import EngineConfig
from phonograph.core.batch import DraftCounts
from phonograph.core.device import known_device
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine import build
from phonograph.engine.plan import make_plan
from phonograph.engine.process.ranks import follow_rank
from phonograph.engine.session import Session
from phonograph.engine.startup.start import verify_engine
from phonograph.graphs.modes import GraphKey
from phonograph.kernels.ranks import Ranks
from phonograph.models.layers.linear import WeightAllocator
from phonograph.models.spec import read_model_spec
from phonograph.runner.runner import Runner
from phonograph.structured.compiler import GrammarCompiler

interpreter = pytest.importorskip("triton.runtime.interpreter")
layers = pytest.importorskip("phonograph.kernels.triton.elementwise.layers")
triton_parts = pytest.importorskip("phonograph.models.layers.triton_parts")
cuda_platform = pytest.importorskip("phonograph.engine.startup.cuda_platform")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: tests/engine/test_gpu_ranks.py runs all of this on two of them"
)


class HostPlatform(cuda_platform.CudaPlatform):
    """Parts of a rank's GPU, with tensors in host memory."""

    drivers: ClassVar[list[FakeMemoryDriver]] = []

    def __init__(self, ranks: Ranks | None) -> None:
        make_runtime = {"make_runtime": lambda device, scratch: CallRuntime(lazily=True)}
        drivers = {"make_memory_driver": self._make_driver}
        super().__init__(torch.device("cpu"), **make_runtime, **drivers, make_ring=HostRing, ranks=ranks)

    def _make_driver(self) -> FakeMemoryDriver:
        self.drivers.append(FakeMemoryDriver(64 << 20))
        return self.drivers[-1]

    def compile(self, launch: object) -> None:
        """Launch nothing: the interpreter would take minutes for every kernel of every shape."""


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.setattr(WeightAllocator, "by_outputs", True)
    # The interpreter runs one launch at a time.
    lock, launch = threading.Lock(), interpreter.GridExecutor.__call__

    def launch_alone(*arguments: Any, **settings: Any) -> None:
        with lock:
            launch(*arguments, **settings)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_alone)
    for module in (build, follow_rank):
        monkeypatch.setattr(module, "make_platform", lambda kind, ranks=None: HostPlatform(ranks))
    with tiles_of_small_models():
        yield


def plan_of(
    folder: Path, num_ranks: int, sizes: tuple[int, ...] = (1, 3, 16), dtype: str = "float32", **settings: Any
) -> build.EnginePlan:
    config = EngineConfig(
        **{"model": str(folder), "device": "cuda", "max_num_seqs": 3, "num_kv_blocks": 40, "block_size": 16},
        **{"dtype": dtype, "max_model_len": 256, "max_num_batched_tokens": 26, "cascade_attention": "off"},
        **{"tensor_parallel_size": num_ranks, "cudagraph_capture_sizes": [*sizes], **settings},
    )
    device = replace(known_device("h200"), capability=(8, 0))
    return make_plan(config, read_model_spec(folder), device)


def generate(engine: build.Engine) -> list[list[int]]:
    model = engine.plan.model
    session = Session(engine.core, model, None, 0, GrammarCompiler(lambda: None, tuple(model.eos_token_ids)))
    generator = torch.Generator().manual_seed(2)
    params = [
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1),
        SamplingParams(temperature=0.9, seed=3, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, repetition_penalty=1.3),
        SamplingParams(temperature=0.7, seed=8, max_tokens=3, ignore_eos=True),
    ]
    lengths = 30, 1, 7, 13
    outputs = [
        session.add(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist(), one)
        for length, one in zip(lengths, params, strict=True)
    ]
    while session.has_unfinished:
        session.step()
    assert all(output.finished and output.error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama3", {}),
        ("qwen2", NGRAM),
        ("olmo2", {}),
        ("mixtral", {}),
        ("glm4_moe", {}),
        ("gemma2", {}),
        ("qwen3_5", {}),
        ("nemotron_h", {}),
        ("granite4_h", {}),
        ("falcon_h1", {}),
    ],
)
def test_two_ranks_give_the_tokens_of_one(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, seed=3)
    expected = generate(build.build_engine(plan_of(tmp_path, 1, **settings)))
    with engine_on_threads(plan_of(tmp_path, 2, **settings)) as engine:
        assert generate(engine) == expected


def test_experts_of_a_gguf_file(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, seed=3, moe_intermediate_size=64, mlp_only_layers=[])
    write_gguf(path := tmp_path / "model.gguf", tmp_path, lambda name: "Q4_1" if "gate" in name else "Q4_0")
    # Kernels of quantized experts have no float32.
    expected = generate(build.build_engine(plan_of(path, 1, dtype="float16")))
    with engine_on_threads(plan_of(path, 2, dtype="float16")) as engine:
        assert generate(engine) == expected


def test_ranks_that_share_the_tokens_of_a_head(tmp_path: Path) -> None:
    """Decode context parallelism, in graphs of decodes and of mixed batches, and eager."""
    make_checkpoint("llama3", tmp_path, seed=3, num_attention_heads=2, num_key_value_heads=1)
    expected = generate(build.build_engine(plan_of(tmp_path, 1)))
    with engine_on_threads(plan_of(tmp_path, 2, decode_context_parallel_size=2)) as engine:
        assert generate(engine) == expected
        assert verify_engine(engine, num_replays=2).ok


def test_a_draft_model_beside_ranks_that_share_the_tokens_of_a_head(tmp_path: Path) -> None:
    """Kernels attend one query head of each rank, and drafts lie in whole blocks on rank 0."""
    make_checkpoint("llama3", tmp_path, seed=4, num_hidden_layers=1, **HEADS | {"num_key_value_heads": 1})
    speculation = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    settings: dict[str, Any] = {"speculative_config": {**speculation, "adaptive_depth": False}}
    expected = drafted(build.build_engine(plan_of(tmp_path, 1, (3, 9), "float16", **settings)), masked=False)
    settings["decode_context_parallel_size"] = 2
    with engine_on_threads(plan_of(tmp_path, 2, (3, 9), "float16", **settings)) as engine:
        assert drafted(engine, masked=False) == expected
    assert expected[2].accepted == expected[2].verified > 6


class AddingRanks(ThreadRanks):
    """Ranks that add a sum to the stream and norm it at once, as those with peer memory."""

    def add_and_norm(self, x_TE: torch.Tensor, hidden_TE: torch.Tensor, *norm: Any) -> bool:
        weight_E, eps, normed, factor = norm
        if len(x_TE) > 3:
            return False
        self.sum(x_TE)
        layers.add_and_norm(x_TE, hidden_TE, weight_E, eps, normed, factor=factor)
        return True


@pytest.mark.parametrize("family", ["llama3", "granite"])
def test_sums_that_leave_what_the_next_product_takes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path, seed=4)
    expected = generate(build.build_engine(plan_of(tmp_path, 1)))
    monkeypatch.setattr(thread_ranks, "ThreadRanks", AddingRanks)
    with engine_on_threads(plan_of(tmp_path, 2)) as engine:
        assert generate(engine) == expected


def test_verify_runs_on_every_rank(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path, seed=3)
    with engine_on_threads(plan_of(tmp_path, 2, **NGRAM)) as engine:
        assert verify_engine(engine, num_replays=3).ok


@pytest.mark.parametrize("family", ["llama3", "mixtral", "qwen3_5"])
def test_ranks_sleep_in_memory_of_their_own(family: str, tmp_path: Path) -> None:
    """Memory is useless while the ranks sleep; each reads its part again into the addresses of the first one."""
    make_checkpoint(family, tmp_path, seed=3)
    HostPlatform.drivers.clear()
    with engine_on_threads(plan_of(tmp_path, 2, enable_sleep_mode=True)) as engine:
        expected, drivers = generate(engine), [*HostPlatform.drivers]
        sizes = [len(one.mapped) for one in drivers]
        assert len(drivers) == 4 and all(sizes) and engine.sleeper is not None
        for level in (2, 1, 2):
            engine.sleeper.sleep(level)
            assert not any(one.mapped for one in drivers)
            engine.sleeper.wake_up()
            assert [len(one.mapped) for one in drivers] == sizes
            assert generate(engine) == expected


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}


def drafted(engine: build.Engine, *, masked: bool) -> tuple[list[list[int]], list[Any], DraftCounts]:
    """Return the tokens of some requests, the drafts in all slots after each step, and the counts of drafts."""
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    inputs: Any = engine.core.runner._inputs
    greedy = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    ruled = replace(greedy, allowed_token_ids=[*range(1, VOCAB_SIZE)])
    params = [ruled if masked else greedy, replace(greedy, temperature=0.8, seed=3), greedy]
    generator, drafts = torch.Generator().manual_seed(2), list[Any]()
    # No request ends at the end of a block: the drafts after its end would lie in none, and be any tokens.
    outputs = [
        session.add(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist(), one)
        for length, one in zip((29, 11, 2), params, strict=True)
    ]
    while session.has_unfinished:
        session.step()
        drafts.append(inputs.drafts.tolist())
    assert all(output.finished and output.error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs], drafts, engine.core.scheduler.stats.drafts


@pytest.mark.parametrize(
    ("method", "dtype", "tied"),
    [("draft_model", "float16", False), ("eagle3", "float32", True), ("eagle", "float16", False)],
    ids=["model", "states", "first version"],
)
def test_drafts_of_rank_0_are_those_of_one_rank(
    method: str, dtype: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes in the steps of rank 0 alone, whose target computes all rows of the last layer if a head reads them.

    In half precision graphs are whole; in single precision they are split at attention.
    """
    monkeypatch.setattr(triton_parts, "_FEW_TOKENS", 8)
    torch.manual_seed(5)
    folder = draft = tmp_path / "target"
    layers = {"num_hidden_layers": 3 if method == "eagle3" else 1, "head_dim": 32, "tie_word_embeddings": tied}
    # No two tokens are almost equal with these weights, as half precision may change places of them.
    reference = make_checkpoint("llama3", folder, seed=4, **layers)
    if method != "draft_model":
        draft = tmp_path / "head"
        sizes = {"vocab_size": VOCAB_SIZE, "rms_norm_eps": reference.config.rms_norm_eps, "num_hidden_layers": 1}
        eagle_heads.make_head(draft, method, sizes | HEADS, {})
    speculation = {"method": method, "model": str(draft), "num_speculative_tokens": 2, "adaptive_depth": False}
    settings, masked = {"dtype": dtype, "speculative_config": speculation}, method == "eagle3"
    expected = drafted(build.build_engine(plan_of(folder, 1, (1, 3, 9, 16), **settings)), masked=masked)
    with engine_on_threads(plan_of(folder, 2, (1, 3, 9, 16), **settings)) as engine:
        assert drafted(engine, masked=masked) == expected
        assert engine.core.runner.counts["piecewise" if dtype == "float32" else "full decode"] > 3
        report = verify_engine(engine, num_replays=2)
        assert report.ok, report.mismatches[:3]
    counts = expected[2]
    assert counts.verified > 6 and (method != "draft_model" or counts.accepted >= 0.9 * counts.verified)


def test_all_ranks_replay_what_rank_0_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("qwen3", tmp_path, seed=3, num_hidden_layers=1, head_dim=32)
    times: list[tuple[str, GraphKey]] = []

    def timed(self: Runner, key: GraphKey) -> Any:
        times.append((type(self).__name__, key))
        return replayed(self, key)

    replayed = Runner._replayed
    monkeypatch.setattr(Runner, "_replayed", timed)
    speculation = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    with engine_on_threads(plan_of(tmp_path, 2, (3, 9), "float16", speculative_config=speculation)) as engine:
        *_, counts = drafted(engine, masked=False)
    lead, following = ([key for name, key in times if name == kind] for kind in ("LeadRunner", "FollowingRunner"))
    assert lead == following and len(lead) >= 4 and dict(counts.choices)
