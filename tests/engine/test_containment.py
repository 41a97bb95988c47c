"""Work for one request that raises ends that request alone: an exception is injected at each place of such work.

The places are those that `phonograph.sampling.failures` lists, and the work of the session for a request. The GPU's
runner is in test_containment_gpu_path.py. The server's processes are in tests/server: test_core_loop.py and
test_async_engine.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from invariants import check_scheduler
from ladders import Ladder

from phonograph import LLM, SamplingParams, StructuredOutputs
from phonograph.engine import session as session_module
from phonograph.engine.outputs import RequestOutput
from phonograph.engine.session import Session
from phonograph.errors import RequestError, RequestFailure
from phonograph.kernels.torch import sampling
from phonograph.runner.cpu_inputs import CpuInputs
from phonograph.sampling import logprobs, sampler
from phonograph.sampling.penalties import Penalties
from phonograph.sampling.sampler import Sampler
from phonograph.text.output_text import TextBuilder

VICTIM = 4321
"""Its seed, by which injections know it."""
VICTIM_ID = "victim"
TOKENS = 8
RULE = StructuredOutputs(regex="neighbour")
VICTIM_RULE = StructuredOutputs(regex=VICTIM_ID)
BAN_ALL = {token_id: -float("inf") for token_id in range(2048)}
NEIGHBOURS: list[dict[str, Any]] = [
    *({"temperature": 0.0} for _ in range(5)),
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 0.0, "presence_penalty": 1.5},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 1.0, "logit_bias": {7: 2.0}},
    {"temperature": 0.0, "structured_outputs": RULE},
    {"temperature": 1.0, "structured_outputs": RULE, "presence_penalty": 0.5},
]


class Injected(Exception):
    """No exception of any library."""


class RuledOut(Ladder):
    """A grammar whose matchers raise in one of their methods, from their second token on."""

    fault = "none"

    def matcher(self) -> RuledOut:
        if type(self).fault == "matcher":
            raise Injected("no matcher")
        return RuledOut(self.length, self.vocab, self.end)

    def accept(self, token_id: int) -> None:
        if type(self).fault == "accept" and self.taken:
            raise Injected("not accepted")
        super().accept(token_id)

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        if type(self).fault == "fill" and self.taken:
            raise Injected("not filled")
        super().fill(bitmask_RW, row)


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Keep the log quiet: the failures are intended."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def llm() -> LLM:
    settings = {"max_num_seqs": 18, "max_num_batched_tokens": 96, "max_model_len": 128, "num_kv_blocks": 200}
    return LLM(model="demo", enforce_eager=True, seed=0, **settings)


def without_library(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def request(asked: StructuredOutputs) -> Future[Any]:
        grammar: Future[Any] = Future()
        kind = RuledOut if asked == VICTIM_RULE else Ladder
        grammar.set_result(kind(TOKENS - 2, 2048, llm.plan.model.eos_token_ids[0]))
        return grammar

    monkeypatch.setattr(llm.session.grammars, "request", request)
    monkeypatch.setattr(RuledOut, "fault", "none")


@pytest.fixture(autouse=True)
def _grammars(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    without_library(llm, monkeypatch)


def prompts() -> list[list[int]]:
    return [[300 + (37 * one + 11 * place) % 1500 for place in range(5 + one)] for one in range(len(NEIGHBOURS))]


def run(llm: LLM, victim: dict[str, Any]) -> tuple[list[RequestOutput], RequestOutput]:
    """Return the outputs of the neighbours, and that of the victim, which arrives among them."""
    session = llm.session
    llm.engine.core.scheduler.reset_prefix_cache()
    outputs: list[RequestOutput] = []
    for seed, (prompt, params) in enumerate(zip(prompts(), NEIGHBOURS, strict=True)):
        if seed == 7:
            prompt_ids = [1900 + place for place in range(40)]
            params_of = {"max_tokens": TOKENS, "seed": VICTIM, "n": 2, **victim}
            attacked = session.add(prompt_ids, SamplingParams(**params_of), request_id=VICTIM_ID)
        outputs.append(session.add(prompt, SamplingParams(**params, max_tokens=TOKENS, seed=seed)))
    for _ in range(200):
        if not session.has_unfinished:
            break
        session.step()
        check_scheduler(llm.engine.core.scheduler)
    assert not session.has_unfinished and not session._samples
    return outputs, attacked


def contents(outputs: list[RequestOutput]) -> list[Any]:
    return [[(one.token_ids, one.text, one.finish_reason) for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Any]:
    assert len(NEIGHBOURS) == 15
    with pytest.MonkeyPatch.context() as patch:
        without_library(llm, patch)
        outputs, victim = run(llm, {"temperature": 0.0})
    assert victim.error is None and all(output.error is None for output in outputs)
    return contents(outputs)


Patch = Callable[[pytest.MonkeyPatch, LLM], None]


def raises_for_victim(owner: Any, name: str, is_victim: Callable[..., bool], when: int = 1) -> Patch:
    """Has a function raise where its arguments are the victim's, from the `when`-th such call on."""

    def patch(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
        function, calls = getattr(owner, name), [0]

        def replaced(*args: Any, **kwargs: Any) -> Any:
            if is_victim(llm, *args, **kwargs):
                calls[0] += 1
                if calls[0] >= when:
                    raise Injected(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, replaced)

    return patch


def slots_of_victim(llm: LLM) -> set[int]:
    live: dict[int, Any] = llm.engine.core.runner._sequences._live  # pyright: ignore[reportAttributeAccessIssue]
    return {slot for slot, sequence in live.items() if sequence.params.seed == VICTIM}


def by_slot(llm: LLM, _: Any, slot: int, *rest: Any) -> bool:
    return slot in slots_of_victim(llm)


def by_slots(place: int) -> Callable[..., bool]:
    return lambda llm, *args: not slots_of_victim(llm).isdisjoint(np.asarray(args[place]).tolist())


def by_grammar(fault: str) -> Patch:
    return lambda monkeypatch, llm: monkeypatch.setattr(RuledOut, "fault", fault)


def by_target(llm: LLM, hidden: Any, logits_fn: Any, targets: list[int], *rest: Any, **_: Any) -> bool:
    return targets[-1] >= 1900


def by_seed(llm: LLM, seed: int, *rest: Any) -> bool:
    return seed == VICTIM


def scored_victim(llm: LLM, logits: Any, ids: Any, tops: list[int], *rest: Any, **_: Any) -> bool:
    return 7 in tops


def of_victim(llm: LLM, builder: TextBuilder, *rest: Any) -> bool:
    return builder._params.seed == VICTIM


def samples_victim(llm: LLM, session: Session, sample: Any) -> bool:
    return sample.request.params.seed == VICTIM


def queues_victim(llm: LLM, session: Session, samples: list[Any], grammar: Any) -> bool:
    return samples[0].request.params.seed == VICTIM


def spoils_logits(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Set the model's logits of the victim's rows to NaN."""
    sample = Sampler.sample

    def spoiled(self: Sampler, logits: torch.Tensor, slots: Any, lens: Any) -> Any:
        rows = [row for row, slot in enumerate(slots) if slot in slots_of_victim(llm)]
        logits = logits.clone()
        logits[rows] = float("nan")
        return sample(self, logits, slots, lens)

    monkeypatch.setattr(Sampler, "sample", spoiled)


def spoils_logits_and_search(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    spoils_logits(monkeypatch, llm)
    monkeypatch.setattr(session_module, "dead_end", lambda *_: 1 / 0)


def returns(token_id: int) -> Patch:
    """Replace the device's token of the victim's rows."""

    def patch(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
        sample = Sampler.sample

        def spoiled(self: Sampler, logits: torch.Tensor, slots: Any, lens: Any) -> Any:
            sampled = sample(self, logits, slots, lens)
            for row, slot in enumerate(slots):
                if slot in slots_of_victim(llm):
                    sampled.token_ids[row] = token_id
            return sampled

        monkeypatch.setattr(Sampler, "sample", spoiled)

    return patch


RULED = {"structured_outputs": VICTIM_RULE}
PENALIZED = {"frequency_penalty": 0.5}
STOPPED = {"stop": ["\x01"]}
PLACES: dict[str, tuple[dict[str, Any], Patch, str]] = {
    "sampling parameters": ({}, raises_for_victim(Sampler, "load", by_slot), "sampling parameters"),
    "seed": ({}, raises_for_victim(sampling, "stream_key", by_seed), "sampling parameters"),
    "penalties": (PENALIZED, raises_for_victim(Penalties, "load", by_slot), "sampling parameters"),
    "bias": (
        {"logit_bias": {77: 1.0}},
        raises_for_victim(sampler, "_ids", lambda llm, ids: 77 in ids),
        "sampling parameters",
    ),
    "stop tokens": (
        {"min_tokens": 3, "stop_token_ids": [78]},
        raises_for_victim(sampler, "_ids", lambda llm, ids: 78 in ids),
        "sampling parameters",
    ),
    "matcher": (RULED, by_grammar("matcher"), "sampling parameters"),
    "token ids": ({}, raises_for_victim(CpuInputs, "_keep_tokens", by_slot), "token ids"),
    "mask": (RULED, by_grammar("fill"), "grammar"),
    "token for a matcher": (RULED, by_grammar("accept"), "grammar"),
    "choice": ({"top_p": 0.9}, raises_for_victim(Sampler, "_choose", by_slots(2), when=3), "sampling"),
    "edited logits": ({"logit_bias": {77: 1.0}}, raises_for_victim(Sampler, "_edit", by_slots(2)), "sampling"),
    "penalties applied": (PENALIZED, raises_for_victim(Penalties, "apply", by_slots(2)), "sampling"),
    "penalties counted": (PENALIZED, raises_for_victim(Penalties, "record", by_slots(1)), "penalties"),
    "log-probabilities": ({"logprobs": 7}, raises_for_victim(sampler, "token_logprobs", scored_victim), "log-prob"),
    "prompt": ({"prompt_logprobs": 1}, raises_for_victim(logprobs, "prompt_logprobs", by_target), "of the prompt"),
    "logits": ({}, spoils_logits, "not finite"),
    "logits and search": ({}, spoils_logits_and_search, "ZeroDivisionError"),
    "token beyond the vocabulary": ({}, returns(2048), "returned 2048; token ids are 0 to"),
    "huge token": ({}, returns(2**31 - 1), "returned 2147483647"),
    "token below 0": ({}, returns(-2), "returned -2"),
    "text": ({}, raises_for_victim(TextBuilder, "push", of_victim, when=4), "output"),
    "end of the text": ({}, raises_for_victim(TextBuilder, "finish", of_victim), "output"),
    "text with stop strings": (
        STOPPED,
        raises_for_victim(TextBuilder, "_stop_prefix_length", of_victim, when=3),
        "output",
    ),
    "facts of the prompt": ({}, raises_for_victim(Session, "_close", samples_victim), "output"),
}


@pytest.mark.parametrize("place", PLACES)
def test_only_the_request_ends(llm: LLM, expected: list[Any], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, patch, says = PLACES[place]
    # Half of them with a step in flight while the next one is made.
    monkeypatch.setattr(llm.engine.core.runner, "lookahead", list(PLACES).index(place) % 2)
    with monkeypatch.context() as injected:
        patch(injected, llm)
        outputs, attacked = run(llm, victim)
    assert contents(outputs) == expected
    assert isinstance(attacked.error, RequestFailure) and attacked.outputs == [] and attacked.finished
    assert VICTIM_ID in str(attacked.error) and says in str(attacked.error), str(attacked.error)
    stats = llm.engine.core.scheduler.stats
    assert (stats.blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert not llm.engine.core.has_work
    again = llm.generate(prompts()[0], SamplingParams(temperature=0.0, max_tokens=TOKENS))[0]
    assert again.outputs[0].token_ids == expected[0][0][0]


def test_an_output_that_a_grammar_never_allows_is_refused_by_name(llm: LLM, expected: list[Any]) -> None:
    outputs, attacked = run(llm, {"logit_bias": BAN_ALL})
    assert contents(outputs) == expected
    assert isinstance(attacked.error, RequestError) and attacked.error.parameter == "logit_bias"


@pytest.mark.parametrize("fault", ["result", "queue"])
def test_a_grammar_that_comes_late_and_broken(
    llm: LLM, expected: list[Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    later, compiled = Future[Any](), llm.session.grammars.request
    monkeypatch.setattr(
        llm.session.grammars, "request", lambda asked: later if asked == VICTIM_RULE else compiled(asked)
    )
    if fault == "queue":
        raises_for_victim(Session, "_queue", queues_victim)(monkeypatch, llm)
    step = llm.session.step

    def compiles() -> list[RequestOutput]:
        if not later.done():
            later.set_exception(Injected("result")) if fault == "result" else later.set_result(
                compiled(VICTIM_RULE).result()
            )
        return step()

    monkeypatch.setattr(llm.session, "step", compiles)
    outputs, attacked = run(llm, RULED)
    assert contents(outputs) == expected
    assert isinstance(attacked.error, RequestFailure) and "Injected" in str(attacked.error)


def test_an_abort_cannot_fail(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    output = llm.session.add([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True, n=2, seed=VICTIM))
    for _ in range(3):
        llm.session.step()
    raises_for_victim(TextBuilder, "push", of_victim)(monkeypatch, llm)
    llm.session.abort(output)
    assert isinstance(output.error, RequestFailure) and not llm.session.has_unfinished
    assert llm.engine.core.scheduler.stats.blocks_used == 0


def test_an_error_of_the_device_ends_the_engine() -> None:
    llm = LLM(model="demo", enforce_eager=True, max_num_seqs=2, max_model_len=64)

    def broken(*_: Any) -> None:
        raise torch.AcceleratorError("the device is gone")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Sampler, "load", broken)
        with pytest.raises(torch.AcceleratorError):
            llm.generate([5], SamplingParams(max_tokens=2))
    with pytest.raises(Exception, match="engine stopped"):
        llm.generate([5], SamplingParams(max_tokens=2))


def test_generate_raises_the_failure_of_its_only_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    raises_for_victim(TextBuilder, "push", of_victim)(monkeypatch, llm)
    params = SamplingParams(max_tokens=4, seed=VICTIM)
    with pytest.raises(RequestFailure, match="output.*Injected: push"):
        llm.generate([5, 6], params)
    with pytest.raises(RequestFailure, match="output.*Injected: push"):
        list(llm.stream([5, 6], params))
    assert [one.error is None for one in llm.generate([[5], [6]], [SamplingParams(max_tokens=4), params])] == [
        True,
        False,
    ]
