"""Calls of an `AsyncLLM` whose client reports what a test makes by hand: no call disturbs another."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from phonograph.core.batch import DraftCounts, TokenLogprobs
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.async_llm import AsyncLLM
from phonograph.engine.process.calls import Call, Sample
from phonograph.engine.process.client import StartProgress
from phonograph.engine.process.messages import (
    Abort,
    Add,
    Begin,
    Command,
    EngineFacts,
    ModelFacts,
    PromptFacts,
    Report,
    SampleUpdate,
    Stop,
)
from phonograph.errors import EngineUnavailable, RequestError, RequestFailure
from phonograph.files.model_files import model_path
from phonograph.graphs.capture_list import CaptureRetry, make_capture_list
from phonograph.graphs.modes import GraphKey, GraphSet, GraphSupport, Support
from phonograph.graphs.resolve import Pieces, resolve_mode
from phonograph.scheduling.scheduler_stats import SchedulerStats
from phonograph.server.http.api_errors import ApiError, api_error
from phonograph.server.http.error_count import ErrorCounts
from phonograph.server.observe.graphs import graphs
from phonograph.server.observe.metrics import EngineCollector
from phonograph.server.openai.answers import usage_of
from phonograph.text.formats.find_formats import Formats
from phonograph.text.tokenizer import Tokenizer

STATS = SchedulerStats(
    drafts=DraftCounts(),
    num_running=0,
    num_waiting=0,
    blocks_used=0,
    num_blocks=8,
    num_preemptions=0,
    prefix_queries=0,
    prefix_hits=0,
)
RESOLUTION = resolve_mode(None, Support(GraphSupport.ALWAYS, "a test"), Pieces(True, "a test"))
FACTS = EngineFacts(
    model=ModelFacts(architecture="LlamaForCausalLM", num_parameters=1, weight_bytes=4, weight_format="float32"),
    context_len=100,
    vocab_size=2048,
    max_num_seqs=4,
    scheduling_policy="fcfs",
    device="cpu",
    attention_backend="reference",
    resolution=RESOLUTION,
    captures=make_capture_list(RESOLUTION.mode, max_num_seqs=4, max_num_batched_tokens=16, max_capture_tokens=16),
    graph_memory_bytes=1000,
    capture_seconds=0.5,
    block_size=16,
    kv_groups=(),
    notes=(),
    start_seconds=0.0,
    stats=STATS,
)


class FakeClient:
    """Keeps what is sent to it after the start, and reports what it is given."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.reports: asyncio.Queue[Report] = asyncio.Queue()
        self.die: Callable[[], None] = lambda: None

    async def ready(self, progress: StartProgress) -> EngineFacts:
        return FACTS

    def send(self, command: Command) -> None:
        if not isinstance(command, Begin):
            self.sent.append(command)

    async def receive(self) -> list[Report]:
        reports = [await self.reports.get()]
        while not self.reports.empty():
            reports.append(self.reports.get_nowait())
        return reports

    def on_death(self, callback: Callable[[], None]) -> None:
        self.die = callback

    def end(self) -> str:
        return "it ended"

    async def close(self) -> None:
        self.sent.append(Stop())

    def report(self, *updates: SampleUpdate, **more: Any) -> None:
        self.reports.put_nowait(Report(stats=STATS, num_steps=1, updates=list(updates), **more))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(model_path("demo"))


class Bench:
    """An engine on a fake client."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.process = FakeClient()
        self.engine = AsyncLLM("demo", client=lambda config: self.process)
        self.tokenizer = tokenizer

    def open(self, *, streams: bool = True, count: int = 1, **params: Any) -> Call:
        return self.engine.open([[5, 6]] * count, SamplingParams(max_tokens=90, **params), streams=streams)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


def in_loop(tokenizer: Tokenizer, body: Callable[[Bench], Any]) -> None:
    async def run() -> None:
        bench = Bench(tokenizer)
        async with bench.engine:
            await asyncio.wait_for(body(bench), 10)
        assert bench.process.sent[-1] == Stop() and bench.engine.num_open == 0

    asyncio.run(run())


def test_tokens_that_came_meanwhile_are_one_piece(tokenizer: Tokenizer) -> None:
    async def body(bench: Bench) -> None:
        call = bench.open(stop=["zzz"])
        (add,) = bench.process.sent
        assert isinstance(add, Add) and add.params.stop == () and not add.params.detokenize
        (key,) = add.prompts
        for token_id in bench.ids("Tom has 12"):
            bench.process.report((key, 0, [token_id], None, None, None))
        await call.wait()
        (sample,) = call.take_changed()
        assert sample.take().text == "Tom has 12" and sample.take().text == ""
        bench.process.report((key, 0, bench.ids(" apples"), None, "length", None), (key, 0, [7], None, None, None))
        await call.wait()
        assert call.finished and sample.take().text == " apples" and sample.finish_reason == "length"
        assert bench.engine.num_open == 0 and len(bench.process.sent) == 1

    in_loop(tokenizer, body)


def test_a_stop_string_ends_the_sample_in_the_engine_too(tokenizer: Tokenizer) -> None:
    async def body(bench: Bench) -> None:
        call = bench.open(n=2, stop=[" has"])
        (key,) = bench.process.sent[0].prompts
        bench.process.report((key, 1, bench.ids("Tom has 12"), None, None, None))
        await call.wait()
        (sample,) = call.take_changed()
        assert (sample.index, sample.text, sample.finish_reason, sample.stop_reason) == (1, "Tom", "stop", " has")
        assert bench.process.sent[1:] == [Abort(key, 1)] and bench.engine.num_open == 1
        bench.process.report((key, 1, [5], None, "abort", None), (key, 0, [5], None, "stop", 5))
        await call.wait()
        assert call.finished and sample.text == "Tom" and bench.engine.num_open == 0

    in_loop(tokenizer, body)


def test_tokens_after_a_stop_string_are_dropped_and_not_counted(tokenizer: Tokenizer) -> None:
    async def body(bench: Bench) -> None:
        call = bench.open(stop=[" 12"], logprobs=0)
        (key,) = bench.process.sent[0].prompts
        ids = bench.ids("Tom has 12 apples and pears")
        positions = [TokenLogprobs([token_id], [-0.5], [1]) for token_id in ids]
        num_kept = len(bench.ids("Tom has 12"))
        bench.process.report((key, 0, ids[:1], positions[:1], None, None))
        await call.wait()
        (sample,) = call.take_changed()
        assert sample.take().token_ids == ids[:1]
        # The engine ends the sample by its length in the same step.
        bench.process.report((key, 0, ids[1:], positions[1:], "length", None))
        await call.wait()
        delta = sample.take()
        assert (delta.text, sample.finish_reason, sample.stop_reason) == (" has", "stop", " 12")
        assert (delta.token_ids, delta.logprobs) == (ids[1:num_kept], positions[1:num_kept])
        assert sample.token_ids == ids[:num_kept] and usage_of(call)["completion_tokens"] == num_kept
        requests = bench.engine.requests
        assert (requests.num_output_tokens, requests.inter_token.count) == (num_kept, num_kept - 1)
        assert requests.output_lens.total == num_kept

    in_loop(tokenizer, body)


def test_failures_stay_with_their_call(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grow = Sample.grow

    def broken(sample: Sample, token_ids: list[int], *rest: Any) -> int:
        assert token_ids != [666]
        return grow(sample, token_ids, *rest)

    monkeypatch.setattr(Sample, "grow", broken)

    async def body(bench: Bench) -> None:
        calls = [bench.open(streams=place % 2 == 0) for place in range(4)]
        keys = [next(iter(add.prompts)) for add in bench.process.sent]
        bench.process.report(
            (keys[0], 0, [666], None, None, None),
            (keys[2], 0, [5], None, "stop", None),
            refused={
                keys[1]: RequestFailure("a", "sampling", "not finite"),
                keys[3]: RequestError("prompt", 1, "is bad"),
            },
            prompts={keys[2]: PromptFacts(1, None)},
        )
        await calls[2].wait()
        assert calls[2].finished and calls[2].prompts[0].num_cached_tokens == 1
        failures = (
            (0, RequestFailure, 500, "not be turned into text"),
            (1, RequestFailure, 500, "not finite"),
            (3, RequestError, 400, "is bad"),
        )
        for place, kind, status, says in failures:
            with pytest.raises(kind, match=says) as caught:
                await calls[place].wait()
            assert api_error(caught.value).status == status
        assert bench.engine.num_open == 0
        assert [command.key for command in bench.process.sent[4:]] == [keys[1], keys[3], keys[0]]

    in_loop(tokenizer, body)


def test_closing_aborts_only_unfinished_requests(tokenizer: Tokenizer) -> None:
    async def body(bench: Bench) -> None:
        call = bench.open(count=2)
        first, second = bench.process.sent[0].prompts
        bench.process.report((first, 0, [5], None, "stop", None))
        await call.wait()
        call.limit(60, ApiError(504, "late"))
        call.close()
        call.close()
        assert bench.process.sent[1:] == [Abort(second)] and bench.engine.num_open == 0
        bench.process.report((second, 0, [5], None, None, None))  # it was on its way
        call.fail(ApiError(500, "after the end there is no error"))
        await asyncio.sleep(0)

    in_loop(tokenizer, body)


@pytest.mark.filterwarnings("error")
def test_a_call_that_closes_at_once_leaves_no_coroutine() -> None:
    async def run() -> None:
        gone = wait_for_ever()
        call = Call([], streams=False, end=lambda _: None)
        call.watch(gone, ValueError("gone"))
        call.close()
        await asyncio.sleep(0)
        assert inspect.getcoroutinestate(gone) == inspect.CORO_CLOSED

    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    asyncio.run(run())


def test_death_and_shutdown_end_everything(tokenizer: Tokenizer) -> None:
    async def dying(bench: Bench) -> None:
        calls = [bench.open(), bench.open(streams=False)]
        bench.process.die()
        for call in calls:
            with pytest.raises(EngineUnavailable, match="it ended"):
                await call.wait()
        with pytest.raises(EngineUnavailable, match="it ended"):
            bench.open()
        assert bench.engine.died.is_set() and bench.engine.num_open == 0

    async def draining(bench: Bench) -> None:
        call = bench.open()
        ending = asyncio.create_task(bench.engine.drain(0.05))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            bench.open()
        with pytest.raises(EngineUnavailable, match="before the answer was complete"):
            await call.wait()
        await ending

    async def drained(bench: Bench) -> None:
        call = bench.open()
        ending = asyncio.create_task(bench.engine.drain(60))
        bench.process.report((next(iter(bench.process.sent[0].prompts)), 0, [5], None, "stop", None))
        await call.wait()
        await ending
        assert call.finished

    for body in (dying, draining, drained):
        in_loop(tokenizer, body)


def test_a_report_that_cannot_be_taken_is_no_silence(tokenizer: Tokenizer) -> None:
    async def body(bench: Bench) -> None:
        call = bench.open()
        broken: Any = None
        bench.process.report(broken)
        with pytest.raises(EngineUnavailable, match="lost track"):
            await call.wait()
        assert bench.engine.died.is_set() and bench.engine.problem is not None

    in_loop(tokenizer, body)


def test_an_update_that_fits_no_sample_fails_its_call_alone(tokenizer: Tokenizer) -> None:
    async def body(bench: Bench) -> None:
        calls = [bench.open(), bench.open()]
        keys = [next(iter(add.prompts)) for add in bench.process.sent]
        bench.process.report((keys[0], 7, [5], None, None, None), (keys[1], 0, [5], None, "stop", None))
        await calls[1].wait()
        with pytest.raises(RequestFailure):
            await calls[0].wait()
        assert bench.engine.num_open == 0 and bench.engine.problem is None

    in_loop(tokenizer, body)


def test_stats_are_those_of_the_latest_report(tokenizer: Tokenizer) -> None:
    async def body(bench: Bench) -> None:
        assert bench.engine.stats is STATS
        later = replace(STATS, blocks_used=3)
        bench.process.reports.put_nowait(Report(stats=later, num_steps=9))
        await asyncio.sleep(0.01)
        assert bench.engine.stats == later and bench.engine.num_steps == 9

    in_loop(tokenizer, body)


def test_graphs_that_took_a_second_try_are_shown_and_counted(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(bench: Bench) -> None:
        retry = CaptureRetry(GraphKey(GraphSet.DECODE, 2, 2, 1), "the library was not loaded")
        monkeypatch.setattr(bench.engine, "facts", replace(FACTS, capture_retries=(retry,)))
        serving = SimpleNamespace(engine=bench.engine, names=["demo"], errors=ErrorCounts())
        serving.formats = Formats(None, None, ("tool calls: none",))
        state = SimpleNamespace(serving=serving)
        request: Any = SimpleNamespace(app=SimpleNamespace(state=state))
        shown = (await graphs(request, last=0, after=0))["captures"]["retries"]
        assert shown == [{"set": "decode", "tokens": 2, "slots": 2, "reason": "the library was not loaded"}]
        registry = CollectorRegistry()
        registry.register(EngineCollector(bench.engine, "demo", {}))
        assert registry.get_sample_value("phonograph:graph_capture_retries", {"model_name": "demo"}) == 1

    in_loop(tokenizer, body)
