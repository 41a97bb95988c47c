"""Several engines in processes behind one `AsyncLLM`: same tokens, shared prefixes, a kill, verbs, metrics."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import EngineThread, Server, serving

from phonograph import LLM
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.async_llm import AsyncLLM
from phonograph.engine.process.process_client import ProcessClient
from phonograph.engine.startup.early_start import select_devices
from phonograph.errors import ConfigError, EngineUnavailable

pytestmark = pytest.mark.long
LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)


@pytest.fixture(scope="module")
def thread() -> Iterator[EngineThread]:
    with EngineThread(data_parallel_size=2, device="cpu", enforce_eager=True, cudagraph_capture_sizes=None) as thread:
        yield thread


@pytest.fixture(scope="module")
def server(thread: EngineThread) -> Iterator[Server]:
    with serving(thread, ServerConfig()) as server:
        yield server


def call(thread: EngineThread, work: Coroutine[Any, Any, Any]) -> Any:
    return thread.submit(work).result(60)


def pids(engine: AsyncLLM) -> list[int]:
    assert engine.engines is not None
    clients = [member.client for member in engine.engines.members]
    return [client.pid for client in clients if isinstance(client, ProcessClient) and client.pid is not None]


def complete(server: Server, prompt: Any, max_tokens: int = 8, temperature: float = 0) -> list[str]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": temperature}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def metric(server: Server, name: str) -> dict[tuple[str, ...], float]:
    """Values of a metric by engine and reason."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name:
                labels = tuple(sample.labels[label] for label in ("engine", "reason") if label in sample.labels)
                found[labels] = found.get(labels, 0) + sample.value
    return found


def test_a_call_of_many_prompts_is_shared_out_with_the_tokens_of_one_engine(server: Server) -> None:
    prompts = [f"{number} apples and {number} pears are" for number in range(6)]
    texts = complete(server, prompts)
    assert texts == [complete(server, prompt)[0] for prompt in prompts]
    routed = metric(server, "phonograph:routed_prompts_total")
    assert {engine for engine, _ in routed} == {"0", "1"} and sum(routed.values()) == 12
    steps = metric(server, "phonograph:steps_total")
    assert {engine for engine, _ in steps} == {"0", "1"}
    assert metric(server, "phonograph:engine_up") == {("0",): 1, ("1",): 1}
    shown = server.get("/v1/graphs").json()
    assert [one["engine"] for one in shown["engines"]] == [0, 1] and shown["engine"]["max_num_seqs"] == 8
    assert {one["engine"] for one in shown["decisions"]} == {0, 1}
    assert shown["engine"]["kv_blocks"] == sum(one["kv_blocks"] for one in shown["engines"])


def test_engines_draw_other_samples_for_equal_prompts(server: Server) -> None:
    before = metric(server, "phonograph:routed_prompts_total")
    texts = complete(server, ["A song"] * 8, max_tokens=12, temperature=1.5)
    after = metric(server, "phonograph:routed_prompts_total")
    assert {engine for (engine, reason), value in after.items() if value > before.get((engine, reason), 0)} == {
        "0",
        "1",
    }
    assert len(set(texts)) == 8


def test_turns_of_a_conversation_meet_their_prefix(server: Server) -> None:
    server.wait_until_idle()
    before = metric(server, "vllm:prefix_cache_hits_total")
    for turn in range(1, 4):
        complete(server, "Tom counts apples. " * 12 * turn)
    after = metric(server, "vllm:prefix_cache_hits_total")
    assert sum(after[key] > before[key] for key in after) == 1, "one engine has the conversation"


def test_verbs_reach_all_engines(server: Server, thread: EngineThread) -> None:
    complete(server, ["A long enough prompt for a block of sixteen tokens, and some more of them."] * 2)
    pool = thread.engine.result().engines
    assert pool is not None and any(one.blocks for one in pool.router._engines.values())
    call(thread, thread.engine.result().reset_prefix_cache())
    server.wait_until(lambda engine: not any(one.blocks for one in pool.router._engines.values()))
    call(thread, thread.engine.result().pause_generation(mode="keep"))
    call(thread, thread.engine.result().resume_generation())


def test_a_killed_engine_loses_its_own_streams_and_comes_back(server: Server, thread: EngineThread) -> None:
    engine = thread.engine.result()
    first = pids(engine)

    async def one(number: int) -> str:
        try:
            async for output in engine.generate([number] * 20, LONG):
                if output.finished:
                    return "whole"
        except EngineUnavailable as error:
            return str(error)
        return "cut"

    async def under_load() -> list[str]:
        tasks = [asyncio.create_task(one(number)) for number in range(5, 11)]
        while engine.engines is None or any(not one.num_open for one in engine.engines.router._engines.values()):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        os.kill(first[1], signal.SIGKILL)
        return await asyncio.gather(*tasks)

    ends = call(thread, under_load())
    lost = [end for end in ends if end != "whole"]
    assert len(lost) == 3 and set(lost) == {"engine 1: the engine's process ended by SIGKILL"}
    assert server.get("/health").status_code == 200
    assert complete(server, "One engine serves")
    assert engine.engines is not None
    until = time.monotonic() + 60
    while not all(member.up for member in engine.engines.members):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert pids(engine)[0] == first[0] and pids(engine)[1] != first[1]
    assert len(complete(server, ["a", "b", "c", "d"])) == 4
    assert metric(server, "phonograph:engine_restarts_total") == {("0",): 0, ("1",): 1}
    assert metric(server, "phonograph:engine_up") == {("0",): 1, ("1",): 1}


def test_one_thread_and_an_llm_are_one_engine() -> None:
    with pytest.raises(ConfigError, match="a thread runs one engine; AsyncLLM takes client=start_processes"):
        asyncio.run(AsyncLLM("demo", data_parallel_size=2).start())
    with pytest.raises(ConfigError, match="an LLM is one engine, phonograph serve runs several"):
        LLM("demo", data_parallel_size=2)
    with pytest.raises(ConfigError, match="data_parallel_size=0: must be a whole number >= 1 and <= 64"):
        EngineConfig(model="demo", data_parallel_size=0)


def test_each_engine_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    select_devices(1, 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,GPU-7"
    with pytest.raises(ConfigError, match="found 2 GPUs in CUDA_VISIBLE_DEVICES=5,GPU-7; 2 works"):
        select_devices(0, 3)
    select_devices(1, 2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    select_devices(1, 2, 2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(ConfigError, match="needs 2 GPUs for each engine, found 3 GPUs in .*; 1 works"):
        select_devices(0, 2, 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ConfigError, match="data_parallel_size=4: needs 1 GPU for each engine, found 2 GPUs here"):
        select_devices(0, 4, devices=tmp_path)
    select_devices(0, 2, devices=tmp_path)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    select_devices(0, 2, devices=tmp_path / "none")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
