"""Simulated fleets: steps of known times, traces, and the schedules of a real engine."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phonograph import LLM
from phonograph.bench.fleet_report import coarse_difference, fleet_facts
from phonograph.bench.run_requests import run_requests
from phonograph.bench.step_bench import StepRecorder
from phonograph.cli.app import main
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.offline.simulation.coarse_fleet import simulate_coarsely
from phonograph.engine.offline.simulation.fleet import FleetResult, several, simulate
from phonograph.engine.offline.simulation.request_traces import TracedRequest, drawn_trace, read_trace
from phonograph.engine.offline.simulation.step_times import (
    MeasuredStep,
    MeasuredTimes,
    RooflineTimes,
    StepWork,
    read_table,
    summarized,
    table_of,
)
from phonograph.engine.plan import EnginePlan, make_plan
from phonograph.engine.startup.configured_model import read_configured_model
from phonograph.errors import ConfigError

SETTINGS: dict[str, Any] = {
    "model": "demo",
    "max_num_seqs": 4,
    "max_model_len": 256,
    "block_size": 16,
    "num_kv_blocks": 60,
    "cudagraph_capture_sizes": "1,2,4,16,32",
    "max_num_batched_tokens": 48,
}


def plan_of(device: str = "cpu", **changes: Any) -> EnginePlan:
    config = EngineConfig(**SETTINGS | changes)
    return make_plan(config, read_configured_model(config, config_only=True), known_device(device))


@dataclass(frozen=True, slots=True)
class Given(TracedRequest):
    """A request with real tokens."""

    tokens: tuple[int, ...] = ()

    def token_ids(self) -> list[int]:
        return list(self.tokens)


class Ticks:
    """Steps of one second for each started ten tokens, and a host that needs a quarter of a second."""

    notes: Sequence[str] = ()

    def seconds(self, work: StepWork) -> float:
        return float(-(-work.num_tokens // 10))

    def host_seconds(self, num_reqs: int) -> float:
        return 0.25


@pytest.mark.parametrize(
    ("device", "first", "last"),
    [("cpu", [2.25, 5.75], [7.0, 12.0]), ("h100", [2.25, 7.25], [5.25, 12.25])],
)
def test_times_follow_from_the_steps(device: str, first: list[float], last: list[float]) -> None:
    """A prompt of 12 tokens takes the graph of 16, two seconds, and each further token one.

    On a CPU the second request is added to the third token of the first. On a GPU that token is then scheduled already,
    and the fourth one too.
    """
    trace = [TracedRequest(0, 0.0, 12, 4), TracedRequest(1, 3.5, 12, 6)]
    result = simulate(plan_of(device), Ticks(), trace)
    firsts = [answer.first_token for answer in result.answers]
    lasts = [answer.ended for answer in result.answers]
    assert firsts == first and lasts == last


def test_a_schedule_is_that_of_the_real_engine() -> None:
    """Graphs, padding and cached tokens of requests that are all there at the start, with prefixes and preemptions."""
    rng = random.Random(1)
    shared = [rng.randrange(5, 500) for _ in range(40)]
    prompts = [
        (shared[: rng.choice([0, 17, 40])] + [rng.randrange(5, 500) for _ in range(rng.randrange(1, 90))])
        for _ in range(30)
    ]
    lens = [rng.randrange(1, 100) for _ in prompts]
    with LLM(device="cpu", **SETTINGS | {"num_kv_blocks": 28}) as llm:
        params = [SamplingParams(max_tokens=length, ignore_eos=True, temperature=0) for length in lens]
        run = run_requests(llm, prompts, params)
        stats = llm.engine.core.scheduler.stats
    trace = [
        Given(number, 0.0, len(prompt), length, tokens=tuple(prompt))
        for number, (prompt, length) in enumerate(zip(prompts, lens, strict=True))
    ]
    result = simulate(plan_of(num_kv_blocks=28), Ticks(), trace)
    graphs = Counter[str]()
    for (label, _), use in result.graphs.items():
        graphs[label] += use.num_steps
    assert graphs == run.steps
    (simulated,) = result.stats
    assert stats.num_preemptions == simulated.num_preemptions > 0
    assert stats.prefix_hits == simulated.prefix_hits > 100
    assert [answer.num_cached for answer in result.answers] == [one.output.num_cached_tokens for one in run.answers]


def conversations(num: int, turns: int, rng: random.Random) -> list[TracedRequest]:
    """Turns of conversations, each with the blocks of the turn before and a new one, in a random order."""
    order = [conversation for conversation in range(num) for _ in range(turns)]
    rng.shuffle(order)
    seen, requests = Counter[int](), []
    for number, conversation in enumerate(order):
        seen[conversation] += 1
        hashes = tuple(conversation * 100 + turn for turn in range(seen[conversation]))
        requests.append(TracedRequest(number, number * 0.2, 512 * len(hashes), 32, hashes))
    return requests


def hits(result: FleetResult) -> float:
    return sum(one.prefix_hits for one in result.stats) / sum(one.prefix_queries for one in result.stats)


def test_engines_with_a_share_of_the_cache_have_its_prefix_hits() -> None:
    """Four engines behind the router, each with a quarter of the cache of one."""
    trace = conversations(24, 5, random.Random(0))
    settings = {"max_model_len": 4096, "max_num_batched_tokens": 2048, "cudagraph_capture_sizes": None}
    whole = simulate(plan_of("h100", num_kv_blocks=4000, **settings), RooflineTimes(plan_of("h100")), trace)
    part = several(plan_of("h100", num_kv_blocks=1000, **settings), 4)
    routed = simulate(part, RooflineTimes(part), trace, num_engines=4)
    assert hits(whole) > 0.5
    assert hits(routed) >= 0.95 * hits(whole)
    assert {engine for engine, _ in routed.routed} == {0, 1, 2, 3}


def test_two_engines_take_half_the_time_and_all_requests_are_whole() -> None:
    plan = several(plan_of(), 2)
    trace = drawn_trace(40, float("inf"), lambda rng, n: [20] * n, lambda rng, n: [30] * n, 0)
    one, two = (simulate(plan, Ticks(), trace, num_engines=count) for count in (1, 2))
    assert 1.9 < one.seconds / two.seconds < 2.1
    for result in (one, two):
        assert [answer.request for answer in result.answers] == trace
        assert sum(use.num_tokens for use in result.graphs.values()) >= 40 * (20 + 29)
        assert all(0 <= total <= num_steps for total, num_steps, _ in result.kv_use.values())
    facts = fleet_facts(two, 2, 3.6)
    assert facts["cost"] == pytest.approx(two.seconds * 2 / 1000) and facts["completed"] == 40
    assert facts["total_output_tokens"] == 1200 and facts["padding"] < 0.5 and facts["busy_share"] <= 1


class Keys(Ticks):
    """Keeps the most keys that the decodes of a step read."""

    most = 0

    def seconds(self, work: StepWork) -> float:
        self.most = max(self.most, work.decode_keys)
        return super().seconds(work)


@pytest.mark.parametrize(("device", "times_read"), [("h100", 2), ("cpu", 32), ("h100 off", 32)])
def test_decodes_read_a_shared_prefix_once(device: str, times_read: int) -> None:
    """Two prefixes of 2,048 tokens, each of 16 sequences that come in turn and decode together, with 50 own tokens."""
    settings: dict[str, Any] = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "max_num_seqs": 32}
    settings |= {"num_kv_blocks": 9000, "cudagraph_capture_sizes": None}
    settings |= {"cascade_attention": "off"} if device.endswith("off") else {}
    plan, times = plan_of(device.split()[0], **settings), Keys()
    prefixes = (0, 1, 2, 3), (10, 11, 12, 13)
    # The first two fill the cache, and have ended when the others come.
    trace = [
        TracedRequest(number, 1e6 * (number > 1), 2048 + 50, 400, (*prefixes[number % 2], 100 + number))
        for number in range(34)
    ]
    simulate(plan, times, trace)
    assert 32 * 400 < times.most - times_read * 2048 < 32 * 450


class Smooth(Ticks):
    """Steps of milliseconds that take longer with their work."""

    def seconds(self, work: StepWork) -> float:
        return true_seconds(work)

    def host_seconds(self, num_reqs: int) -> float:
        return 1e-4


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_coarse_simulation_is_close_to_the_exact_one(device: str) -> None:
    plan = several(plan_of(device, num_kv_blocks=4000, max_num_seqs=16, max_num_batched_tokens=256), 4)
    trace = drawn_trace(
        400,
        150.0,
        lambda rng, n: [rng.randrange(5, 100) for _ in range(n)],
        lambda rng, n: [rng.randrange(1, 99) for _ in range(n)],
        0,
    )
    exact, coarse = (run(plan, Smooth(), trace, num_engines=4) for run in (simulate, simulate_coarsely))
    facts, others = (fleet_facts(result, 4, None) for result in (exact, coarse))
    assert [answer.request for answer in coarse.answers] == trace
    assert all(answer.request.arrival < answer.first_token <= answer.ended for answer in coarse.answers)
    for name in ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms"):
        assert others[name] == pytest.approx(facts[name], rel=0.03), name
    difference = coarse_difference(plan, Smooth(), trace, 4)
    assert difference["requests"] == 400 and abs(difference["relative"]["output_throughput"]) < 0.03
    with pytest.raises(ConfigError, match="has hash_ids, and --coarse shares no prefixes"):
        simulate_coarsely(plan, Ticks(), [TracedRequest(0, 0.0, 5, 5, (1,), "line 1")])


def test_a_coarse_simulation_makes_prompts_wait_for_slots_and_blocks() -> None:
    """One sequence at a time fits: request after request, each with its prompt and its answer."""
    plan = plan_of(num_kv_blocks=3, max_model_len=48)
    trace = [TracedRequest(number, 0.0, 20, 11) for number in range(3)]
    result = simulate_coarsely(plan, Ticks(), trace)
    one = 4.25 + 10 * 1.25  # a graph of 32 tokens, then decodes
    assert [answer.ended for answer in result.answers] == [one, 2 * one, 3 * one]
    assert max(most for _, _, most in result.kv_use.values()) <= 1


def measured() -> list[MeasuredStep]:
    """Steps of two graphs and of none, whose times are sums of their work."""
    steps: list[MeasuredStep] = []
    for graph, tokens, reqs in (("full decode 4", 4, 4), ("full mixed 32", 32, 3), ("eager", 40, 3)):
        for keys in (10, 100, 1000):
            for pairs in (0, 50, 500) if tokens > 4 else (0,):
                work = StepWork(graph, tokens + (keys if graph == "eager" else 0), reqs, keys, pairs)
                steps += [MeasuredStep(work, true_seconds(work))] * 2
    return steps


def true_seconds(work: StepWork) -> float:
    return 1e-3 + 1e-5 * work.num_tokens + 2e-6 * work.decode_keys + 3e-7 * work.prefill_pairs


def test_a_fit_finds_the_times_of_steps_between_the_measured_ones() -> None:
    times = MeasuredTimes(measured(), [(1, 0.001), (3, 0.002)], "test")
    for work in (StepWork("full decode 4", 4, 4, 400, 0), StepWork("full mixed 32", 32, 3, 300, 250)):
        assert times.seconds(work) == pytest.approx(true_seconds(work), rel=0.02)
    assert times.seconds(StepWork("eager", 70, 3, 30, 100)) == pytest.approx(
        true_seconds(StepWork("eager", 70, 3, 30, 100)), rel=0.05
    )
    assert times.host_seconds(2) == pytest.approx(0.0015)
    assert times.notes == ["step times: 42 measured steps of 3 graphs (test)"]
    assert times.seconds(StepWork("full decode 8", 8, 8, 100, 0)) > 0
    times.seconds(StepWork("full decode 8", 8, 8, 100, 0))
    assert times.notes[1:] == [
        "step times: full decode 8 was not measured; its times are those of other full decode steps"
    ]


def test_steps_that_were_held_up_change_a_fit_little() -> None:
    steps = [step for step in measured() if step.work.graph == "full mixed 32"]
    for index in (2, 5, 11):
        steps[index] = steps[index]._replace(seconds=3 * steps[index].seconds)
    for keys, pairs in ((300, 250), (20, 10), (900, 450)):
        work = StepWork("full mixed 32", 32, 3, keys, pairs)
        assert MeasuredTimes(steps, [], "test").seconds(work) == pytest.approx(true_seconds(work), rel=0.06)


def test_steps_without_a_graph_have_a_fit_for_each_class_of_tokens() -> None:
    """Twice the time from 3,000 tokens on, which no sum of the work gives."""

    def seconds(work: StepWork) -> float:
        return true_seconds(work) * (1 + (work.num_tokens > 3000))

    works = [StepWork("eager", tokens, 2, 10 * tokens, 7 * tokens) for tokens in range(2100, 4300, 20)]
    times = MeasuredTimes([MeasuredStep(work, seconds(work)) for work in works], [], "test")
    for tokens in (2333, 2555, 3777, 4111):
        work = StepWork("eager", tokens, 2, 10 * tokens, 7 * tokens)
        assert times.seconds(work) == pytest.approx(seconds(work), rel=0.05)
    assert len(times.notes) == 1


def test_a_graph_with_few_steps_has_the_fit_of_those_near_it_times_a_factor() -> None:
    """Three steps cannot have four coefficients. The graph of 32 tokens is slower than others, that of 200 too far."""
    works = [
        StepWork(f"full mixed {tokens}", tokens, reqs, 100 + reqs * 70 % 1100, tokens * (1 + reqs * 3 % 50))
        for tokens, most in ((24, 20), (32, 3), (40, 20), (200, 20))
        for reqs in range(1, 1 + most)
    ]
    factors = {24: 1.0, 32: 1.3, 40: 1.0, 200: 3.0}
    steps = [MeasuredStep(work, true_seconds(work) * factors[work.num_tokens]) for work in works]
    times = MeasuredTimes(steps, [], "test")
    for work in (StepWork("full mixed 32", 32, 12, 700, 4000), StepWork("full mixed 40", 40, 30, 200, 300)):
        assert times.seconds(work) == pytest.approx(true_seconds(work) * factors[work.num_tokens], rel=0.02)


def test_similar_steps_become_one_with_the_median() -> None:
    steps = [(StepWork("full decode 4", 4, 4, keys, 0), seconds) for keys, seconds in ((1000, 1), (1010, 9), (1005, 2))]
    assert summarized([*steps, (StepWork("full decode 4", 4, 4, 2000, 0), 5.0)]) == [
        (StepWork("full decode 4", 4, 4, 1005, 0), 2, 3),
        (StepWork("full decode 4", 4, 4, 2000, 0), 5, 1),
    ]


def test_tables_of_other_models_and_other_files_are_refused(tmp_path: Path) -> None:
    plan, file = plan_of(), tmp_path / "steps.json"
    table = table_of(plan, measured(), [(1, 0.5)])
    file.write_text(json.dumps(table))
    assert read_table(file, plan).host_seconds(7) == 0.5
    file.write_text(json.dumps(table | {"model": table["model"] | {"num_layers": 99}}))
    with pytest.raises(ConfigError, match="is of another model, with num_layers 99 and not"):
        read_table(file, plan)
    for text, message in (("[]", "is no table of phonograph bench steps"), ("{", "cannot be read")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_table(file, plan)
    with pytest.raises(ConfigError, match="step_times='none': is required for cpu"):
        RooflineTimes(plan)


def test_a_roofline_says_so_and_is_bound_by_bytes_or_operations() -> None:
    plan = plan_of("h100")
    times = RooflineTimes(plan)
    assert times.notes[0].startswith("step times: a roofline of h100, not measured: 80% of 3.35 TB/s")
    decode, prefill = StepWork("full decode 1", 1, 1, 10, 0), StepWork("eager", 8000, 1, 0, 32_000_000)
    assert times.seconds(decode) - 3e-4 == pytest.approx(plan.model.weight_bytes(plan.dtype) / 2.68e12, rel=0.01)
    assert times.seconds(prefill) - 3e-4 > 8000 * 2 * plan.model.num_parameters / 1e15


def test_mooncakes_blocks_are_shared_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 1300, "output_length": 7, "hash_ids": [0, 1, 2]},
        {"timestamp": 1500, "input_length": 3, "output_length": 1},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    first, second, third = read_trace(file)
    assert (second.arrival, second.input_len, second.output_len, second.origin) == (1.5, 1300, 7, "line 2")
    assert first.token_ids() == second.token_ids()[:1000] and len(second.token_ids()) == 1300
    assert not set(third.token_ids()) & set(second.token_ids())


def test_burst_gpts_failures_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "trace.CSV"
    file.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n118,GPT-4,417,276,693,API log\n"
    )
    assert [(one.arrival, one.input_len, one.output_len) for one in read_trace(file)] == [(5, 472, 18), (118, 417, 276)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "must be a .jsonl file of Mooncake's form, or a .csv file of BurstGPT's"),
        ("a.jsonl", "\n", "has no request"),
        ("a.jsonl", '{"timestamp": 1}', "line 1 must have timestamp, input_length and output_length: KeyError"),
        ("a.jsonl", '{"timestamp": -9, "input_length": 1, "output_length": 1}', "line 1 has the negative time -0.009"),
        ("a.jsonl", '{"timestamp": 9, "input_length": 0, "output_length": 1}', "line 1 has 0 and 1 tokens; both must"),
        (
            "a.jsonl",
            '{"timestamp": 9, "input_length": 600, "output_length": 1, "hash_ids": [4]}',
            "line 1 has 1 hash_ids of 512 tokens for 600 tokens",
        ),
        (
            "a.csv",
            "Timestamp,Request tokens,Response tokens\n9,1,1\n8,1,1\n",
            "line 3 has the time 8 s after 9 s; sort the rows by time",
        ),
        ("a.csv", "Timestamp,Request tokens\n9,1\n", "line 2 must have Timestamp, Request tokens and Response tokens"),
    ],
)
def test_wrong_traces_are_refused_by_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        read_trace(tmp_path / name)
    assert message in str(error.value)


def test_requests_beyond_the_context_and_speculation_are_refused() -> None:
    long = TracedRequest(0, 0.0, 250, 7, origin="line 5")
    with pytest.raises(ConfigError, match="trace='line 5': has 250 and 7 tokens, and a request has 256 at most"):
        simulate(plan_of(), Ticks(), [long])
    plan = plan_of(speculative_config={"num_speculative_tokens": 3})
    with pytest.raises(ConfigError, match="speculative_config=.*: is not simulated"):
        simulate(plan, Ticks(), [TracedRequest(0, 0.0, 2, 2)])


def test_measured_steps_of_an_engine_are_a_table_for_the_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phonograph.bench.step_bench.PHASE_REQUESTS", 8)
    file, plot = tmp_path / "steps.json", tmp_path / "plot.png"
    flags = ["--device", "cpu", *(f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items())]
    flags.remove("--model=demo")
    assert main(["bench", "steps", "demo", *flags, "--table", str(file), "--input-len=8,64", "--num-iters=1"]) == 0
    table = json.loads(file.read_text())
    graphs = {step[0] for step in table["steps"]}
    assert graphs >= {"full decode 1", "full decode 2", "full decode 4", "full mixed 32", "eager"}
    assert all(seconds > 0 for *_, seconds, _ in table["steps"]) and table["host"]
    beside_decodes = {tokens for graph, tokens, _, keys, pairs, *_ in table["steps"] if keys > 0 and pairs > 0}
    assert beside_decodes >= {4, 16, 32}, "prompts of all sizes come while others decode"
    capsys.readouterr()
    command = ["simulate", "demo", *flags, "--step-times", str(file), "--num-prompts=20", "--request-rate=9"]
    command += ["--input-len=10-50", "--output-len=20", "--num-engines=2", "--price=2", "--plot", str(plot)]
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["completed"] == 20 and facts["total_output_tokens"] == 400 and facts["engines"] == 2
    assert 0 < facts["median_tpot_ms"] < facts["median_e2el_ms"] and plot.stat().st_size > 1000
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "full decode 1" in shown and "TTFT" in shown and "Cost of a million output tokens" in shown
    assert main([*command, "--coarse", "--num-engines=16"]) == 0
    assert "coarse against exact, 10 requests on 8 engines: output_throughput" in capsys.readouterr().err
    assert main([*command, "--request-rate=0"]) == main([*command, "--price=-1"]) == 2
    assert main(["simulate", "demo", *flags]) == 2
    assert "phonograph bench steps writes one" in capsys.readouterr().err


def test_a_recorder_leaves_the_engine_as_it_was() -> None:
    with LLM(device="cpu", **SETTINGS) as llm:
        core, recorder = llm.engine.core, StepRecorder()
        before = core.on_step
        with recorder.watching(core):
            run_requests(llm, [[5] * 20], [SamplingParams(max_tokens=3, ignore_eos=True)])
        assert core.on_step is before and core.runner.submit.__name__ == "submit"
        assert [work.kind for work, _ in recorder.steps] == ["full mixed", "full decode", "full decode"]
        assert recorder.steps[0][0][1:] == (32, 1, 0, 20 * 21 // 2) and recorder.steps[2][0].decode_keys == 22
