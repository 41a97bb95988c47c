"""The loop of the engine's process, driven turn by turn: aborts give blocks back at once, nothing is reported twice."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from invariants import check_scheduler

from phonograph.config.engine_config import EngineConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.engine.build import Engine
from phonograph.engine.process import core_loop
from phonograph.engine.process.core_loop import CoreLoop
from phonograph.engine.process.messages import Abort, Add, Command, Message, Report, Stop
from phonograph.engine.session import Session
from phonograph.engine.startup.start import start_engine
from phonograph.errors import RequestFailure
from phonograph.structured.compiler import GrammarCompiler

LONG = SamplingParams(max_tokens=50, ignore_eos=True, detokenize=False)


class Driven:
    """A loop with its commands in a list and its reports in another."""

    def __init__(self, engine: Engine) -> None:
        self.scheduler = engine.core.scheduler
        self.commands: deque[Command] = deque()
        self.reports: list[Report] = []
        model = engine.plan.model
        session = Session(engine.core, model, None, 0, GrammarCompiler(lambda: None, tuple(model.eos_token_ids)))
        self.loop = CoreLoop(session, self)

    def receive(self, *, wait: bool) -> Command | None:
        assert self.commands or not wait, "it waits although there is nothing to come"
        return self.commands.popleft() if self.commands else None

    def send(self, message: Message) -> None:
        assert isinstance(message, Report)
        self.reports.append(message)

    def turn(self, *commands: Command) -> list[Report]:
        self.commands += commands
        before = len(self.reports)
        assert self.loop.turn()
        return self.reports[before:]

    def tokens(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for report in self.reports:
            for key, index, token_ids, *_ in report.updates:
                found.setdefault((key, index), []).extend(token_ids)
        return found


@pytest.fixture(scope="module")
def engine() -> Engine:
    return start_engine(EngineConfig(model="demo", enforce_eager=True, max_num_seqs=4, max_model_len=256))


@pytest.fixture
def driven(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    # A busy machine may take longer over a turn's commands than the loop allows them.
    monkeypatch.setattr(core_loop, "COMMAND_SECONDS", 60.0)
    driven = Driven(engine)
    yield driven
    check_scheduler(driven.scheduler)
    assert driven.scheduler.stats.blocks_used == 0 and not driven.scheduler.has_unfinished


def add(key: int, *prompts: list[int], params: SamplingParams = LONG, **more: Any) -> Add:
    return Add({key + place: prompt for place, prompt in enumerate(prompts)}, params, more.get("priority", 0))


def test_each_token_is_reported_once_and_the_end_too(driven: Driven) -> None:
    params = SamplingParams(max_tokens=5, n=2, ignore_eos=True, detokenize=False, logprobs=1, prompt_logprobs=0)
    driven.turn(add(1, [5, 6, 7], [8, 9], params=params))
    while driven.scheduler.has_unfinished:
        driven.turn()
    assert {sample: len(found) for sample, found in driven.tokens().items()} == {
        (1, 0): 5,
        (1, 1): 5,
        (2, 0): 5,
        (2, 1): 5,
    }
    updates = [update for report in driven.reports for update in report.updates]
    assert all(logprobs is not None and len(logprobs) == len(ids) for _, _, ids, logprobs, _, _ in updates)
    assert [reason for _, _, _, _, reason, _ in updates if reason] == ["length"] * 4
    prompts = {key: facts for report in driven.reports for key, facts in report.prompts.items()}
    assert sum(len(report.prompts) for report in driven.reports) == 2
    assert [len(prompts[key].prompt_logprobs or ()) for key in (1, 2)] == [3, 2]
    assert [report.num_steps for report in driven.reports] == list(range(1, 6))


def test_many_prompts_of_one_call_are_queued_between_steps(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running request gets a token between them, whatever their number. An abort ends those that wait too."""
    driven.turn(add(1, [5, 6, 7]))
    monkeypatch.setattr(core_loop, "COMMAND_SECONDS", 0.0)
    queued = [driven.scheduler.stats.num_running + driven.scheduler.num_waiting]
    driven.turn(add(10, *[[5, 6]] * 6, params=SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)))
    for _ in range(3):
        before = len(driven.tokens()[1, 0])
        driven.turn()
        assert len(driven.tokens()[1, 0]) == before + 1
        queued.append(driven.scheduler.stats.num_running + driven.scheduler.num_waiting)
    assert queued == [1, 3, 4, 5], "one prompt in each turn"
    # A later call waits its turn, and what is aborted is never queued.
    for command in (add(20, [8]), Abort(14), Abort(15), Abort(20)):
        driven.turn(command)
    assert driven.scheduler.stats.num_running + driven.scheduler.num_waiting == 5 + (14 in driven.loop._by_key)
    for key in (1, *range(10, 16)):
        driven.turn(Abort(key))
    assert not driven.loop._adding and not driven.loop._by_key
    assert {key for key, _ in driven.tokens()} <= {1, 10, 11, 12, 13, 14}


def test_a_prompt_that_is_refused_late_ends_its_call(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_loop, "COMMAND_SECONDS", 0.0)
    (first,) = driven.turn(add(1, [5, 6], [10**6], [7]))
    assert not first.refused
    (second,) = driven.turn()
    assert set(second.refused) == {2} and not driven.loop._by_key
    driven.turn(add(5, [5], params=SamplingParams(max_tokens=1)))
    assert (5, 0) in driven.tokens() and (3, 0) not in driven.tokens()


def test_an_abort_gives_the_blocks_back_before_the_next_step(driven: Driven) -> None:
    driven.turn(add(1, [5] * 100), add(2, [6] * 40))
    for _ in range(3):
        driven.turn()
    held = driven.scheduler.stats.blocks_used
    (report,) = driven.turn(Abort(1))
    assert report.stats.blocks_used <= held - 6 and report.stats.num_running == 1
    assert {key for key, *_ in report.updates} == {2}
    # The last one aborted: no step follows, and the report says so all the same.
    (report,) = driven.turn(Abort(2))
    assert report.stats.blocks_used == 0 and report.updates == []
    assert driven.turn(Abort(1), Abort(2), Abort(99)) != []


def test_one_sample_of_several_can_be_ended(driven: Driven) -> None:
    params = SamplingParams(max_tokens=6, n=3, ignore_eos=True, detokenize=False)
    driven.turn(add(7, [5, 6], params=params))
    driven.turn(Abort(7, 1))
    while driven.scheduler.has_unfinished:
        driven.turn()
    assert [len(driven.tokens()[7, index]) for index in range(3)] == [6, 1, 6]
    assert driven.reports[-1].stats.num_running == 0


def test_one_bad_prompt_refuses_its_call_and_no_other(driven: Driven) -> None:
    (report,) = driven.turn(add(1, [5]), add(2, [6], [5000], [7]), add(5, [8]))
    assert list(report.refused) == [3] and report.refused[3].parameter == "prompt"
    assert {key for key, *_ in report.updates} == {1, 5} and report.stats.num_running == 2
    driven.turn(Abort(1), Abort(5))


def test_one_prompt_whose_report_or_adding_raises_fails_alone(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, add_request = core_loop.PromptFacts, Session.add

    def broken_facts(num_cached_tokens: int, prompt_logprobs: Any, *rest: Any) -> Any:
        return facts(num_cached_tokens, prompt_logprobs, *rest) if prompt_logprobs is None else 1 / 0

    def broken_add(self: Session, prompt: Any, *rest: Any, **more: Any) -> Any:
        return add_request(self, prompt, *rest, **more) if prompt != [666] else 1 / 0

    monkeypatch.setattr(core_loop, "PromptFacts", broken_facts)
    monkeypatch.setattr(Session, "add", broken_add)
    scored = SamplingParams(max_tokens=9, ignore_eos=True, prompt_logprobs=0, n=2)
    (report,) = driven.turn(add(1, [5]), add(2, [6, 7], params=scored), add(3, [8], [666]), add(5, [9]))
    assert {type(error) for error in report.refused.values()} == {RequestFailure} and list(report.refused) == [4, 2]
    assert all("ZeroDivisionError" in str(error) for error in report.refused.values())
    assert {key for key, *_ in report.updates} == {1, 5} and driven.scheduler.stats.num_running == 2
    assert pickle.loads(pickle.dumps(report)).refused[2].part == "engine"
    driven.turn(Abort(1), Abort(5))


def test_requests_keep_coming_while_others_run(driven: Driven) -> None:
    for key in range(6):
        driven.turn(add(key, [5 + key]))
    assert driven.scheduler.stats.num_running == 4 and driven.scheduler.stats.num_waiting == 2
    assert len(driven.tokens()[0, 0]) == 6
    driven.turn(*(Abort(key) for key in range(6)))


def test_a_flood_of_commands_does_not_hold_up_those_that_run(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_loop, "COMMAND_SECONDS", 0.0)
    for turn in range(3):
        driven.turn(*(add(3 * turn + place, [5]) for place in range(3)))
        assert len(driven.tokens()[0, 0]) == turn + 1 and len(driven.commands) == 2 * (turn + 1)
    while driven.commands:
        driven.turn()
    monkeypatch.setattr(core_loop, "COMMAND_SECONDS", 60.0)
    driven.turn(*(Abort(key) for key in range(9)))


def test_stop_ends_the_loop(driven: Driven) -> None:
    driven.commands.append(Stop())
    assert not driven.loop.turn() and driven.reports == []


def test_admissions_and_preemptions_of_each_sample_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of few blocks, so that the later of two requests loses its blocks."""
    monkeypatch.setattr(core_loop, "COMMAND_SECONDS", 60.0)
    config = EngineConfig(model="demo", enforce_eager=True, max_num_seqs=2, max_model_len=128, num_kv_blocks=8)
    driven = Driven(start_engine(config))
    began = time.monotonic()
    params = SamplingParams(max_tokens=60, ignore_eos=True, detokenize=False)
    driven.turn(add(1, [5] * 20, [6] * 20, params=params))
    while driven.scheduler.has_unfinished:
        driven.turn()
    admitted = {key: moment for report in driven.reports for key, moment in report.admitted.items()}
    assert sum(len(report.admitted) for report in driven.reports) == 2, "each once, with its first token"
    assert began < admitted[1, 0] <= admitted[2, 0] < time.monotonic()
    preempted = {key: count for report in driven.reports for key, count in report.preempted.items()}
    assert preempted.keys() == {(2, 0)}
    assert preempted[2, 0] == driven.scheduler.stats.num_preemptions > 0


def test_samples_that_wait_for_a_grammar_are_counted(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Future[Any] = Future()
    monkeypatch.setattr(driven.loop._session.grammars, "request", lambda *_: compiled)
    driven.turn(add(1, [5]))
    structured = SamplingParams(structured_outputs=StructuredOutputs(regex="a"), detokenize=False, n=2)
    (report,) = driven.turn(add(2, [6], params=structured))
    assert report.stats.num_deferred == 2 and report.stats.num_waiting == 0
    compiled.set_exception(RequestFailure("2", "grammar", "planted"))
    (report,) = driven.turn()
    assert report.stats.num_deferred == 0 and set(report.refused) == {2}
    driven.turn(Abort(1))
