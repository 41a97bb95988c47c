"""Verbs of an `AsyncLLM`: abort, pause and resume in three modes, and the reset of the prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from phonograph import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from phonograph.engine.outputs import RequestOutput
from phonograph.engine.process import run_engine
from phonograph.engine.process.process_client import ProcessClient
from phonograph.engine.process.thread_client import ThreadClient
from phonograph.errors import EngineUnavailable, RequestError

SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 2, "enforce_eager": True, "seed": 0, "block_size": 8}
LONG = SamplingParams(max_tokens=120, ignore_eos=True, temperature=0)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
PROMPT = [3 + place * place % 199 for place in range(40)]
Work = Callable[[AsyncLLM], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """Tokens of the prompt by max_tokens."""
    with LLM("demo", **SETTINGS) as llm:
        return {one.max_tokens or 0: llm.generate(PROMPT, one)[0].outputs[0].token_ids for one in (LONG, SHORT)}


@pytest.fixture(scope="module", params=["thread", "thread with a step in flight", "process"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Work], None]]:
    """Run a test with an engine, which serves afterwards and has no request left."""
    start = run_engine.start_engine

    def started(*arguments: Any, **named: Any) -> Any:
        engine = start(*arguments, **named)
        engine.core.runner.lookahead = 1
        pausing = run_engine.CoreLoop._stop

        def stop(loop: Any) -> None:
            assert not engine.core.in_flight, "a pause begins after the last step"
            pausing(loop)

        patch.setattr(run_engine.CoreLoop, "_stop", stop)
        return engine

    async def work_with_engine(work: Work) -> None:
        await work(llm)
        assert (await final(llm.generate(PROMPT, SHORT))).outputs[0].finish_reason == "length"
        while llm.num_open or llm.stats.num_running or llm.stats.num_waiting or llm.stats.blocks_used:
            await asyncio.sleep(0.01)

    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        if request.param == "thread with a step in flight":
            patch.setattr(run_engine, "start_engine", started)
        llm = AsyncLLM("demo", client=ProcessClient if request.param == "process" else ThreadClient, **SETTINGS)
        runner.run(llm.start())
        yield lambda work: runner.run(asyncio.wait_for(work_with_engine(work), 120))
        runner.run(llm.close())


async def final(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


class Asked:
    """A request on a task of its own."""

    def __init__(self, llm: AsyncLLM, params: SamplingParams, name: str | None = None) -> None:
        self.output: RequestOutput | None = None
        self.task = asyncio.create_task(self._read(llm.generate(PROMPT, params, name)))

    async def _read(self, outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
        async for self.output in outputs:
            pass
        assert self.output is not None
        return self.output

    @property
    def num_tokens(self) -> int:
        return 0 if self.output is None else sum(len(one.token_ids) for one in self.output.outputs)

    async def grown(self, to: int) -> None:
        while self.num_tokens < to:
            await asyncio.sleep(0.001)


async def stands_still(llm: AsyncLLM, *asked: Asked) -> None:
    """Nothing is computed for a while."""
    await asyncio.sleep(0.02)
    before = [llm.steps.num_steps, *(one.num_tokens for one in asked)]
    await asyncio.sleep(0.1)
    assert [llm.steps.num_steps, *(one.num_tokens for one in asked)] == before


def test_a_kept_request_continues_after_the_pause(run: Callable[[Work], None], expected: dict[int, list[int]]) -> None:
    async def work(llm: AsyncLLM) -> None:
        running = Asked(llm, LONG)
        await running.grown(5)
        await llm.pause_generation(mode="keep")
        assert await llm.is_paused() and llm.problem is None
        late = Asked(llm, SHORT)
        await stands_still(llm, running, late)
        assert 5 <= running.num_tokens < 120 and late.num_tokens == 0 and not running.task.done()
        await llm.resume_generation()
        assert not await llm.is_paused()
        assert (await running.task).outputs[0].token_ids == expected[120]
        assert (await late.task).outputs[0].token_ids == expected[4]

    run(work)


def test_a_pause_may_abort_all_requests(run: Callable[[Work], None], expected: dict[int, list[int]]) -> None:
    async def work(llm: AsyncLLM) -> None:
        several = SamplingParams(max_tokens=120, ignore_eos=True, n=2, temperature=0)
        compiled = SamplingParams(max_tokens=120, structured_outputs=StructuredOutputs(regex="[a-z]{5,90}"))
        asked = [Asked(llm, one) for one in (LONG, several, LONG, compiled)]
        await asked[0].grown(5)
        admitted = llm.stats.prefix_queries  # Both slots are taken.
        call = llm.open([PROMPT] * 100, SHORT)  # The pause comes before they are queued.
        await llm.pause_generation(mode="abort")
        outputs = [await one.task for one in asked]
        assert {sample.finish_reason for output in outputs for sample in output.outputs} == {"abort"}
        found = outputs[0].outputs[0].token_ids
        assert 5 <= len(found) < 120 and found == expected[120][: len(found)]
        await call.wait()
        assert {sample.finish_reason for sample in call.samples} == {"abort"}
        call.close()
        late = Asked(llm, SHORT)
        await stands_still(llm, late)
        assert late.num_tokens == 0 and llm.num_open == 1
        await llm.resume_generation()
        assert (await late.task).outputs[0].token_ids == expected[4]
        assert llm.stats.prefix_queries == admitted + len(PROMPT), "nothing else has run"

    run(work)


def test_a_pause_may_wait_for_the_requests(run: Callable[[Work], None], expected: dict[int, list[int]]) -> None:
    async def work(llm: AsyncLLM) -> None:
        running = [Asked(llm, LONG) for _ in range(3)]  # one of them has no slot
        await running[0].grown(5)
        pausing = asyncio.create_task(llm.pause_generation(mode="wait"))
        await asyncio.sleep(0)
        late = Asked(llm, SHORT)
        await pausing
        assert [len((await one.task).outputs[0].token_ids) for one in running] == [120] * 3
        await stands_still(llm, late)
        assert late.num_tokens == 0
        await llm.resume_generation()
        assert (await late.task).outputs[0].token_ids == expected[4]

    run(work)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_may_clear_the_prefix_cache(run: Callable[[Work], None], mode: Any) -> None:
    async def work(llm: AsyncLLM) -> None:
        for clears, cached in ((False, 32), (True, 0)):
            await final(llm.generate(PROMPT, SHORT))
            await llm.pause_generation(mode=mode, clear_cache=clears)
            await llm.resume_generation()
            assert (await final(llm.generate(PROMPT, SHORT))).num_cached_tokens == cached
        assert await llm.reset_prefix_cache() is True
        assert (await final(llm.generate(PROMPT, SHORT))).num_cached_tokens == 0

    run(work)


def test_verbs_may_follow_each_other_in_any_order(run: Callable[[Work], None], expected: dict[int, list[int]]) -> None:
    async def work(llm: AsyncLLM) -> None:
        await llm.resume_generation()
        admitted = llm.stats.prefix_queries
        kept = Asked(llm, LONG)
        await kept.grown(5)
        await llm.pause_generation(mode="keep")
        await llm.pause_generation(mode="keep")
        gone = Asked(llm, SHORT)
        await asyncio.sleep(0.02)
        gone.task.cancel()
        await asyncio.sleep(0.02)
        assert await llm.reset_prefix_cache() is True, "verbs are answered during a pause"
        await llm.abort("unknown")
        await llm.pause_generation(mode="abort")
        assert (await kept.task).outputs[0].finish_reason == "abort"
        await llm.resume_generation()
        waited = Asked(llm, LONG)
        await waited.grown(5)
        pausing = asyncio.create_task(llm.pause_generation(mode="wait"))
        await asyncio.sleep(0)
        await llm.resume_generation()
        await asyncio.wait_for(pausing, 5)
        assert (await waited.task).outputs[0].token_ids == expected[120]
        kept = Asked(llm, LONG)
        await kept.grown(5)
        await llm.pause_generation(mode="keep")
        await asyncio.wait_for(llm.pause_generation(mode="wait"), 60)
        assert (await kept.task).outputs[0].token_ids == expected[120]
        await llm.resume_generation()
        assert llm.stats.prefix_queries == admitted + 3 * len(PROMPT), "a cancelled request does not run later"

    run(work)


def test_requests_are_aborted_by_their_ids(run: Callable[[Work], None], expected: dict[int, list[int]]) -> None:
    async def work(llm: AsyncLLM) -> None:
        several = SamplingParams(max_tokens=120, ignore_eos=True, n=2, temperature=0)
        before = llm.requests.num_ended["abort"]
        first, second, third = Asked(llm, LONG, "a"), Asked(llm, several, "b"), Asked(llm, LONG, "c")
        await first.grown(5)
        await llm.abort("a")
        output = await first.task
        assert output.finished and output.outputs[0].finish_reason == "abort" and output.request_id == "a"
        found = output.outputs[0].token_ids
        assert found == expected[120][: len(found)] and 5 <= len(found) < 120
        assert llm.tokenizer is not None and output.outputs[0].text == llm.tokenizer.decode(found)
        await llm.abort(["b", "unknown", "a"])
        assert [one.finish_reason for one in (await second.task).outputs] == ["abort"] * 2
        assert (await third.task).outputs[0].token_ids == expected[120]
        assert llm.requests.num_ended["abort"] == before + 3

    run(work)


def test_wrong_verbs_are_refused() -> None:
    async def work() -> None:
        llm = AsyncLLM("demo", **SETTINGS)
        verbs: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            llm.pause_generation,
            llm.resume_generation,
            llm.reset_prefix_cache,
            llm.get_tokenizer,
        ]
        for verb in verbs:
            with pytest.raises(EngineUnavailable, match="has not started"):
                await verb()
        assert not await llm.is_paused()
        await llm.start()
        with pytest.raises(RequestError, match="mode=\"'stop'\": must be one of abort, wait, keep"):
            await llm.pause_generation(mode="stop")  # pyright: ignore[reportArgumentType]
        running = Asked(llm, LONG)
        await running.grown(2)
        pausing = asyncio.create_task(llm.pause_generation(mode="wait"))
        await asyncio.sleep(0)
        await llm.close()
        with pytest.raises(EngineUnavailable, match="shut down"):
            await pausing
        with pytest.raises(EngineUnavailable, match="shut down"):
            await running.task
        for verb in verbs:
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await verb()

    asyncio.run(work())
