"""An engine of several ranks gives the tokens of one rank. Ranks are threads; `test_rank_processes` has processes."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from gguf_files import write_gguf
from invariants import check_scheduler
from quantized_checkpoints import quantized_demo
from rank_sessions import (
    GREEDY,
    PARAMS,
    PROMPTS,
    SETTINGS,
    finish,
    generate,
    plan_of,
    random_prompts,
    session_of,
)
from thread_ranks import ThreadRanks, engine_on_threads, on_ranks

from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.core.sampling_params import SamplingParams
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.engine.build import build_engine
from phonograph.engine.outputs import RequestOutput
from phonograph.engine.plan import make_plan
from phonograph.engine.process.ranks.follow_rank import FollowingRunner
from phonograph.engine.session import Session
from phonograph.engine.startup.configured_model import read_configured_model
from phonograph.engine.startup.start import verify_engine
from phonograph.errors import CaptureError, ConfigError, RankError
from phonograph.graphs.modes import GraphKey, GraphMode, GraphSet
from phonograph.graphs.runtime import CapturedGraph
from phonograph.graphs.tape.tape import TapeRuntime
from phonograph.kernels import ranks as kernel_ranks
from phonograph.kernels.triton.ranks.choose_sum import SumChoice, choose_sums
from phonograph.runner.runner import CaptureReport, capture_on_ranks
from phonograph.structured.compiler import GrammarCompiler


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with session_of(1, cudagraph_mode="NONE") as session:
        return [output.outputs[0].token_ids for output in generate(session, PROMPTS, PARAMS)]


@pytest.mark.parametrize(("size", "mode"), [*((2, mode) for mode in GraphMode), (4, GraphMode.FULL)])
def test_tokens_are_those_of_one_rank(size: int, mode: GraphMode, expected: list[list[int]]) -> None:
    with session_of(size, cudagraph_mode=mode) as session:
        assert [output.outputs[0].token_ids for output in generate(session, PROMPTS, PARAMS)] == expected
        labels = set(session.core.runner.counts)
        assert (labels == {"eager"}) is (mode is GraphMode.NONE)


@pytest.mark.parametrize(
    ("size", "divided"),
    # Both have blocks of 8 tokens.
    [(2, {}), (4, {"decode_context_parallel_size": 2, "block_size": 4})],
    ids=["2", "4 that share tokens"],
)
def test_whatever_requests_ask_for(size: int, divided: dict[str, Any]) -> None:
    """Prefix cache, preemption, grammars, log-probabilities of outputs and prompts, speculation and aborts."""
    schema = StructuredOutputs(json={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    prompts: list[Any] = [*random_prompts(7, 60, 30, 25), "Tom has 12 apples.", random_prompts(7, 60)[0] + [9, 10]]
    params = [
        SamplingParams(temperature=0.7, seed=4, max_tokens=60, ignore_eos=True, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=40, logprobs=3, prompt_logprobs=2, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=9, n=2, max_tokens=60, ignore_eos=True, top_k=50, logit_bias={7: 2.0}),
        SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=schema),
        SamplingParams(temperature=0.0, max_tokens=8, min_tokens=8, prompt_logprobs=0),
    ]
    settings = {
        "num_kv_blocks": 24,
        "max_model_len": 150,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }
    results: list[list[RequestOutput]] = []
    for count, more in ((1, {}), (size, divided)):
        with session_of(count, **settings, **more) as session:
            aborted = [session.add(prompt, GREEDY) for prompt in random_prompts(11, 40, 12)]
            outputs = [session.add(*pair) for pair in zip(prompts, params, strict=True)]
            for number in range(4):
                session.step()
                if number == 2:
                    session.abort(aborted[0])
            session.abort(aborted[1])
            finish(session)
            scheduler = session.core.scheduler
            check_scheduler(scheduler)
            assert scheduler.stats.num_preemptions > 0
            # The others have taken some of its blocks.
            generate(session, prompts[:1], [GREEDY])
            again = [session.add(prompts[0], GREEDY)]
            for _ in range(4):
                session.step()
            again.append(session.add(prompts[0], GREEDY))
            finish(session)
            assert again[0].num_cached_tokens == 56, "the full blocks were in the prefix cache"
            assert again[1].num_cached_tokens == 59, "the tail was copied too"
            results.append([*outputs, *again])
    for one, two in zip(*results, strict=True):
        assert one.error is None and two.error is None
        assert [sample.token_ids for sample in one.outputs] == [sample.token_ids for sample in two.outputs]
        check_logprobs(one, two)
    assert results[1][3].outputs[0].text.startswith("{")


def check_logprobs(one: RequestOutput, two: RequestOutput) -> None:
    for first, second in (
        (one.prompt_logprobs, two.prompt_logprobs),
        (one.outputs[0].logprobs, two.outputs[0].logprobs),
    ):
        assert (first is None) == (second is None)
        for entry, other in zip(first or (), second or (), strict=True):
            assert (entry is None) == (other is None)
            if entry is not None and other is not None:
                assert entry.keys() == other.keys()
                for token_id, logprob in entry.items():
                    assert abs(logprob.logprob - other[token_id].logprob) < 1e-4


def test_verify_runs_on_every_rank() -> None:
    with engine_on_threads(plan_of(2, cudagraph_mode="FULL_AND_PIECEWISE")) as engine:
        report = verify_engine(engine, num_replays=40)
        assert report.ok and report.num_replays == 40


@pytest.fixture
def without_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a sum out of each graph of rank 1."""
    capture = FollowingRunner.capture

    def faulty(self: FollowingRunner, *arguments: Any) -> CaptureReport:
        report = capture(self, *arguments)
        for graph in self._graphs.values():
            sums = [step for step in graph.steps if getattr(step, "func", None) is kernel_ranks._sum]
            graph.steps.remove(sums[3])
        return report

    monkeypatch.setattr(FollowingRunner, "capture", faulty)


@pytest.mark.usefixtures("without_a_sum")
def test_verify_finds_a_sum_that_one_rank_lacks() -> None:
    with (
        pytest.raises(
            RankError, match=r"(mixed|decode).*: rank 0 is at operation \d+, sum of .*, and rank 1 at operation"
        ),
        engine_on_threads(plan_of(2, cudagraph_mode="FULL", cudagraph_capture_sizes=[4])) as engine,
    ):
        verify_engine(engine, num_replays=2)


def test_verify_names_the_rank_whose_graph_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = FollowingRunner.capture

    def faulty(self: FollowingRunner, *arguments: Any) -> CaptureReport:
        report = capture(self, *arguments)
        for graph in self._graphs.values():
            input_ids, own = self._inputs.input_ids, torch.empty_like(self._inputs.input_ids)
            stale = [partial(own.copy_, input_ids), partial(input_ids.copy_, input_ids.clone())]
            graph.steps[:] = [*stale, *graph.steps, partial(input_ids.copy_, own)]
        return report

    monkeypatch.setattr(FollowingRunner, "capture", faulty)
    with engine_on_threads(plan_of(2, cudagraph_mode="FULL", cudagraph_capture_sizes=[4])) as engine:
        report = verify_engine(engine, num_replays=2)
    assert {mismatch.rank for mismatch in report.mismatches} == {None, 1}, "the sum brings it to rank 0"
    assert str(report.mismatches[-1]).startswith("rank 1, ")


@pytest.mark.parametrize("times", [1, 2])
def test_a_capture_that_fails_on_one_rank_has_failed_on_all(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [CaptureError("a library was not loaded")] * times
    runs: list[int] = []
    capture = TapeRuntime.capture

    def failing(self: TapeRuntime, function: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            runs.append(len(failures))
            if failures:
                raise failures.pop()
        return capture(self, function)

    monkeypatch.setattr(TapeRuntime, "capture", failing)
    plan = plan_of(2, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[1, 2])
    if times == 2:
        with pytest.raises(CaptureError, match="rank 1: a library was not loaded"), engine_on_threads(plan):
            pass
        return
    with engine_on_threads(plan) as engine:
        (retry,) = engine.captured.retries
        assert "rank 1: a library was not loaded" in str(retry) and runs == [1, 0, 0]
        assert verify_engine(engine, num_replays=2).ok


def test_ranks_with_unlike_graphs_do_not_start() -> None:
    def capture(ranks: ThreadRanks) -> str:
        key = GraphKey(GraphSet.DECODE, num_tokens=1 + ranks.rank, num_reqs=1 + ranks.rank)
        with pytest.raises(RankError) as raised:
            capture_on_ranks(ranks, key, lambda: CapturedGraph([], ()))
        return str(raised.value)

    texts = on_ranks(2, capture)
    assert texts[0].startswith("rank 0 captures ") and "and rank 1 captures" in texts[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": 3}, "tensor_parallel_size=3: layer 0 has 4 query heads, no multiple of 3; 1 or 2 or 4 works"),
        ({"size": 8}, "tensor_parallel_size=8: layer 0 has 4 query heads, no multiple of 8; 1 or 2 or 4 works"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_at_plan_time(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of(settings.pop("size"), **settings)
    assert words in str(raised.value)


def test_notes_say_what_a_rank_has() -> None:
    plan = plan_of(4)
    assert plan.whole.num_parameters == plan_of(1).model.num_parameters
    assert any("a rank has 1 of 4 query heads, 1 of 2 KV heads and 512 of 2048 tokens" in note for note in plan.notes)
    assert any("fewer KV heads than ranks: each is on 2 ranks" in note for note in plan.notes)
    two, four = (plan_of(size).attention.kv_token_bytes for size in (2, 4))
    assert two == four == plan_of(1).attention.kv_token_bytes // 2


def test_gates_and_ups_in_the_order_of_down(tmp_path: Path) -> None:
    """Tokens of one rank; notes name the matrices that lose their format."""
    quantized_demo(tmp_path / "demo", "gptq order")
    settings: dict[str, Any] = {"model": str(tmp_path / "demo"), "dtype": "float32", "cpu_products": "float32"}
    notes = plan_of(2, **settings).notes
    assert any(note.startswith("output in float32 on each rank: the inputs have an order") for note in notes)
    found: list[list[list[int]]] = []
    for size in (1, 2):
        with session_of(size, **settings) as session:
            found.append([output.outputs[0].token_ids for output in generate(session, PROMPTS, PARAMS)])
    assert found[0] == found[1]


@pytest.mark.parametrize(("size", "rows"), [(2, 16 << 20), (4, 1 << 20)])
def test_notes_say_how_sums_run_on_gpus(size: int, rows: int) -> None:
    """Two ranks have no sums by NCCL, which sends as much."""
    settings = {**SETTINGS, "max_num_batched_tokens": 65536}
    config = EngineConfig(**{**settings, "device": "cuda", "tensor_parallel_size": size})
    model = read_configured_model(config, config_only=False)
    plan = make_plan(config, model, known_device("h200"))
    rows //= model.hidden_size * 2
    few, many = plan.sums
    assert (few.kernel, few.max_rows, many.min_rows) == ("one-shot", rows, rows + 1)
    if size == 2:
        assert many.kernel == "one-shot" and f"which sums {rows} rows at a time" in many.reason
    else:
        assert (many.kernel, many.reason) == ("nccl", "NCCL sends less, in several trips")
    assert any(note.startswith(f"sums over ranks of 1 to {rows} rows by one-shot: one trip") for note in plan.notes)


def test_rows_too_wide_for_a_program_are_summed_by_nccl() -> None:
    settings = {"most_rows": 512, "on_cpu": False}
    assert choose_sums(1 << 14, 2, 4, **settings, batch_invariant=False)[0].max_rows == 32
    wide = choose_sums((1 << 14) + 8, 2, 2, **settings, batch_invariant=True)
    assert wide == (SumChoice("nccl", 1, None, "rows of 16392 numbers are wider than 16384"),)


def test_batch_invariant_sums_run_by_one_kernel() -> None:
    settings = {"on_cpu": False, "batch_invariant": True}
    few = choose_sums(4096, 2, 4, most_rows=64, **settings)
    assert [(one.kernel, one.rows) for one in few] == [("one-shot", "1 to 64")]
    many = choose_sums(4096, 2, 4, most_rows=512, **settings)
    assert [(one.kernel, one.rows) for one in many] == [("one-shot", "1 to 128"), ("one-shot", "129 and more")]


@pytest.mark.parametrize("family", ["qwen3_5", "bamba", "falcon_h1"])
def test_states_and_their_checkpoints_are_on_every_rank(family: str, tmp_path: Path) -> None:
    """A prompt again starts from a checkpoint, which each rank has of its heads."""
    make_checkpoint(family, tmp_path)
    settings = {"model": str(tmp_path), "num_kv_blocks": 64, "state_checkpoint_share": 0.5}
    prompts = [[3 + token % 90 for token in prompt] for prompt in random_prompts(3, 50, 1, 70)]
    found: list[list[list[int]]] = []
    for size in (1, 2):
        plan = plan_of(size, **settings)
        with nullcontext(build_engine(plan)) if size == 1 else engine_on_threads(plan) as engine:
            session = Session(engine.core, plan.model, None, 0, GrammarCompiler(lambda: None, ()))
            outputs = generate(session, prompts, [GREEDY] * 3)
            again = generate(session, [prompts[2], prompts[0] + [9, 10]], [GREEDY] * 2)
            assert [output.num_cached_tokens for output in again] == [64, 48]
            found.append([output.outputs[0].token_ids for output in (*outputs, *again)])
            if size == 2:
                assert verify_engine(engine, num_replays=6).ok
    assert found[0] == found[1]


def test_experts_of_a_gguf_file_are_cut(tmp_path: Path) -> None:
    """Greedy tokens, log-probabilities and graphs of all ranks."""
    make_checkpoint("qwen3_moe", tmp_path, seed=4, moe_intermediate_size=64, mlp_only_layers=[])
    path = tmp_path / "model.gguf"
    kinds = {"gate": "Q4_1", "down": "Q8_0", "o_pr": "F16"}
    write_gguf(path, tmp_path, lambda name: kinds.get(name.split(".")[-2][:4], "Q4_0"))
    settings: dict[str, Any] = {"model": str(path), "tokenizer": "demo", "dtype": "float32", "cpu_products": "float32"}
    prompts = [[3 + token % 90 for token in prompt] for prompt in random_prompts(3, 50, 1)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    found: list[list[RequestOutput]] = []
    for size in (1, 2):
        plan = plan_of(size, **settings)
        with nullcontext(build_engine(plan)) if size == 1 else engine_on_threads(plan) as engine:
            session = Session(engine.core, plan.model, None, 0, GrammarCompiler(lambda: None, ()))
            found.append(generate(session, prompts, [params] * 2))
            assert verify_engine(engine, num_replays=4).ok
    for one, two in zip(*found, strict=True):
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        check_logprobs(one, two)
    with pytest.raises(ConfigError, match=r"=4: layer 0: mlp.experts.0.down_proj in Q8_0 .* 32 only, and 16 is no"):
        plan_of(4, **settings)
