"""Ids, ends, held requests and text of the session, at their edges."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from sentencepiece_like import END, sentencepiece_like

from phonograph import LLM, SamplingParams, StructuredOutputs
from phonograph.engine.session import Session
from phonograph.errors import RequestError


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM(model="demo", max_model_len=256, max_num_seqs=4, enforce_eager=True, seed=0)


@pytest.fixture
def session(llm: LLM) -> Iterator[Session]:
    """Each test must leave it with nothing to do."""
    yield llm.session
    for _ in range(500):
        if not llm.session.has_unfinished:
            break
        llm.session.step()
    assert not llm.session.has_unfinished and not llm.session._samples
    assert llm.engine.core.scheduler.stats.blocks_used == 0


def run(session: Session) -> None:
    for _ in range(500):
        if not session.has_unfinished:
            return
        session.step()
    raise AssertionError("requests do not end")


FREE = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
RULED = SamplingParams(max_tokens=3, temperature=0, n=2, structured_outputs=StructuredOutputs(regex="[a-c]{3}"))


class Later:
    """Grammars that are compiled when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Future[Any]] = []

    def request(self, _: Any) -> Future[Any]:
        self.asked.append(Future())
        return self.asked[-1]

    def set_result(self, compiled: Any) -> None:
        for future in self.asked:
            if not future.cancelled():
                future.set_result(compiled)


@pytest.fixture
def grammar(session: Session, monkeypatch: pytest.MonkeyPatch) -> tuple[Later, Any]:
    """Return the grammars of a test's requests, with their later state."""
    compiled = session.grammars.request(RULED.structured_outputs).result()
    later = Later()
    monkeypatch.setattr(session.grammars, "request", later.request)
    return later, compiled


def test_the_id_of_a_request_that_waits_for_its_grammar_is_in_use(session: Session, grammar: Any) -> None:
    later, compiled = grammar
    held = session.add("x", RULED, request_id="a")
    with pytest.raises(RequestError, match="request_id='a': is in use"):
        session.add("x", FREE, request_id="a")
    later.set_result(compiled)
    run(session)
    assert [len(one.token_ids) for one in held.outputs] == [3, 3] and held.finished


def test_a_request_that_cannot_be_added_is_refused_before_its_grammar_is_there(session: Session, grammar: Any) -> None:
    with pytest.raises(RequestError, match="prompt length=256"):
        session.add([5] * 256, RULED)
    assert not session.has_unfinished


def test_abort_of_a_request_that_waits_for_its_grammar(session: Session, grammar: Any) -> None:
    later, compiled = grammar
    whole, half = session.add("x", RULED), session.add("x", RULED)
    session.abort(whole)
    assert [one.finish_reason for one in whole.outputs] == ["abort"] * 2
    session.abort(half, 0)
    assert [one.finish_reason for one in half.outputs] == ["abort", None] and session.has_unfinished
    later.set_result(compiled)
    run(session)
    assert [len(one.token_ids) for one in half.outputs] == [0, 3] and half.outputs[1].finish_reason is not None
    last = session.add("x", RULED)
    session.abort(last)
    assert not session.has_unfinished


def test_no_grammar_is_compiled_for_a_request_that_is_gone(session: Session, grammar: Any) -> None:
    later, _ = grammar
    held = session.add("x", RULED)
    session.abort(held, 0)
    assert not later.asked[0].cancelled()
    session.abort(held, 1)
    assert later.asked[0].cancelled()


def test_no_grammar_is_compiled_for_a_request_that_is_refused(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(session.grammars, "request", asked.append)
    with pytest.raises(RequestError, match="prompt length=256"):
        session.add([5] * 256, RULED)
    assert asked == []


def test_a_refused_request_keeps_no_frames(session: Session, grammar: Any) -> None:
    later, _ = grammar
    held = session.add("x", RULED)
    later.asked[0].set_exception(RequestError("regex", "a(", "is none"))
    run(session)
    assert isinstance(held.error, RequestError) and held.error.__traceback__ is None


def test_abort_of_all_waiting_requests_leaves_no_work(session: Session, grammar: Any) -> None:
    session.abort(session.add("x", RULED))
    assert not session.has_unfinished


def test_the_id_of_a_request_whose_grammar_failed_is_free(session: Session, grammar: Any) -> None:
    later, _ = grammar
    bad = session.add("x", RULED, request_id="a")
    later.asked[0].set_exception(RequestError("structured_outputs", "x", "is none"))
    run(session)
    assert bad.error is not None and bad.outputs == []
    good = session.add("x", FREE, request_id="a")
    run(session)
    assert len(good.outputs[0].token_ids) == 4


def test_abort_of_one_that_ended_spares_another_of_its_id(session: Session) -> None:
    old = session.add("x", FREE, request_id="a")
    run(session)
    again = session.add("x", FREE, request_id="a")
    session.abort(old)
    run(session)
    assert again.outputs[0].finish_reason == "length" == old.outputs[0].finish_reason


def test_all_samples_are_queued_or_none(session: Session) -> None:
    other = session.add("x", FREE, request_id="a-1")
    with pytest.raises(RequestError, match="in use"):
        session.add("x", SamplingParams(n=2, max_tokens=4), request_id="a")
    again = session.add("x", FREE, request_id="a")
    run(session)
    assert other.outputs[0].finish_reason == again.outputs[0].finish_reason == "length"


def test_samples_that_were_queued_leave_with_one_that_is_refused(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = session.core.scheduler
    add = scheduler.add

    def refusing(request: Any) -> None:
        if request.request_id.endswith("-2"):
            raise RequestError("n", 3, "is too many for a test")
        add(request)

    monkeypatch.setattr(scheduler, "add", refusing)
    with pytest.raises(RequestError, match="too many for a test"):
        session.add("x", SamplingParams(n=3, max_tokens=4), request_id="a")
    assert not scheduler.has_unfinished
    monkeypatch.undo()
    again = session.add("x", SamplingParams(n=3, max_tokens=1), request_id="a")
    run(session)
    assert [len(one.token_ids) for one in again.outputs] == [1] * 3


def test_samples_of_many_requests_have_ids_of_their_own(session: Session) -> None:
    outputs = [session.add("x", SamplingParams(n=2, max_tokens=1), request_id=f"r{place}") for place in range(12)]
    run(session)
    assert all(one.finish_reason for output in outputs for one in output.outputs)


def test_text_that_might_have_become_a_stop_string_is_shown_at_the_end(session: Session) -> None:
    plain = session.add("Tom has", FREE)
    run(session)
    text = plain.outputs[0].text
    stop = [text[-3:] + "\x01"]
    ended = session.add("Tom has", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, stop=stop))
    run(session)
    assert ended.outputs[0].text == text
    aborted = session.add("Tom has", SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, stop=stop))
    while len(aborted.outputs[0].token_ids) < 4:
        session.step()
    shown = aborted.outputs[0].text
    session.abort(aborted)
    assert text.startswith(shown) and shown != text and aborted.outputs[0].text.startswith(text)


def test_a_stop_string_in_the_last_token_is_the_reason(session: Session) -> None:
    plain = session.add("Tom has", FREE)
    run(session)
    text = plain.outputs[0].text
    ended = session.add("Tom has", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, stop=[text[-2:]]))
    early = session.add("Tom has", SamplingParams(max_tokens=99, temperature=0, ignore_eos=True, stop=[text[-2:]]))
    run(session)
    for output in (ended, early):
        (completion,) = output.outputs
        assert (completion.finish_reason, completion.stop_reason) == ("stop", text[-2:])
        assert len(completion.token_ids) == 4 and completion.text == text[:-2]


def test_prompt_logprobs_with_a_single_token(session: Session) -> None:
    one = session.add([5, 6, 7], SamplingParams(max_tokens=1, prompt_logprobs=0))
    single = session.add([5], SamplingParams(max_tokens=2, prompt_logprobs=0))
    run(session)
    assert one.prompt_logprobs is not None and len(one.prompt_logprobs) == 3 and one.prompt_logprobs[0] is None
    assert single.prompt_logprobs == [None]
    assert one.outputs[0].logprobs is None


def test_cached_tokens_are_those_of_the_sample_that_found_most(session: Session) -> None:
    prompt = list(range(50, 90))
    output = session.add(prompt, SamplingParams(max_tokens=2, n=2, ignore_eos=True))
    run(session)
    assert output.num_cached_tokens == 32


@pytest.mark.parametrize("early", [0, 1])
def test_cached_tokens_do_not_depend_on_the_sample_that_ends_last(session: Session, early: int) -> None:
    """The first sample computes the prompt, and the second finds it."""
    prompt = list(range(90 + early, 130 + early))
    output = session.add(prompt, SamplingParams(max_tokens=6, n=2, ignore_eos=True))
    for _ in range(3):
        session.step()
    session.abort(output, early)
    run(session)
    assert {one.finish_reason for one in output.outputs} == {"abort", "length"}
    assert output.num_cached_tokens == 32


def test_vocabulary_is_checked(session: Session) -> None:
    with pytest.raises(RequestError, match="stop_token_ids=999999"):
        session.add("x", SamplingParams(stop_token_ids=[999999]))


def test_priority_reaches_the_scheduler() -> None:
    llm = LLM(model="demo", max_model_len=64, max_num_seqs=1, enforce_eager=True, scheduling_policy="priority")
    late = llm.session.add("x", SamplingParams(max_tokens=1), priority=5)
    soon = llm.session.add("y", SamplingParams(max_tokens=1), priority=-5)
    ended: list[str] = []
    while llm.session.has_unfinished:
        ended += [output.request_id for output in llm.session.step() if output.finished]
    assert ended == [soon.request_id, late.request_id]


@pytest.mark.parametrize("priority", [None, "1", 1.0, float("nan"), True])
def test_a_priority_that_is_no_integer_is_refused_and_leaves_nothing(session: Session, priority: Any) -> None:
    first = session.add("x", FREE)
    for params in (FREE, SamplingParams(n=2, max_tokens=4)):
        with pytest.raises(RequestError, match="priority=.*must be an integer"):
            session.add("y", params, priority=priority)
    assert session.core.scheduler.stats.num_waiting == 1
    run(session)
    assert first.finished


def test_of_several_prompts_only_the_one_of_a_wrong_priority_is_refused() -> None:
    llm = LLM(model="demo", max_model_len=64, max_num_seqs=1, enforce_eager=True, scheduling_policy="priority")
    ranks: Any = [2, None, 1]
    outputs = llm.generate(["x", "y", "z"], FREE, priority=ranks)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert len(llm.generate(["x", "y"], FREE)) == 2


def test_text_goes_on_where_the_prompt_ended(llm: LLM) -> None:
    tokenizer = sentencepiece_like()
    session = Session(llm.engine.core, llm.engine.plan.model, tokenizer, 0, llm.session.grammars)
    (token_id,) = tokenizer.encode("a")
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logit_bias={token_id: 1e4})
    after_text = session.add("To", params)
    after_special = session.add("To" + END, params)
    while session.has_unfinished:
        session.step()
    assert (after_text.outputs[0].text, after_special.outputs[0].text) == (" a a", "a a")


@pytest.mark.parametrize("stop", [[], ["zz"], ["\ufffd" * 9]])
def test_bytes_that_are_no_character_are_text_at_the_end_of_an_output(llm: LLM, stop: list[str]) -> None:
    """The demo model with a tokenizer of byte fallback, and a prompt that ends in half a character."""
    tokenizer = sentencepiece_like()
    session = Session(llm.engine.core, llm.engine.plan.model, tokenizer, 0, llm.session.grammars)
    settings: Any = {"max_tokens": 9, "temperature": 0, "ignore_eos": True, "stop": stop}
    half = [*tokenizer.encode("To"), 0xF0]
    outputs = [
        session.add(half, SamplingParams(logit_bias={token_id: 1e4}, **settings))
        for token_id in (0xF0, 0x80, tokenizer.encode("a")[0])
    ]
    run(session)
    texts = [output.outputs[0].text for output in outputs]
    ended = [output.outputs[0].stop_reason for output in outputs]
    assert texts == ["" if len(stop) and stop[0][0] == "\ufffd" else "\ufffd" * 9] * 2 + [" a" * 9]
    assert ended == [stop[0] if text == "" else None for text in texts]


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_sample_of_a_request_that_waits_for_its_grammar_keeps_its_id(
    session: Session, grammar: Any, compiled_first: bool
) -> None:
    later, compiled = grammar
    one = SamplingParams(max_tokens=3, structured_outputs=RULED.structured_outputs)
    held = session.add("x", one, request_id="a-1")
    try:
        other = session.add("x", SamplingParams(max_tokens=4, n=2, ignore_eos=True), request_id="a")
    except RequestError:
        other = None  # that would be fine
    if not compiled_first and other is not None:
        for _ in range(20):
            session.step()
    later.set_result(compiled)
    run(session)
    assert held.error is None and all(sample.finish_reason for sample in held.outputs)
    assert other is None or all(sample.finish_reason for sample in other.outputs)


def test_a_stream_yields_outputs_of_steps_that_others_ran(llm: LLM) -> None:
    alone = [list(output.outputs[0].token_ids) for output in llm.stream("x", FREE)][-1]
    stream = llm.stream("x", FREE)
    next(stream)
    llm.generate("y", FREE)
    rest = list(stream)
    assert rest and rest[-1].finished and list(rest[-1].outputs[0].token_ids) == alone


def test_streams_side_by_side_both_end(llm: LLM) -> None:
    first, second = llm.stream("x", FREE), llm.stream("y", FREE)
    next(first), next(second)
    assert [list(one)[-1].finished for one in (first, second)] == [True, True]
