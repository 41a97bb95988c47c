"""Ranks in processes of their own: they serve, and their deaths and stops end the engine within seconds."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from phonograph.config.engine_config import EngineConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.async_llm import AsyncLLM
from phonograph.engine.llm import LLM
from phonograph.engine.process.client import EngineClient
from phonograph.engine.process.process_client import ProcessClient
from phonograph.engine.process.ranks import rank_processes
from phonograph.engine.process.ranks.rank_process import Failed
from phonograph.engine.process.thread_client import ThreadClient
from phonograph.errors import ConfigError, EngineUnavailable, PhonographError, RankError

SECONDS = 5.0
"""Longest time until an error, and until no process is left."""
SETTINGS = {
    **{"device": "cpu", "tensor_parallel_size": 2, "max_num_seqs": 2, "num_kv_blocks": 64, "max_model_len": 512},
    **{"cudagraph_capture_sizes": [1, 2], "max_num_batched_tokens": 64},
}
HEAD = {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 3, "adaptive_depth": False}
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    """Return the processes of the other ranks that a process has started."""
    children = process.children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def wait_until(done: Callable[[], bool], seconds: float = SECONDS) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_two_processes_give_the_tokens_of_one_and_a_stopped_rank_ends_them() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=1)
    prompts = ["Tom has 12 apples.", "Anna buys 3 books for"]
    of_one = LLM("demo", **{**SETTINGS, "tensor_parallel_size": 1}, speculative_config=HEAD)
    one = of_one.generate(prompts, params)
    me = psutil.Process()
    before = set(ranks_of(me))
    with LLM("demo", **SETTINGS, speculative_config=HEAD) as llm:
        two = llm.generate(prompts, params)
        assert [out.outputs[0].token_ids for out in two] == [out.outputs[0].token_ids for out in one]
        counts = llm.engine.core.scheduler.stats.drafts
        assert counts == of_one.engine.core.scheduler.stats.drafts and counts.accepted > 0
        assert llm.verify(num_replays=3).ok
        (rank,) = set(ranks_of(me)) - before
        rank.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankError, match=r"the process of rank 1 was stopped \(SIGSTOP\)"):
            llm.generate(prompts, LONG)
        assert time.monotonic() - began < SECONDS
        with pytest.raises(PhonographError, match="the engine stopped when a step failed.*rank 1 was stopped"):
            llm.generate(prompts, LONG)
    assert not rank.is_running()


async def _ends(
    act: Callable[[psutil.Process, psutil.Process], None],
    client: Callable[[EngineConfig], EngineClient] = ProcessClient,
    *,
    at_rest: bool = False,
) -> str:
    """Return the reason for which an engine ends, when something is done to its process and to that of its rank 1."""
    llm = AsyncLLM("demo", client=client, **SETTINGS)
    before = set(ranks_of(psutil.Process()))
    await llm.start()
    assert [one.kernel for one in llm.facts.sums] == ["gloo"]
    if isinstance(llm._client, ProcessClient):
        engine = psutil.Process(llm._client.pid)
        (rank,) = ranks_of(engine)
    else:
        engine = psutil.Process()
        (rank,) = set(ranks_of(engine)) - before
    acted: list[float] = []

    async def stream() -> None:
        async for output in llm.generate("Tom has 12 apples.", LONG):
            if output.outputs[0].token_ids and not acted:
                acted.append(time.monotonic())
                act(engine, rank)

    if at_rest:
        acted.append(time.monotonic())
        act(engine, rank)
    with pytest.raises(EngineUnavailable) as raised:
        await asyncio.wait_for(llm.died.wait() if at_rest else stream(), 60)
        await stream()
    assert time.monotonic() - acted[0] < SECONDS
    await llm.close()
    wait_until(lambda: not rank.is_running() and (engine == psutil.Process() or not engine.is_running()))
    return str(raised.value)


def test_a_killed_rank_ends_an_engine_at_rest() -> None:
    reason = asyncio.run(_ends(lambda engine, rank: rank.kill(), at_rest=True))
    assert reason == "the engine's process ended with exit code 1: the process of rank 1 ended by SIGKILL"


def test_a_killed_rank_ends_an_engine_on_a_thread() -> None:
    reason = asyncio.run(_ends(lambda engine, rank: rank.kill(), ThreadClient, at_rest=True))
    assert reason == "the engine's thread ended by a failure of its ranks: the process of rank 1 ended by SIGKILL"


def test_open_streams_learn_that_rank_0_was_stopped() -> None:
    reason = asyncio.run(_ends(lambda engine, rank: engine.send_signal(signal.SIGSTOP)))
    assert reason.startswith(
        "the engine's process ended by SIGKILL: the engine's process was stopped (SIGSTOP), so that"
    )


def test_a_refused_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of ranks start before the plan is made, and ranks have a folder from then on only."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = set(ranks_of(psutil.Process()))

    async def start(num_ranks: int) -> None:
        llm = AsyncLLM("demo", client=ProcessClient, **{**SETTINGS, "tensor_parallel_size": num_ranks})
        try:
            await llm.start()
        finally:
            await llm.close()

    with pytest.raises(ConfigError, match="tensor_parallel_size=3: layer 0 has 4 query heads"):
        asyncio.run(start(3))
    asyncio.run(start(2))
    wait_until(lambda: set(ranks_of(psutil.Process())) <= before)
    assert not list(tmp_path.glob("phonograph-ranks-*"))


def test_a_rank_that_dies_at_the_start() -> None:
    async def start() -> None:
        llm = AsyncLLM("demo", client=ProcessClient, **SETTINGS)
        starting = asyncio.ensure_future(llm.start())
        while not (client := llm._client):
            await asyncio.sleep(0.01)
        assert isinstance(client, ProcessClient)
        engine = psutil.Process(client.pid)
        while not (ranks := ranks_of(engine)):
            await asyncio.sleep(0.01)
        began = time.monotonic()
        ranks[0].kill()
        with pytest.raises(PhonographError, match="rank 1 ended by SIGKILL"):
            await starting
        assert time.monotonic() - began < SECONDS
        assert not engine.is_running()

    asyncio.run(start())


@pytest.mark.parametrize(
    ("signal_number", "of_rank", "reason"),
    [
        (signal.SIGKILL, 1, "the process of rank 1 ended by SIGKILL"),
        (signal.SIGSTOP, 1, r"the process of rank 1 was stopped \(SIGSTOP\)"),
        (signal.SIGKILL, 0, "the engine's process ended by SIGKILL while it started"),
        (signal.SIGSTOP, 0, r"the engine's process was stopped \(SIGSTOP\), so that rank 1 waited for it"),
    ],
)
def test_a_rank_that_ends_or_stops_in_a_capture(signal_number: signal.Signals, of_rank: int, reason: str) -> None:
    processes: list[psutil.Process] = []
    began: list[float] = []

    def act(phase: str, done: int, total: int) -> None:
        if phase != "graphs" or not done or processes:
            return
        client = llm._client
        assert isinstance(client, ProcessClient) and done < total // 2
        engine = psutil.Process(client.pid)
        processes.extend([engine, *ranks_of(engine)])
        began.append(time.monotonic())
        processes[of_rank].send_signal(signal_number)

    sizes = {"max_num_seqs": 64, "cudagraph_capture_sizes": list(range(1, 65))}
    llm = AsyncLLM("demo", client=ProcessClient, progress=act, **{**SETTINGS, **sizes})
    with pytest.raises(PhonographError, match=reason):
        asyncio.run(llm.start())
    assert time.monotonic() - began[0] < SECONDS
    wait_until(lambda: not any(one.is_running() for one in processes))


@pytest.mark.parametrize(
    ("failures", "dead", "stopped", "reason"),
    [
        # What another rank noticed comes after the rank's own error, even if it was reported first.
        (
            {1: Failed("no answer", True), 2: Failed("OSError: disk", False)},
            [0, 1],
            [0, 0],
            "rank 2 failed: OSError: disk",
        ),
        ({1: Failed("no answer", True)}, [0, 1], [0, 0], "the process of rank 2 ended by SIGKILL"),
        ({}, [], [0, 3], "the process of rank 2 was stopped (SIGSTOP), so that the others waited for it"),
        ({1: Failed("no answer", True)}, [0], [0, 0], "no answer"),
    ],
)
def test_the_first_error_is_the_reason(
    failures: dict[int, Failed], dead: list[int], stopped: list[int], reason: str
) -> None:
    processes: Any = [SimpleNamespace(exitcode=1), SimpleNamespace(exitcode=-signal.SIGKILL)]
    assert rank_processes._cause(processes, failures, dead, stopped) == reason


def test_a_program_without_a_guard_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that imports the main file starts the engine again."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(
        ConfigError, match="processes that import the main file: guard it by `if __name__ == '__main__'"
    ):
        LLM("demo", **SETTINGS)
