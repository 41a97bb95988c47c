"""Latency, throughput, decode and mixed benchmarks of a small engine: the figures are of the work they name."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import workloads
from bench.cases import DECODE_CASES, MIXED_CASES, DecodeCase, MixedCase
from bench.result_files import read_records
from bench.workloads import bench_decode, bench_mixed
from phonograph import LLM, SamplingParams
from phonograph.bench import cases as bench_cases
from phonograph.bench import engine
from phonograph.bench.cases import LatencyCase, Lengths, cases_that_fit, parse_size
from phonograph.bench.engine import bench_latency, bench_throughput, timed
from phonograph.bench.records.results import Row, append_record, summary
from phonograph.bench.run_requests import TimedAnswer, run_requests
from phonograph.bench.suites import latency_suite, throughput_suite
from phonograph.core.limits import Limits
from phonograph.errors import ConfigError, RequestError


def _quiet(*_: object) -> None:
    pass


def test_latency_of_a_batch(demo_llm: LLM) -> None:
    # Other tests may have had these prompts.
    demo_llm.reset_prefix_cache()
    hits = demo_llm.engine.core.scheduler.stats.prefix_hits
    progress: list[tuple[str, int, int]] = []
    (row, other) = bench_latency(
        demo_llm,
        [LatencyCase(37, 6, 3), LatencyCase(5, 2, 1)],
        num_iters_warmup=2,
        num_iters=4,
        progress=lambda *one: progress.append(one),
    )
    assert progress == [("latency batches", done, 12) for done in range(12)]
    assert (row.suite, row.case, other.case) == ("latency", "3x37", "5")
    # One prefill of 111 tokens and five decodes an iteration; the warm-up is not counted.
    assert row.steps == {"full mixed": 4, "full decode": 20}
    facts = row.facts
    assert (facts["input_len"], facts["out_len"], facts["bs"]) == (37, 6, 3)
    assert facts["ms"] == pytest.approx(facts["latency_seconds"]["p50"] * 1e3, abs=1e-3)
    # Requests of a batch go together, so first token and gaps add up to the whole.
    whole = facts["ttft_seconds"]["mean"] + 5 * facts["itl_seconds"]["mean"]
    assert whole == pytest.approx(facts["latency_seconds"]["mean"], rel=0.02)
    assert demo_llm.engine.core.scheduler.stats.prefix_hits == hits, "a prompt was seen before"
    assert facts["prefill_ms"] == pytest.approx(facts["ttft_seconds"]["p50"] * 1e3, abs=1e-3)
    assert all(facts[name] > 0 for name in ("decode_ms", "prefill_tok_s", "decode_tok_s"))


def test_prefill_and_decode_are_timed_apart() -> None:
    """The second request gets its first token when the first has its second one already."""

    def answered(*times: float) -> TimedAnswer:
        return TimedAnswer(output=Any, times=list(times))  # pyright: ignore[reportArgumentType]

    def phases(*answers: TimedAnswer) -> dict[str, float]:
        run = SimpleNamespace(answers=answers, seconds=5.0, prompt_tokens=60)
        return engine._phases([run])  # pyright: ignore[reportArgumentType, reportPrivateUsage]

    assert phases(answered(1.0, 2.0, 3.0), answered(2.0, 3.0, 4.0, 5.0)) == {
        "prefill_ms": 2000.0,
        "prefill_tok_s": 30.0,
        "decode_ms": 3000.0,
        "decode_tok_s": 1.3,
    }
    assert phases(answered(1.0), answered(2.0)) == {"prefill_ms": 2000.0, "prefill_tok_s": 30.0}


@pytest.mark.parametrize("longest_first", [False, True])
def test_throughput_of_ragged_requests(longest_first: bool, demo_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[tuple[str, int, int]] = []
    runs: list[list[SamplingParams]] = []

    def watched(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], finished: object) -> object:
        assert [len(prompt) for prompt in prompts] == expected_in
        runs.append(params)
        return run_requests(llm, prompts, params, finished)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(engine, "run_requests", watched)
    lengths = random.Random(1)
    expected_in = [lengths.randrange(2, 41) for _ in range(23)]
    expected_out = [lengths.randrange(3, 10) for _ in range(23)]
    if longest_first:
        pairs = sorted(zip(expected_out, expected_in, strict=True), key=lambda pair: pair[0], reverse=True)
        expected_out, expected_in = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    (row,) = bench_throughput(
        demo_llm,
        num_prompts=23,
        input_len=Lengths(2, 40),
        output_len=Lengths(3, 9),
        progress=lambda *one: progress.append(one),
        longest_first=longest_first,
    )
    assert progress == [("requests", done, 23) for done in range(1, 24)]
    assert [[one.max_tokens for one in params] for params in runs] == [expected_out]
    assert all(one.ignore_eos and one.temperature == 0 for one in runs[0])
    assert (row.facts["reqs"], row.facts["in_tok"], row.facts["out_tok"]) == (23, sum(expected_in), sum(expected_out))
    assert row.facts["out_tok_s"] == pytest.approx(row.facts["out_tok"] / row.facts["s"], rel=0.01)
    assert row.steps.total() >= max(expected_out)


def test_the_published_throughput_has_the_peers_tokens() -> None:
    """The sums are in the peer's published rows: only the same seeds give them."""
    rng, published = random.Random(1), bench_cases.THROUGHPUT_LENS
    sums = [sum(published.draw(rng, 256)) for _ in range(2)]
    assert sums == [148709, 140691]


def test_decode_is_timed_without_its_prefill(demo_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[list[int]], int | None, float]] = []

    def watched(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
        seconds = timed(llm, prompts, params)
        asked.append((prompts, params[0].max_tokens, seconds))
        return seconds

    monkeypatch.setattr(workloads, "timed", watched)
    (row,) = bench_decode(demo_llm, [DecodeCase(4, 50)], _quiet)
    (prompts, *_), *others = asked
    assert [len(prompt) for prompt in prompts] == [50] * 4
    assert all(other[0] is prompts for other in others), "the prefix would not be cached"
    assert [tokens for _, tokens, _ in asked] == [1, 1, 1, 97, 97]
    times = [seconds for *_, seconds in asked]
    assert row.facts["itl_ms"] == pytest.approx((min(times[3:]) - min(times[1:3])) / 96 * 1e3, abs=1e-3)
    # 96 decodes after the step with the prompts' last tokens, twice.
    assert row.steps == {"full decode": 192, "full mixed": 2}
    assert "floor_ms" not in row.facts, "the memory of this machine was not measured"


def test_mixed_counts_the_batches_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "MIXED_SHORT_PROMPTS", 20)
    monkeypatch.setattr(workloads, "MIXED_TOKENS", 20)
    llm = LLM(model="demo", load_format="dummy", max_num_seqs=2, cudagraph_capture_sizes=[1, 2, 8, 512])
    runner = llm.engine.core.runner
    (row,) = bench_mixed(llm, [MixedCase(300)], _quiet)
    assert llm.engine.core.runner is runner
    # The long prompt is cached: a first step of both prompts, then a decode beside a prompt.
    assert row.facts["batches"] == {"prefill": 1, "mixed": 19} and row.facts["mixed_steps"] == 19
    assert row.steps == {"full mixed": 20}
    assert len(row.facts["all"]) == 3 and row.facts["s"] == pytest.approx(np.median(row.facts["all"][1:]), abs=1e-3)


def test_steps_tell_an_eager_run() -> None:
    llm = LLM(model="demo", load_format="dummy", max_num_seqs=4, enforce_eager=True)
    (row,) = bench_throughput(llm, num_prompts=4, input_len=Lengths(3, 3), output_len=Lengths(5, 5), progress=_quiet)
    assert row.steps == {"eager": 5}
    assert row.as_json()["steps"] == {"eager": 5} and row.as_json()["suite"] == "throughput"


def test_a_workload_that_cannot_be(demo_llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"^num_iters="):
        latency_suite("4", num_iters_warmup=0, num_iters=0)
    lengths = {"input_len": Lengths(4, 8190), "output_len": Lengths(3, 3)}
    with pytest.raises(ConfigError, match=r"^input_len=8190: with output_len=3"):
        next(bench_throughput(demo_llm, num_prompts=2, **lengths, progress=_quiet))
    with pytest.raises(ConfigError, match=r"^num_prompts=0"):
        throughput_suite(0)
    with pytest.raises(RequestError):
        timed(demo_llm, [[5], []], [SamplingParams(max_tokens=1)] * 2)


def test_cases_that_fit() -> None:
    limits = Limits(max_num_seqs=64, max_model_len=8192, max_num_batched_tokens=8192)
    cases, left_out = cases_that_fit("cases", DECODE_CASES, limits, requested=False)
    assert [str(case) for case in cases] == ["1x1024", "8x1024", "32x1024"]
    assert len(left_out) == 4
    assert left_out[0] == "128x1024 left out: needs 128 sequences at once; max_num_seqs=64"
    assert left_out[2] == "1x32768 left out: needs 32865 tokens in a sequence; max_model_len=8192"
    with pytest.raises(ConfigError, match="max_num_seqs=64"):
        cases_that_fit("cases", DECODE_CASES, limits, requested=True)
    with pytest.raises(ConfigError, match="no published case fits"):
        cases_that_fit("cases", MIXED_CASES, limits, requested=False)


def test_cases_as_they_are_written() -> None:
    assert [str(DecodeCase.parse(text)) for text in ("8x1024", "1x32k")] == ["8x1024", "1x32768"]
    assert MixedCase.parse("64k").length == 65536 + 100
    for text in ("", "8", "x5", "0x5", "5x0", "axb", "1x1m", "-1x5"):
        with pytest.raises(ConfigError, match=r"^cases="):
            DecodeCase.parse(text)
    for text in ("", "k", "0", "-4", "1.5k"):
        with pytest.raises(ConfigError, match=r"^input_len="):
            parse_size("input_len", text)


def test_lengths() -> None:
    assert Lengths.parse("input_len", "128") == Lengths(128, 128)
    assert Lengths.parse("input_len", "100-1023") == bench_cases.THROUGHPUT_LENS
    assert set(Lengths(3, 5).draw(random.Random(0), 100)) == {3, 4, 5}
    for text in ("", "0", "-3", "5-3", "0-9", "a", "1-b", "1-2-3", "1.5"):
        with pytest.raises(ConfigError, match=r"^output_len=.* such as 100-1023"):
            Lengths.parse("output_len", text)


def test_records_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    assert read_records([path]) == []
    records = [{"rows": [Row(suite="s", case=case, facts={"ms": 1.5}).as_json()]} for case in "ab"]
    for record in records:
        append_record(path, record)
    assert read_records([path, tmp_path / "absent"]) == records


def test_summary_against_sorted_values() -> None:
    values = np.random.default_rng(1).exponential(size=1001).tolist()
    ordered = sorted(values)
    found = summary(values)
    assert (found["p50"], found["p90"], found["p99"]) == pytest.approx((ordered[500], ordered[900], ordered[990]))
    assert found["mean"] == pytest.approx(math.fsum(values) / 1001)
    assert summary([]) == {}


def test_every_request_is_reported_when_it_ends(demo_llm: LLM) -> None:
    lengths = [5, 1, 9, 3, 7, 2, 4, 8, 6, 3]
    prompts = [[20 + place, 30] for place in range(len(lengths))]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    ended: list[tuple[int, int]] = []

    def finished(place: int, answer: TimedAnswer) -> None:
        assert answer.output.prompt_token_ids == prompts[place]
        ended.append((place, len(answer.completion.token_ids)))

    run = run_requests(demo_llm, prompts, params, finished)
    assert sorted(ended) == list(enumerate(lengths))
    assert ended[0] == (1, 1), "the shortest ends first"
    # Eight run at once: the last two wait for a slot, which their first tokens show.
    assert min(run.answers[8].ttft, run.answers[9].ttft) > max(answer.ttft for answer in run.answers[:8])


def test_a_refused_request_takes_the_others_back(demo_llm: LLM) -> None:
    params = SamplingParams(max_tokens=5)
    with pytest.raises(RequestError):
        run_requests(demo_llm, [[4, 5], [6], []], [params] * 3)
    assert not demo_llm.session.has_unfinished
