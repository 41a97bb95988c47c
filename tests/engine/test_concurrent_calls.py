"""Calls of one LLM from several threads, inside each other and beside open streams: each is answered as alone."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from phonograph import LLM, SamplingParams
from phonograph.errors import ConfigError, RequestError

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
CONVERSATION = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def shared() -> LLM:
    return LLM("demo", device="cpu", max_model_len=64, max_num_seqs=2, enforce_eager=True, seed=0)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """Each test leaves an engine without requests that answers the next call."""
    yield shared
    assert not shared.session.has_unfinished and not shared.session._samples
    assert shared.engine.core.scheduler.stats.blocks_used == 0
    assert len(tokens_of(shared, [5, 6, 7])) == PARAMS.max_tokens


def tokens_of(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def random_prompts(count: int) -> list[list[int]]:
    rng = random.Random()
    return [[rng.randrange(5, 200) for _ in range(rng.randint(2, 30))] for _ in range(count)]


def on_threads(*works: Callable[[], Any]) -> list[Any]:
    """Run works at the same time, each on a thread of its own."""
    together = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        together.wait(30)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(60) for future in [pool.submit(run, work) for work in works]]


def test_threads_generate_at_the_same_time(llm: LLM) -> None:
    prompts = random_prompts(12)
    expected = [tokens_of(llm, prompt) for prompt in prompts]

    def generate(part: int) -> list[list[int]]:
        return [one.outputs[0].token_ids for one in llm.generate(prompts[part::4], PARAMS)]

    for _ in range(3):
        found = on_threads(*(lambda part=part: generate(part) for part in range(4)))
        assert [found[place % 4][place // 4] for place in range(12)] == expected


def test_each_method_may_run_beside_the_others(llm: LLM) -> None:
    prompts = random_prompts(3)
    expected = [tokens_of(llm, prompt) for prompt in prompts]
    (chat,) = llm.chat(CONVERSATION, PARAMS)

    def stream(prompt: list[int]) -> list[int]:
        *_, last = llm.stream(prompt, PARAMS)
        return last.outputs[0].token_ids

    def verify() -> str:
        try:
            llm.verify(num_replays=1)
        except Exception as error:
            return str(error)
        return ""

    for _ in range(3):
        found = on_threads(
            lambda: tokens_of(llm, prompts[0]),
            lambda: stream(prompts[1]),
            lambda: stream(prompts[2]),
            lambda: llm.chat(CONVERSATION, PARAMS)[0].outputs[0].token_ids,
            verify,
        )
        assert found[:4] == [*expected, chat.outputs[0].token_ids]
        assert "requests in flight" in found[4] or "no graph" in found[4] or "cudagraph_mode" in found[4], found[4]


def test_calls_in_the_loop_of_a_stream(llm: LLM) -> None:
    first, second = random_prompts(2)
    expected = tokens_of(llm, first), tokens_of(llm, second)
    lengths: list[int] = []
    for output in llm.stream(first, PARAMS):
        lengths.append(len(output.outputs[0].token_ids))
        if len(lengths) == 2:
            assert tokens_of(llm, second) == expected[1]
            assert [one.outputs[0].token_ids for one in llm.stream(second, PARAMS)][-1] == expected[1]
    assert output.outputs[0].token_ids == expected[0]
    assert lengths[0] == 1 and lengths[-1] == PARAMS.max_tokens


@pytest.mark.parametrize("method", ["generate", "chat", "stream", "verify"])
def test_a_call_inside_a_call_is_refused_by_name(llm: LLM, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can neither run in the middle of a step nor wait for the call that waits for it."""
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: llm.generate([5, 6], PARAMS),
        "chat": lambda: llm.chat(CONVERSATION, PARAMS),
        "stream": lambda: next(llm.stream([5, 6], PARAMS)),
        "verify": lambda: llm.verify(num_replays=1),
    }
    seen: list[str] = []
    step = llm.session.step

    def stepped() -> Any:
        if not seen:
            with pytest.raises(RequestError) as error:
                calls[method]()
            seen.append(str(error.value))
        return step()

    monkeypatch.setattr(llm.session, "step", stepped)
    assert len(tokens_of(llm, [5, 6, 7])) == PARAMS.max_tokens
    assert method in seen[0] and "inside another call of this LLM on the same thread" in seen[0]


def test_the_progress_of_verify_may_not_generate() -> None:
    llm = LLM("demo", device="cpu", max_model_len=64, max_num_seqs=2, num_kv_blocks=16, max_cudagraph_capture_size=2)
    with pytest.raises(RequestError, match="inside another call"):
        llm.verify(num_replays=1, progress=lambda done, total: tokens_of(llm, [5, 6]) and None)
    assert llm.verify(num_replays=1).ok and len(tokens_of(llm, [5, 6])) == PARAMS.max_tokens


def test_a_verification_that_fails_leaves_no_wrong_prefix(llm: LLM) -> None:
    """It overwrites cached blocks before it fails, here because the mode has no graph."""
    prompt = [*range(5, 35)]
    expected = tokens_of(llm, prompt)
    with pytest.raises(ConfigError):
        llm.verify(num_replays=1)
    assert tokens_of(llm, prompt) == expected


def test_a_stream_that_is_collected_in_a_step_ends_after_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may close a generator anywhere, also on the thread that is inside a step."""
    step, seen = llm.session.step, list[int]()
    abandoned: list[Any] = [llm.stream([8, 9, 10], PARAMS)]
    next(abandoned[0])

    def stepped() -> Any:
        if abandoned:
            abandoned.clear()
            gc.collect()
            seen.append(len(llm.session._samples))
        return step()

    monkeypatch.setattr(llm.session, "step", stepped)
    assert len(tokens_of(llm, [5, 6, 7])) == PARAMS.max_tokens
    assert seen == [2], "it is not aborted in the middle of the call"


def test_a_stream_closed_by_another_thread_ends(llm: LLM) -> None:
    stream: Any = llm.stream([8, 9, 10], PARAMS)
    next(stream)
    closer = threading.Thread(target=stream.close)
    closer.start()
    closer.join(30)
    assert not llm.session.has_unfinished


def test_a_call_that_fails_lets_the_next_thread_go_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, entered, leave = llm.session.step, threading.Event(), threading.Event()

    def fails() -> Any:
        monkeypatch.setattr(llm.session, "step", step)
        entered.set()
        assert leave.wait(30)
        raise ValueError("a step that fails")

    monkeypatch.setattr(llm.session, "step", fails)
    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(tokens_of, llm, [5, 6])
        assert entered.wait(30)
        waiting = pool.submit(tokens_of, llm, [5, 6, 7])
        leave.set()
        with pytest.raises(ValueError, match="a step that fails"):
            failing.result(30)
        assert len(waiting.result(30)) == PARAMS.max_tokens
