"""End of an engine: `close`, `with`, memory and threads, and what a closed engine answers."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from phonograph import LLM, AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputs
from phonograph.engine.process import run_engine
from phonograph.errors import EngineUnavailable, RequestError, RequestFailure

SETTINGS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "cudagraph_capture_sizes": [1, 2]}
SHORT = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
CHOICE = SamplingParams(structured_outputs=StructuredOutputs(choice=["yes", "no"]), max_tokens=8)
ARGUMENTS: dict[str, Any] = {
    "prompts": "1 2 3",
    "prompt": "1 2 3",
    "messages": [{"role": "user", "content": "1 2 3"}],
    "params": BeamSearchParams(1, 1),
    "data_1": "1 2 3",
    "data_2": "1 2 3",
}


def parts(engine: Any) -> list[weakref.ref[Any]]:
    """Weak references to the core, the model, its embedding, the KV cache and the runtime of graphs."""
    runner = engine.core.runner
    model, caches = runner._program.model, runner._program.attention._kv_caches
    return [weakref.ref(one) for one in (engine.core, model, model.embedding_VE, caches[0], runner.runtime)]


def test_a_closed_engine_gives_its_memory_and_threads_back() -> None:
    threads = set(threading.enumerate())
    with LLM("demo", **SETTINGS) as llm:
        llm.generate(["1 2 3", "4 5 6"], CHOICE, use_tqdm=False)
        held, grammars = parts(llm.engine), llm.session.grammars
        assert all(one() is not None for one in held)
        assert set(threading.enumerate()) - threads, "the grammar was compiled in a thread"
        began = time.perf_counter()
    assert time.perf_counter() - began < 5
    assert [one() for one in held] == [None] * len(held)
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)
    assert not set(threading.enumerate()) - threads
    with pytest.raises(RuntimeError, match="shutdown"):
        grammars.warm()


def test_every_method_of_a_closed_engine_says_so() -> None:
    llm = LLM("demo", **SETTINGS)
    methods = [name for name, _ in inspect.getmembers(LLM, inspect.isfunction) if not name.startswith("_")]
    assert len(methods) > 5
    llm.close()
    llm.close()
    for name in methods:
        if name in ("close", "get_default_sampling_params"):
            continue
        needed = [
            parameter.name
            for parameter in inspect.signature(getattr(llm, name)).parameters.values()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        with pytest.raises(EngineUnavailable, match="this LLM is closed; make a new one"):
            found = getattr(llm, name)(**{one: ARGUMENTS[one] for one in needed})
            list(found)  # A stream begins when it is read.
    for name in ("engine", "session", "plan", "tokenizer", "step_counts"):
        with pytest.raises(EngineUnavailable, match="closed"):
            getattr(llm, name)
    with pytest.raises(EngineUnavailable, match="closed"), llm:
        pass


def test_an_open_stream_fails_when_its_engine_closes() -> None:
    llm = LLM("demo", **SETTINGS)
    stream = llm.stream("1 2 3", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    next(stream)
    held = parts(llm.engine)
    llm.close()
    assert [one() for one in held] == [None] * len(held), "an open stream holds no engine"
    with pytest.raises(RequestFailure, match="closed before the output was complete"):
        next(stream)
    left = LLM("demo", **SETTINGS)
    stream = left.stream("1 2 3", SHORT)
    next(stream)
    left.close()
    stream.close()


def test_an_engine_whose_last_step_fails_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("demo", **SETTINGS)
    stream = llm.stream("1 2 3", SHORT)
    next(stream)

    def fails() -> None:
        raise OSError("the device is gone")

    monkeypatch.setattr(llm.engine.core, "settle", fails)
    with pytest.raises(OSError, match="the device is gone"):
        llm.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        llm.generate("1 2 3", SHORT)
    with pytest.raises(RequestFailure, match="closed before"):
        next(stream)
    llm.close()


def test_close_inside_a_call_is_refused() -> None:
    with LLM("demo", **SETTINGS) as llm:
        with pytest.raises(RequestError, match="close='now': is called inside another call"):
            llm.verify(num_replays=1, progress=lambda done, total: llm.close())
        assert llm.generate("1 2 3", SHORT)[0].finished


def test_close_waits_for_the_call_of_another_thread() -> None:
    llm = LLM("demo", **SETTINGS)
    session, step, entered = llm.session, llm.session.step, threading.Event()

    def stepped() -> list[Any]:
        entered.set()
        return step()

    session.step = stepped
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(llm.generate("1 2 3", SHORT, use_tqdm=False)))
    thread.start()
    assert entered.wait(60)
    llm.close()
    thread.join(60)
    assert len(found[0].outputs[0].token_ids) == SHORT.max_tokens


def test_an_engine_on_a_thread_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Any]] = []
    start = run_engine.start_engine

    def started(*arguments: Any, **settings: Any) -> Any:
        engine = start(*arguments, **settings)
        held.extend(parts(engine))
        return engine

    monkeypatch.setattr(run_engine, "start_engine", started)
    threads = set(threading.enumerate())

    async def answer() -> None:
        async with AsyncLLM("demo", **SETTINGS) as llm:
            (*_, last) = [output async for output in llm.generate("1 2 3", CHOICE)]
            assert last.finished

    asyncio.run(answer())
    assert held and [one() for one in held] == [None] * len(held)
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)
    assert not set(threading.enumerate()) - threads


@pytest.mark.gpu
def test_a_closed_engine_gives_the_memory_of_the_gpu_back() -> None:
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":
        pytest.skip("the free memory of the GPU is compared, which other processes change: run it without -n")
    LLM("demo", **SETTINGS).close()  # libraries keep workspaces for the life of the process
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        with LLM("demo", **SETTINGS, kv_cache_memory_bytes=1 << 30) as llm:
            llm.generate("1 2 3", SHORT)
            assert torch.cuda.mem_get_info()[0] < free - (1 << 30)
            began = time.perf_counter()
        assert time.perf_counter() - began < 1
        gc.collect()
        assert torch.cuda.mem_get_info()[0] > free - (64 << 20)
