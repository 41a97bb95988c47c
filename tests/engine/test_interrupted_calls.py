"""Calls of the offline API that end early leave no request behind, and the next call is answered as by a new engine."""

from __future__ import annotations

import gc
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from phonograph import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SLOTS = 2


class Broken(Exception):
    """An error that no part of the engine raises."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", device="cpu", max_model_len=64, max_num_seqs=SLOTS, enforce_eager=True, seed=0)


def random_prompts(count: int) -> list[list[int]]:
    rng = random.Random()
    return [[rng.randrange(5, 200) for _ in range(rng.randint(2, 30))] for _ in range(count)]


def on_call(number: int, act: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with `act` before one of its calls."""
    calls = 0

    def run(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return method(*arguments, **keywords)

    return run


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise Broken


def check_unused(llm: LLM) -> None:
    assert not llm.session.has_unfinished and not llm.session._samples
    assert llm.engine.core.scheduler.stats.blocks_used == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


PLACES = {
    "tokenizer": lambda llm: (llm.session, "add", 4),
    "step": lambda llm: (llm.engine.core.runner, "submit", 6),
    "between steps": lambda llm: (llm.session, "step", 6),
}


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_ends_the_call_and_not_the_engine(llm: LLM, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(6)
    expected = [one.outputs[0].token_ids for one in llm.generate(prompts, PARAMS)]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        owner, name, number = PLACES[place](llm)
        patch.setattr(owner, name, on_call(number, interrupt, getattr(owner, name)))
        llm.generate(prompts, PARAMS)
    check_unused(llm)
    again = llm.generate(prompts[::-1], PARAMS)
    assert [one.outputs[0].token_ids for one in again] == expected[::-1]
    check_unused(llm)


@pytest.mark.parametrize("place", ["tokenizer", "between steps"])
def test_an_error_ends_the_call_and_not_the_engine(llm: LLM, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(6)
    expected = [one.outputs[0].token_ids for one in llm.generate(prompts, PARAMS)]
    with monkeypatch.context() as patch, pytest.raises(Broken):
        owner, name, number = PLACES[place](llm)
        patch.setattr(owner, name, on_call(number, fail, getattr(owner, name)))
        # Nor does an abort that fails keep the others from theirs.
        patch.setattr(llm.session, "abort", on_call(1, fail, llm.session.abort))
        llm.generate([*prompts, prompts[0]], PARAMS)
    (left,) = llm.session._samples.values()  # the one whose abort failed
    llm.session.abort(left.parent)
    check_unused(llm)
    steps = llm.step_counts.total()
    again = llm.generate(prompts[:1], PARAMS)
    assert again[0].outputs[0].token_ids == expected[0]
    assert llm.step_counts.total() - steps == PARAMS.max_tokens, "another prompt ran on"
    check_unused(llm)


def test_a_second_ctrl_c_interrupts_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    after: list[str] = []

    def press_twice() -> None:
        interrupt()
        interrupt()
        after.append("reached")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.session, "step", on_call(3, press_twice, llm.session.step))
        llm.generate(random_prompts(3), PARAMS)
    assert not after
    check_unused(llm)


def test_ctrl_c_in_a_step_of_a_stream_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = random_prompts(1)
    expected = llm.generate(prompt, PARAMS)[0].outputs[0].token_ids
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine.core.runner, "submit", on_call(4, interrupt, llm.engine.core.runner.submit))
        list(llm.stream(prompt, PARAMS))
    check_unused(llm)
    assert [one.outputs[0].token_ids for one in llm.stream(prompt, PARAMS)][-1] == expected


def test_a_program_that_handles_ctrl_c_itself_is_left_to_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(llm.session, "step", on_call(3, interrupt, llm.session.step))
            outputs = llm.generate(random_prompts(3), PARAMS)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT] and all(len(one.outputs[0].token_ids) == PARAMS.max_tokens for one in outputs)


def test_a_call_of_many_inputs_leaves_old_objects_out_of_collections(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that fails; what the program has frozen stays frozen."""
    frozen, step = list[bool](), llm.session.step
    monkeypatch.setattr(llm.session, "step", lambda: (frozen.append(gc.get_freeze_count() > 0), step())[1])
    gc.unfreeze()
    for count in (63, 64):
        frozen.clear()
        llm.generate(random_prompts(count), SamplingParams(max_tokens=1), use_tqdm=False)
        assert set(frozen) == {count == 64} and not gc.get_freeze_count()
    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(llm.session, "step", on_call(3, fail, llm.session.step))
        llm.generate(random_prompts(64), PARAMS, use_tqdm=False)
    assert not gc.get_freeze_count()
    check_unused(llm)
    gc.freeze()
    try:
        llm.generate(random_prompts(64), SamplingParams(max_tokens=1), use_tqdm=False)
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
