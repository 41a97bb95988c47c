"""Several engines behind one connection, with engines that the test speaks for: shares, ends, verbs, restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from phonograph.core.batch import DraftCounts
from phonograph.core.pooling_params import PoolingParams
from phonograph.core.sampling_params import SamplingParams
from phonograph.core.token_types import EncoderTokens
from phonograph.engine.groups.group_facts import GroupFacts
from phonograph.engine.process.client import StartProgress, no_progress
from phonograph.engine.process.engine_pool import EnginePool, merged_stats
from phonograph.engine.process.messages import (
    Abort,
    Add,
    Align,
    Begin,
    Command,
    Pause,
    Profile,
    PromptFacts,
    Report,
    ResetPrefixCache,
    Resume,
    Sleep,
    Stop,
    WakeUp,
)
from phonograph.errors import EngineUnavailable, PhonographError, RequestError
from phonograph.kv_cache.checkpoints import CheckpointCounts
from phonograph.scheduling.engine_router import IndexChange
from phonograph.scheduling.scheduler_stats import SchedulerStats

PARAMS = SamplingParams(max_tokens=4, detokenize=False)
GROUP = GroupFacts(layers=(0,), readers=(), window=None, block_size=4, blocks_per_request=4, backend="b", reasons=())


def stats(number: int = 0) -> SchedulerStats:
    counts = {"num_running": number, "num_waiting": 0, "blocks_used": number, "num_blocks": 10, "num_preemptions": 0}
    drafts, checkpoints = DraftCounts(number, 0, 0, (number,)), CheckpointCounts(number, 1)
    return SchedulerStats(**counts, prefix_queries=number, prefix_hits=0, drafts=drafts, checkpoints=checkpoints)


@dataclass
class Facts:
    """The facts that the pool reads."""

    start_seconds: float = 1.0
    context_len: int = 64
    max_num_seqs: int = 2
    notes: tuple[str, ...] = ("a",)
    kv_groups: tuple[GroupFacts, ...] = (GROUP,)
    stats: SchedulerStats = field(default_factory=stats)


class Engine:
    """An engine of the test: it notes what it is sent, and says what it is told to say."""

    def __init__(self, fails: bool = False) -> None:
        self.sent: list[Command] = []
        self.reports: asyncio.Queue[Report] = asyncio.Queue()
        self.fails, self.closed = fails, False
        self.kill: Callable[[], None] = lambda: None

    async def ready(self, progress: StartProgress) -> Any:
        if self.fails:
            raise PhonographError("no memory")
        return Facts()

    def send(self, command: Command) -> None:
        self.sent.append(command)

    async def receive(self) -> list[Report]:
        return [await self.reports.get()]

    def on_death(self, callback: Callable[[], None]) -> None:
        self.kill = callback

    def end(self) -> str:
        return "it ended by SIGKILL"

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        self.closed = True


class Bench:
    """A pool that has started, and its engines; `failing` of those that start again cannot."""

    def __init__(self, num_engines: int = 2, failing: int = 0) -> None:
        self.engines: list[Engine] = []
        self.made = 0
        self.failing = failing
        self.pool = EnginePool(num_engines, self.make)
        self.num_deaths = 0
        self.pool.on_death(self.died)

    def make(self, rank: int) -> Engine:
        self.made += 1
        again = self.made > len(self.engines) and rank < len(self.engines)
        engine = Engine(fails=again and self.failing > 0)
        if again:
            self.failing -= engine.fails
            self.engines[rank] = engine
        else:
            self.engines.append(engine)
        return engine

    def died(self) -> None:
        self.num_deaths += 1

    def add(self, *prompts: list[int], key: int = 0, n: int = 1) -> None:
        self.pool.send(Add({key + at: prompt for at, prompt in enumerate(prompts)}, PARAMS.with_checked(n=n), 0))

    def keys(self, rank: int) -> list[int]:
        return [key for command in self.engines[rank].sent if isinstance(command, Add) for key in command.prompts]

    async def says(self, rank: int, **changes: Any) -> Report:
        self.engines[rank].reports.put_nowait(Report(**{"stats": stats(rank + 1), "num_steps": 3, **changes}))
        (report,) = await self.pool.receive()
        return report


def run(test: Callable[[Bench], Awaitable[None]], **settings: Any) -> None:
    async def started() -> None:
        bench = Bench(**settings)
        facts = await bench.pool.ready(no_progress)
        assert facts.max_num_seqs == 2 * len(bench.engines) and facts.stats.num_blocks == 10 * len(bench.engines)
        assert facts.notes[0].startswith(f"{len(bench.engines)} engines serve behind one address")
        bench.pool.send(Begin(7))
        assert all(engine.sent == [Begin(7)] for engine in bench.engines)
        try:
            await test(bench)
        finally:
            bench.pool.close_now()
            assert all(engine.closed and isinstance(engine.sent[-1], Stop) for engine in bench.engines)

    asyncio.run(started())


def update(key: int, index: int, finish_reason: Any) -> Any:
    return key, index, [5], None, finish_reason, None


def test_prompts_of_a_call_are_shared_out_and_reports_become_those_of_all() -> None:
    async def test(bench: Bench) -> None:
        bench.add([1] * 9, [2] * 9, [1] * 10, n=2)
        assert [bench.keys(0), bench.keys(1)] == [[0, 2], [1]]
        report = await bench.says(1, updates=[update(1, 0, "length")], prompts={1: PromptFacts(0, None)}, num_steps=4)
        assert (report.engine, report.num_steps, report.stats.prefix_queries) == (1, 4, 2)
        report = await bench.says(0, cached=[IndexChange(True, [1])], asleep=frozenset({"weights"}), sleep_level=1)
        assert (report.num_steps, report.stats.prefix_queries, report.cached) == (7, 3, [])
        assert report.asleep == {"weights"} and report.sleep_level == 1
        report = await bench.says(1, expert_load={0: [1, 2]})
        report = await bench.says(0, expert_load={0: [3, 4]})
        assert report.expert_load == {0: [4, 6]} and not report.asleep

    run(test)


def test_ends_of_samples_are_counted_once_however_they_come() -> None:
    async def test(bench: Bench) -> None:
        loads = bench.pool.router._engines
        bench.add([1] * 9, n=3)
        assert loads[0].num_open == 3 and loads[0].expected
        bench.pool.send(Abort(0, 2))  # a stop string was found
        await bench.says(0, updates=[update(0, 2, "length"), update(0, 1, "stop"), update(0, 0, None)])
        assert loads[0].num_open == 1
        bench.pool.send(Abort(0))
        bench.pool.send(Abort(0))
        assert loads[0].num_open == 0 and not loads[0].expected and not bench.pool._open
        assert bench.engines[0].sent[-2:] == [Abort(0, 2), Abort(0)]
        bench.add([1] * 9, key=1)
        await bench.says(0, refused={1: RequestError("prompt", 1, "is too long")})
        assert loads[0].num_open == 0 and not bench.pool._open

    run(test)


def test_prompts_that_generate_nothing_are_shared_out_too() -> None:
    async def test(bench: Bench) -> None:
        bench.pool.send(Add({0: [1] * 9, 1: [2] * 9}, PoolingParams(), 0))
        assert [bench.keys(0), bench.keys(1)] == [[0], [1]]
        await bench.says(0, updates=[(0, 0, [], None, "stop", None)], prompts={0: PromptFacts(0, None)})
        assert list(bench.pool._open) == [1]

    run(test)


def test_an_engine_that_ends_loses_its_own_prompts_and_is_started_again() -> None:
    async def test(bench: Bench) -> None:
        bench.add([1] * 9, [2] * 9)
        old = bench.engines[0]
        bench.pool.send(Pause(5, "keep", True))
        bench.pool.send(Sleep(6, 1, "keep"))
        bench.pool.send(WakeUp(8, ()))
        old.kill()
        (report,) = await bench.pool.receive()
        assert list(report.refused) == [0] and report.stats.num_blocks == 20
        assert str(report.refused[0]) == "engine 0: it ended by SIGKILL"
        bench.add([1] * 9, key=2)
        assert bench.keys(1) == [1, 2] and not bench.pool.members[0].up
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert old.closed and bench.pool.members[0].up and bench.pool.members[0].num_restarts == 1
        assert bench.engines[0].sent == [Begin(7), Pause(5, "keep", True)], "the pause lasts, the sleep does not"
        report = await bench.says(1, done={5: None})
        assert report.done == {5: None}, "the dead engine's answer is not waited for"
        bench.add([4] * 9, key=3)
        assert bench.keys(0) == [3]
        assert bench.pool.router.counts[1, "only"] == 1

    run(test)


def test_prompts_wait_while_no_engine_runs() -> None:
    async def test(bench: Bench) -> None:
        for engine in list(bench.engines):
            engine.kill()
        bench.add([1] * 9, [2] * 9)
        bench.pool.send(Abort(1))
        bench.pool.send(ResetPrefixCache(9))
        reports = await bench.pool.receive()
        assert isinstance(reports[-1].done[9], EngineUnavailable)
        for _ in range(4):
            await asyncio.sleep(0)
        assert sorted(bench.keys(0) + bench.keys(1)) == [0]
        assert not bench.num_deaths

    run(test)


def test_the_pool_ends_when_no_engine_can_be_started() -> None:
    async def test(bench: Bench) -> None:
        bench.engines[1].kill()
        for _ in range(4):
            await asyncio.sleep(0)
        assert not bench.num_deaths, "one engine serves"
        bench.engines[0].kill()
        for _ in range(4):
            await asyncio.sleep(0)
        assert bench.num_deaths == 1
        assert bench.pool.end() == "engine 0 could not be started again: no memory"

    run(test, failing=2)


def test_verbs_go_to_all_and_have_one_answer() -> None:
    async def test(bench: Bench) -> None:
        bench.pool.send(Profile(1, start=False))
        bench.pool.send(Resume(2))
        assert (await bench.says(0, done={1: "a.json", 2: None})).done == {}
        wrong = RequestError("resume", "now", "the engine sleeps")
        assert (await bench.says(1, done={1: "b.json", 2: wrong})).done == {1: "a.json, b.json", 2: wrong}
        assert all(engine.sent[1:] == [Profile(1, start=False), Resume(2)] for engine in bench.engines)

    run(test)


def test_an_engine_that_cannot_start_fails_the_start() -> None:
    async def start() -> None:
        pool = EnginePool(2, lambda rank: Engine(fails=rank == 1))
        try:
            await pool.ready(no_progress)
        finally:
            pool.close_now()

    with pytest.raises(PhonographError, match="no memory"):
        asyncio.run(start())


def test_statistics_are_added() -> None:
    one = merged_stats([stats(2), stats(3)])
    assert (one.num_running, one.num_blocks, one.drafts) == (5, 20, DraftCounts(5, 0, 0, (5,)))
    assert one.checkpoints == (5, 2)
    assert merged_stats([stats(4)]) == stats(4)


def test_a_transcript_is_aligned_by_one_engine() -> None:
    async def test(bench: Bench) -> None:
        prompt, matrix = EncoderTokens([1], np.zeros((80, 100), np.float32)), np.ones((2, 3), np.float32)
        for key, rank in ((4, 0), (5, 1)):
            bench.pool.send(Align(key, prompt, [2, 3], 50))
            assert [isinstance(engine.sent[-1], Align) for engine in bench.engines] == [True, rank == 1]
            assert (await bench.says(rank, done={key: matrix})).done[key] is matrix

    run(test)
