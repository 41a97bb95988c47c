"""Steps in flight: with the host a step ahead every request ends as it does without, and nothing stays behind."""

from __future__ import annotations

import shutil
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_scheduler
from scheduling import make_scheduler

from phonograph.core.batch import ScheduledBatch, SlotFailure, StepOutput
from phonograph.core.request import Request
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.core import EngineCore
from phonograph.engine.llm import LLM
from phonograph.engine.metrics.step_record import StepRecord
from phonograph.errors import PhonographError, RequestError
from phonograph.graphs.dispatch import Decision
from phonograph.graphs.modes import GraphMode

EOS, NOT_A_NUMBER = 0, 1
DECISION = Decision(mode=GraphMode.NONE, key=None, num_tokens=16, cause="a test", reason="a test of 16 tokens")


@dataclass
class Step:
    runner: FakeRunner
    output: StepOutput
    fails: bool = False
    decision: Decision = DECISION

    def result(self) -> StepOutput:
        assert self.runner.in_flight.popleft() is self, "results must be taken in order"
        if self.fails:
            raise OSError("the device is gone")
        return self.output


@dataclass
class FakeRunner:
    """Its tokens depend on all tokens before them. It knows slots only, as a device does: the next step overwrites."""

    lookahead: int
    counts: Counter[str] = field(default_factory=Counter)
    rows: dict[int, list[int]] = field(default_factory=dict)
    in_flight: deque[Step] = field(default_factory=deque)
    most_in_flight: int = 0
    fail_at: int = -1
    shapes: list[tuple[int, int]] = field(default_factory=list)

    def submit(self, batch: ScheduledBatch) -> Step:
        self.shapes.append((batch.num_decodes, batch.num_reqs))
        for slot in batch.freed:
            del self.rows[slot]
        for new in batch.new:
            assert new.slot not in self.rows
            self.rows[new.slot] = list(new.token_ids)
        output = StepOutput()
        for slot, query_len, context, samples in zip(
            batch.slots, batch.query_lens, batch.context_lens, batch.samples, strict=True
        ):
            row = self.rows[slot]
            assert samples == (context + query_len == len(row))
            if samples:
                token_id = (hash(tuple(row)) >> 7) % 23
                output.slots.append(slot)
                output.token_ids.append([token_id])
                if token_id == NOT_A_NUMBER:
                    output.failures[slot] = SlotFailure("sampling", "a test")
                row.append(token_id)
        step = Step(self, output, fails=len(self.shapes) == self.fail_at)
        self.in_flight.append(step)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return step


def make_core(lookahead: int, **changes: int) -> tuple[EngineCore, FakeRunner]:
    values = {"max_num_seqs": 3, "max_num_batched_tokens": 12, "max_model_len": 40, "num_blocks": 16, **changes}
    runner = FakeRunner(lookahead)
    return EngineCore(make_scheduler(**values), runner), runner


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    max_tokens: int
    at_step: int
    abort_after: int | None
    min_tokens: int


asked = st.builds(
    Asked,
    prompt=st.lists(st.integers(2, 22), min_size=1, max_size=20),
    max_tokens=st.sampled_from([1, 1, 2, 5, 19]),
    at_step=st.integers(0, 20),
    abort_after=st.sampled_from([None, None, None, 0, 3]),
    min_tokens=st.sampled_from([0, 0, 1]),
)


def serve(core: EngineCore, runner: FakeRunner, asked: list[Asked]) -> list[Request]:
    """Add each request at its step, abort those that are due, and step until no request is left."""
    requests = [
        Request(
            request_id=str(number),
            prompt_token_ids=one.prompt,
            params=SamplingParams(max_tokens=one.max_tokens, min_tokens=one.min_tokens),
            arrival=number,
            eos_token_ids=(EOS,),
        )
        for number, one in enumerate(asked)
    ]
    step = 0
    while core.has_work or step <= 20:
        for request, one in zip(requests, asked, strict=True):
            if one.at_step == step:
                core.scheduler.add(request)
            if one.abort_after is not None and one.at_step + one.abort_after == step:
                core.scheduler.abort(request.request_id)
        before = {id(request): len(request.output_token_ids) for request in requests}
        news = core.step()
        grown = {id(request) for request in requests if len(request.output_token_ids) > before[id(request)]}
        assert len({id(request) for request in news}) == len(news)
        assert grown <= {id(request) for request in news} <= grown | {id(r) for r in requests if r.finished}
        check_scheduler(core.scheduler)
        step += 1
        assert step < 2000, "requests do not end"
    assert not runner.in_flight and not core.scheduler.has_unfinished
    assert core.scheduler.stats.blocks_used == 0
    return requests


@settings(max_examples=60)
@given(st.lists(asked, min_size=1, max_size=12), st.sampled_from([1, 2]), st.sampled_from([16, 10]))
def test_requests_end_with_the_same_tokens(asked: list[Asked], lookahead: int, num_blocks: int) -> None:
    plain, ahead = (serve(*make_core(depth, num_blocks=num_blocks), asked) for depth in (0, lookahead))
    for one, alone, other in zip(asked, plain, ahead, strict=True):
        if one.abort_after is None:
            assert alone.output_token_ids == other.output_token_ids
            assert (alone.finish_reason, alone.stop_reason) == (other.finish_reason, other.stop_reason)
        else:  # how far it got depends on the moment
            common = min(len(alone.output_token_ids), len(other.output_token_ids))
            assert alone.output_token_ids[:common] == other.output_token_ids[:common]


def ask(core: EngineCore, name: str, prompt: list[int], max_tokens: int) -> Request:
    request = Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        arrival=0.0,
    )
    core.scheduler.add(request)
    return request


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_so_many_steps_are_in_flight_and_no_more(lookahead: int) -> None:
    core, runner = make_core(lookahead)
    request = ask(core, "a", [5, 6], 8)
    assert [len(core.step()) for _ in range(lookahead + 1)] == [0] * lookahead + [1]
    assert len(runner.in_flight) == lookahead
    while core.has_work:
        core.step()
    assert request.finished and runner.most_in_flight == lookahead + 1 and not runner.in_flight
    assert core.step() == []


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_each_step_is_reported_once_with_its_time(lookahead: int) -> None:
    """The prompt of 20 tokens takes two steps of 12 at most, and the second one has a decode."""
    core, runner = make_core(lookahead)
    records: list[StepRecord] = []
    core.on_step = records.append
    began = time.monotonic()
    ask(core, "b", [6], 2)
    ask(core, "a", [5] * 20, 3)
    while core.has_work:
        core.step()
        time.sleep(0.001)
    assert [(record.num_decodes, record.num_decodes + len(record.prefill_lens)) for record in records] == runner.shapes
    assert [record.num_tokens for record in records][:2] == [12, 10]
    assert [record.kind for record in records][:3] == ["prefill", "mixed", "decode"]
    assert {(record.graph, record.mode, record.graph_tokens, record.cause, record.reason) for record in records} == {
        ("eager", "NONE", 16, "a test", "a test of 16 tokens")
    }
    # However many are in flight, no two have the device at a time.
    starts = [record.ended - record.seconds for record in records]
    ends = [record.ended for record in records]
    assert starts[0] >= began and ends[-1] <= time.monotonic()
    assert all(end <= start + 1e-9 for end, start in zip(ends, starts[1:], strict=False))


def test_one_token_requests_beside_a_long_one_lose_no_step() -> None:
    core, runner = make_core(1, max_num_seqs=2, max_model_len=200, num_blocks=60)
    # 100 tokens that are numbers, none of which ends it.
    prompt = next(p for p in ([9, n] for n in range(2, 10**6)) if NOT_A_NUMBER not in continuation(p, 100))
    long = ask(core, "long", prompt, 100)
    short = [ask(core, str(n), [2 + n, 3, 4, 5, 6], 1) for n in range(100)]
    while core.has_work:
        core.step()
    assert len(long.output_token_ids) == 100 and all(request.finished for request in short)
    assert len(runner.shapes) == 100
    assert sum(num_decodes == 1 and num_reqs == 2 for num_decodes, num_reqs in runner.shapes) == 99


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    row = list(prompt)
    for _ in range(num_tokens):
        row.append((hash(tuple(row)) >> 7) % 23)
    return row[len(prompt) :]


def test_settle_applies_steps_of_aborted_requests() -> None:
    core, runner = make_core(1)
    ask(core, "a", [5, 6], 8)
    other = ask(core, "b", [7, 8], 8)
    core.step()
    core.scheduler.abort("a")
    core.settle()
    assert len(runner.in_flight) == 1, "b waits for it"
    core.scheduler.abort("b")
    assert core.has_work
    core.settle()
    assert not core.has_work and not runner.in_flight and other.output_token_ids == []


def test_a_failure_of_a_step_in_flight_stops_the_engine() -> None:
    core, runner = make_core(1)
    ask(core, "a", [5, 6], 8)
    runner.fail_at = 1
    assert core.step() == []
    with pytest.raises(OSError, match="device is gone"):
        core.step()
    with pytest.raises(PhonographError, match="device is gone.*make a new one"):
        core.step()
    core.scheduler.abort("a")
    core.settle()


# The engine with a model: the CPU's runner computes at once, but its tokens may be taken late as well.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama3")
    make_checkpoint("llama3", path)
    return str(path)


def make_llm(folder: str, lookahead: int, **settings: object) -> LLM:
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8, "num_kv_blocks": 128}
    llm = LLM(model=folder, **(defaults | settings))
    llm.engine.core.runner.lookahead = lookahead  # pyright: ignore[reportAttributeAccessIssue]
    return llm


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def test_an_llm_one_step_ahead_gives_the_same_outputs(folder: str) -> None:
    prompts = prompts_of(40, 33, 1, 25, 47, 30)
    base = SamplingParams(temperature=1.0, seed=7, max_tokens=30, ignore_eos=True)
    params = [
        SamplingParams(temperature=1.0, seed=3, max_tokens=24, n=3, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        base,
        SamplingParams(temperature=0.0, max_tokens=1),
        SamplingParams(temperature=1.0, seed=5, max_tokens=60, stop_token_ids=list(range(0, VOCAB_SIZE, 9))),
        SamplingParams(temperature=0.8, seed=9, max_tokens=30, repetition_penalty=1.3, min_tokens=4),
        base,
    ]
    # Few blocks, so that sequences are preempted while their tokens are in flight.
    tight = {"num_kv_blocks": 26, "max_model_len": 200, "enable_prefix_caching": False}
    plain, ahead = (make_llm(folder, lookahead, **tight) for lookahead in (0, 1))
    expected, got = plain.generate(prompts, params), ahead.generate(prompts, params)
    for one, other in zip(expected, got, strict=True):
        assert one.prompt_logprobs == other.prompt_logprobs
        for sample, same in zip(one.outputs, other.outputs, strict=True):
            assert (sample.token_ids, sample.finish_reason) == (same.token_ids, same.finish_reason)
            assert sample.stop_reason == same.stop_reason
            assert len(sample.logprobs or ()) == len(same.logprobs or ())
    assert ahead.engine.core.scheduler.stats.num_preemptions > 0
    assert not ahead.engine.core.has_work
    check_scheduler(ahead.engine.core.scheduler)


def test_nothing_is_in_flight_after_a_stream_was_left_or_a_request_aborted(folder: str) -> None:
    llm = make_llm(folder, 1)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = make_llm(folder, 0).generate(prompts_of(10), params)[0].outputs[0].token_ids
    for output in llm.stream(prompts_of(10)[0], params):
        if len(output.outputs[0].token_ids) == 3:
            break
    assert not llm.session.has_unfinished
    assert output.outputs[0].token_ids == expected[:3]
    assert llm.verify(num_replays=2).ok
    kept, ended = llm.session.add(prompts_of(10)[0], params), llm.session.add(prompts_of(12)[0], params)
    for _ in range(5):
        llm.session.step()
    llm.session.abort(ended)
    while llm.session.has_unfinished:
        llm.session.step()
    assert kept.outputs[0].token_ids == expected and ended.outputs[0].finish_reason == "abort"
    assert not llm.engine.core.has_work


# What the offline API does beside stepping


def test_a_folder_with_a_configuration_only_serves_token_ids(folder: str, tmp_path: Path) -> None:
    shutil.copy(Path(folder) / "config.json", tmp_path)
    llm = make_llm(str(tmp_path), 0, load_format="dummy")
    assert llm.tokenizer is None
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0)
    outputs = llm.generate(prompts_of(5, 9), params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5]
    assert [output.outputs[0].text for output in outputs] == ["", ""]
    with pytest.raises(RequestError, match="tokenizer"):
        llm.generate("text", params)
    refused = llm.chat([[{"role": "user", "content": "Hello!"}]] * 2, params)
    assert all("chat needs a tokenizer" in str(output.error) for output in refused)


def test_a_conversation_that_the_template_refuses_does_not_keep_the_others_from_being_answered() -> None:
    llm = LLM(model="demo", max_num_seqs=2, cudagraph_capture_sizes=[1, 2, 64])
    good = [{"role": "user", "content": "Hello!"}]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    expected = llm.chat(good, params)[0]
    first, refused, last = llm.chat([good, [{"content": "no role"}], good], params)
    assert "chat template" in str(refused.error) and refused.finished and not refused.outputs
    assert first.outputs[0].text == last.outputs[0].text == expected.outputs[0].text != ""
    with pytest.raises(RequestError, match="chat template"):
        llm.chat([{"content": "no role"}], params)
    # Without text the tokens are the same.
    (bare,) = llm.chat(good, SamplingParams(temperature=0.0, max_tokens=8, detokenize=False))
    assert (bare.outputs[0].text, bare.outputs[0].token_ids) == ("", expected.outputs[0].token_ids)
