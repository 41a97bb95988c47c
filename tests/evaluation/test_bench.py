"""Benchmarks count what they say they count, on what the engine really ran."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phonograph import LLM, SamplingParams
from phonograph.errors import ConfigError, RequestError
from phonograph.evaluation.bench import Lengths, bench_latency, bench_throughput, summary
from phonograph.evaluation.run import Answer, run_requests


def _quiet(*_: object) -> None:
    pass


def test_latency_of_a_batch(demo_llm: LLM) -> None:
    hits = demo_llm.engine.core.scheduler.stats.prefix_hits
    progress: list[tuple[str, int, int]] = []
    result = bench_latency(
        demo_llm,
        input_len=37,
        output_len=6,
        batch_size=3,
        num_iters_warmup=2,
        num_iters=4,
        progress=lambda *one: progress.append(one),
    )
    assert progress == [("iterations", done, 6) for done in range(6)]
    assert [len(result.latency), len(result.ttft), len(result.itl)] == [4, 4 * 3, 4 * 3 * 5]
    # One prefill of 111 tokens and five decodes an iteration; the warm-up is not counted.
    assert result.steps == {"full mixed": 4, "full decode": 20}
    # Requests of a batch go together, so first token and gaps add up to the whole.
    assert sum(result.ttft) + sum(result.itl) == pytest.approx(3 * sum(result.latency), rel=0.02)
    assert min(result.ttft) > 0 and min(result.itl) > 0
    assert demo_llm.engine.core.scheduler.stats.prefix_hits == hits, "a prompt was seen before"


def test_throughput_of_ragged_requests(demo_llm: LLM) -> None:
    progress: list[tuple[str, int, int]] = []
    run = bench_throughput(
        demo_llm,
        num_prompts=23,
        input_len=Lengths(2, 40),
        output_len=Lengths(3, 9),
        progress=lambda *one: progress.append(one),
    )
    assert progress == [("requests", done, 23) for done in range(1, 24)]
    input_lens = [len(answer.output.prompt_token_ids) for answer in run.answers]
    output_lens = [len(answer.completion.token_ids) for answer in run.answers]
    assert set(output_lens) == set(range(3, 10)) and min(input_lens) < 10 and max(input_lens) > 32
    assert min(input_lens) >= 2 and max(input_lens) <= 40
    assert (run.prompt_tokens, run.output_tokens) == (sum(input_lens), sum(output_lens))
    assert all(answer.completion.finish_reason == "length" for answer in run.answers)
    assert all(len(answer.times) == length for answer, length in zip(run.answers, output_lens, strict=True))
    assert max(answer.times[-1] for answer in run.answers) == pytest.approx(run.seconds, rel=0.05)


def test_steps_tell_an_eager_run() -> None:
    llm = LLM(model="demo", load_format="dummy", max_num_seqs=4, enforce_eager=True)
    run = bench_throughput(llm, num_prompts=4, input_len=Lengths(3, 3), output_len=Lengths(5, 5), progress=_quiet)
    assert run.steps == {"eager": 5}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"batch_size": 9}, "batch_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"num_iters": 0}, "num_iters"),
        ({"num_iters_warmup": -1}, "num_iters_warmup"),
        ({"input_len": 0}, "input_len"),
        ({"output_len": 0}, "output_len"),
        ({"input_len": 8190, "output_len": 3}, "input_len"),
    ],
)
def test_a_batch_that_cannot_be(demo_llm: LLM, changed: dict[str, int], named: str) -> None:
    asked = {"input_len": 4, "output_len": 4, "batch_size": 2, "num_iters_warmup": 0, "num_iters": 1} | changed
    with pytest.raises(ConfigError, match=f"^{named}="):
        bench_latency(demo_llm, **asked, progress=_quiet)


def test_lengths() -> None:
    assert Lengths.parse("input_len", "128") == Lengths(128, 128)
    assert Lengths.parse("input_len", "100-1024") == Lengths(100, 1024)
    drawn = Lengths(3, 5).draw(np.random.default_rng(0), 100)
    assert set(drawn) == {3, 4, 5}
    for text in ("", "0", "-3", "5-3", "0-9", "a", "1-b", "1-2-3", "1.5"):
        with pytest.raises(ConfigError, match=r"^output_len=.* such as 100-1024"):
            Lengths.parse("output_len", text)


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

    def finished(place: int, answer: Answer) -> None:
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
