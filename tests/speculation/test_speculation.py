"""Requests that verify drafts have the tokens of requests without, whatever is drafted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
from drafted_requests import KINDS, PROMPTS, UNFINISHED, PlainDecoding, make_llm, plain_decoding, scores, texts

from phonograph.config.speculative_config import read_speculative_config
from phonograph.core.batch import ScheduledBatch, StepOutput
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM
from phonograph.engine.metrics.step_record import StepRecord
from phonograph.engine.outputs import RequestOutput
from phonograph.errors import ConfigError
from phonograph.scheduling.step_costs import StepCosts
from phonograph.speculation.host_drafts import HostDrafts

K = 3
LOOKUP = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SPECULATION = LOOKUP | {"adaptive_depth": False}


class Oracle:
    """Drafts by a rule from the tokens of the requests without drafts, or at random."""

    def __init__(self, change: Callable[[np.ndarray, np.random.Generator], np.ndarray]) -> None:
        self.known: list[list[int]] = []
        self._change = change
        self._rng = np.random.default_rng(0)

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        number = len(token_ids)
        for whole in self.known:
            if whole[:number] == token_ids.tolist():
                right = np.array(whole[number : number + most], np.int32)
                return self._change(right, self._rng)
        return self._rng.integers(0, 500, most).astype(np.int32)


def half_wrong(right: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(rng.random(len(right)) < 0.7, right, right ^ 1)


def fewer(right: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return right[: rng.integers(0, len(right) + 1)]


ORACLES = {
    "right": lambda right, rng: right,
    "wrong": lambda right, rng: right ^ 1,
    "half wrong": half_wrong,
    "fewer": fewer,
}


@pytest.fixture(scope="module")
def plain() -> PlainDecoding:
    return plain_decoding()


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return make_llm(speculative_config=SPECULATION)


@pytest.fixture(scope="module")
def adapting() -> LLM:
    """An engine whose drafts cost nothing for some steps, then much, so that its budget goes through all choices."""
    llm = make_llm(speculative_config=LOOKUP)
    budget, steps = drafts_of(llm).budget, count()
    learn = budget.learn

    def learn_as_told(batch: ScheduledBatch, output: StepOutput, seconds: float) -> None:
        step = next(steps)
        if step % 40 == 0:
            budget.costs = StepCosts()
        drafts = batch.num_decode_tokens - batch.num_decodes
        learn(batch, output, 1.0 + (0.5 * drafts if step % 80 < 40 else 0.0))

    budget.learn = learn_as_told
    return llm


def drafts_of(llm: LLM) -> HostDrafts:
    drafts = llm.engine.core.runner.drafts
    assert drafts is not None
    return drafts


SYNTHETIC = {"rejection_sample_method": "synthetic"}


def check(plain: PlainDecoding, drafting: LLM, params: SamplingParams) -> list[RequestOutput]:
    wanted, found = (llm.generate(PROMPTS, params) for llm in (plain, drafting))
    assert texts(found) == texts(wanted)
    # Products of several rows round differently from those of one.
    assert scores(found) == pytest.approx(scores(wanted), abs=2e-4)
    return wanted


@pytest.mark.parametrize("kind", KINDS)
def test_ngram(kind: str, plain: PlainDecoding, drafting: LLM) -> None:
    check(plain, drafting, SamplingParams(**(UNFINISHED | KINDS[kind])))
    check(plain, drafting, SamplingParams(**({"max_tokens": 40} | KINDS[kind])))


@pytest.mark.parametrize(
    ("oracle", "kind"),
    [
        # Half wrong ones have steps of all lengths, with and without accepted drafts.
        *((oracle, kind) for oracle in ("right", "half wrong") for kind in KINDS),
        *((oracle, kind) for oracle in ("wrong", "fewer") for kind in ("greedy", "samples", "counted", "ruled")),
    ],
)
def test_any_drafts(
    oracle: str, kind: str, plain: PlainDecoding, drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts, proposer = drafts_of(drafting), Oracle(ORACLES[oracle])
    monkeypatch.setattr(drafts, "_proposer", proposer)
    params = SamplingParams(**(UNFINISHED | KINDS[kind]))
    proposer.known = [
        output.prompt_token_ids + one.token_ids for output in plain.generate(PROMPTS, params) for one in output.outputs
    ]
    before = drafts.counts
    check(plain, drafting, params)
    decodes, verified, accepted = (now - then for now, then in zip(drafts.counts[:3], before[:3], strict=True))
    assert sum(drafts.counts.accepted_by_position) == drafts.counts.accepted
    assert decodes * K >= verified >= decodes
    if kind in ("one", "switched off"):
        assert verified == 0
    elif oracle == "right":
        # Samples of one prompt begin alike, and the drafts are those of the first.
        assert verified == accepted > 0 or (kind == "samples" and 0 < accepted < verified)
    elif oracle == "wrong":
        assert verified > 0 == accepted
    else:
        assert 0 < accepted < verified or oracle == "fewer"


@pytest.mark.parametrize("kind", ["filtered", "samples", "counted", "ruled", "switched off"])
def test_adaptive_depth(kind: str, plain: PlainDecoding, adapting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are the same whatever the budget chooses, from step to step, of drafts of which some are wrong."""
    proposer = Oracle(half_wrong)
    monkeypatch.setattr(drafts_of(adapting), "_proposer", proposer)
    params = SamplingParams(**(UNFINISHED | {"max_tokens": 60} | KINDS[kind]))
    proposer.known = [
        output.prompt_token_ids + one.token_ids for output in plain.generate(PROMPTS, params) for one in output.outputs
    ]
    check(plain, adapting, params)
    if kind == "filtered":
        reasons = dict(drafts_of(adapting).counts.choices)
        assert {"gain", "no gain", "probe", "no drafts", "plain step, to time it"} <= reasons.keys()
        assert "fixed" not in reasons


@pytest.mark.parametrize("oracle", ["right", "half wrong"])
def test_ends_within_a_run(oracle: str, plain: PlainDecoding, drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of an output ends it in turn, as a stop token, as the last one, and by a string."""
    proposer = Oracle(ORACLES[oracle])
    monkeypatch.setattr(drafts_of(drafting), "_proposer", proposer)
    params = {"temperature": 1.0, "seed": 11, "ignore_eos": True}
    (whole,) = plain.generate(["12+7="], SamplingParams(max_tokens=12, **params))
    tokens = whole.outputs[0].token_ids
    proposer.known = [whole.prompt_token_ids + tokens]
    for place, token_id in enumerate(tokens):
        for ends in (
            {"stop_token_ids": [token_id]},
            {"max_tokens": place + 1},
            {"stop": [whole.outputs[0].text[place]]},
        ):
            check_one = SamplingParams(**({"max_tokens": 12} | params | ends))
            wanted, found = (llm.generate(["12+7="], check_one) for llm in (plain, drafting))
            assert texts(found) == texts(wanted)


def test_the_end_of_the_context_and_preemptions() -> None:
    """Prompts up to the context's last place, and blocks for fewer sequences than run."""
    settings = {"max_model_len": 48, "block_size": 8, "num_kv_blocks": 13}
    plain, drafting = make_llm(**settings), make_llm(**settings, speculative_config=SPECULATION)
    prompts = [[7 + index % 3] * length for index, length in enumerate((1, 20, 46, 47, 9, 30, 44, 45, 5))]
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=None, ignore_eos=True)
    wanted, found = ([one.outputs[0].token_ids for one in llm.generate(prompts, params)] for llm in (plain, drafting))
    assert found == wanted
    assert drafting.engine.core.scheduler.stats.num_preemptions and drafting.engine.core.scheduler.stats.drafts.accepted
    assert drafting.engine.core.scheduler.stats.blocks_used == 0


def test_a_right_draft_saves_steps(plain: PlainDecoding, drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = Oracle(ORACLES["right"])
    monkeypatch.setattr(drafts_of(drafting), "_proposer", proposer)
    params = SamplingParams(temperature=0.0, max_tokens=1 + 2 * (K + 1), ignore_eos=True)
    (whole,) = plain.generate(["12+7="], params)
    proposer.known = [whole.prompt_token_ids + whole.outputs[0].token_ids]
    before = drafting.engine.core.runner.counts.total()
    drafting.generate(["12+7="], params)
    assert drafting.engine.core.runner.counts.total() - before == 3


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "num_speculative_tokens.*is missing; give a number from 1 to 15"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens='?0'?.*must be a whole number from 1 to 15"),
        ({"num_speculative_tokens": 16}, "must be a whole number from 1 to 15"),
        ({"num_speculative_tokens": True}, "must be a whole number from 1 to 15"),
        ({"num_speculative_tokens": 2, "method": "mtp"}, "method=.*mtp.*is not supported yet; ngram or draft_model or"),
        ({"num_speculative_tokens": 2, "method": "eagle3"}, "model=None: must be the folder or"),
        ({"num_speculative_tokens": 2, "heads": "x"}, "speculative_config.heads=.*is not known; the keys are method"),
        (
            {"num_speculative_tokens": 2, "model": "x", "draft_tensor_parallel_size": 2},
            "draft_tensor_parallel_size=.*2.*is not supported; 1 is",
        ),
        (
            {"num_speculative_tokens": 2, "model": "x", "method": "ngram"},
            "model=.*x.*belongs to methods draft_model",
        ),
        (
            {"num_speculative_tokens": 2, "method": "draft_model"},
            "model=None: must be the folder or name",
        ),
        (
            {"num_speculative_tokens": 2, "model": "x", "prompt_lookup_max": 3},
            "prompt_lookup_max=.*3.*belongs to method ngram",
        ),
        *(
            ({"num_speculative_tokens": 2, **given}, says)
            for given, says in (
                (
                    {"rejection_sample_method": "block"},
                    "method=.*block.*must be standard, or synthetic",
                ),
                ({"synthetic_acceptance_rates": [1, 1]}, "works with rejection_sample_method synthetic; leave it out"),
                ({"rejection_sample_method": "synthetic"}, "takes one of synthetic_acceptance_rates and"),
                (SYNTHETIC | {"synthetic_acceptance_rates": [1.0]}, "must be a list of 2 shares from 0 to 1"),
                (SYNTHETIC | {"synthetic_acceptance_rates": [0.2, 0.5]}, "none above the one before it"),
                (SYNTHETIC | {"synthetic_acceptance_rates": [1.5, 0.5]}, "must be a list of 2 shares"),
                (SYNTHETIC | {"synthetic_acceptance_rates": "12"}, "must be a list of 2 shares"),
                (SYNTHETIC | {"synthetic_acceptance_length": 3.1}, "must be a number of tokens a step from 1 to 3"),
                (SYNTHETIC | {"synthetic_acceptance_length": True}, "must be a number of tokens a step"),
                (SYNTHETIC | {"synthetic_acceptance_length": 2}, "synthetic.*works on a GPU"),
            )
        ),
        (
            {"num_speculative_tokens": 2, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min=.*4.*must be at most prompt_lookup_max=3",
        ),
        ({"num_speculative_tokens": 2, "prompt_lookup_min": 0}, "prompt_lookup_min=.*from 1 to"),
        ({"num_speculative_tokens": 2, "adaptive_depth": "no"}, "adaptive_depth=.*no.*must be true or false"),
        *(
            ({"num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": ranges}, says)
            for ranges, says in (
                (3, "must be a list of .first batch size, last batch size, drafts"),
                ("1,4,2", "must be a list of"),
                ([[1, 4]], "must be a list of"),
                ([[1, 4, True]], "must be a list of"),
                ([[0, 4, 2]], r"ascending batch sizes from 1; \[0, 4, 2\] does not follow 0"),
                ([[1, 4, 2], [4, 8, 1]], r"\[4, 8, 1\] does not follow 4"),
                ([[3, 2, 2]], r"\[3, 2, 2\] does not follow 0"),
                ([[1, 4, 3]], "0 to num_speculative_tokens=2 drafts"),
                ([[1, 4, -1]], "0 to num_speculative_tokens=2 drafts"),
            )
        ),
    ],
)
def test_refused_configurations(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_llm(speculative_config=given)


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("Qwen/Qwen3-0.6B", "draft_model"),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", "eagle3"),
        ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", "eagle"),
        ("ngram", "ngram"),
        ("[ngram]", "ngram"),
    ],
)
def test_the_method_follows_from_the_name_of_the_model(model: str, method: str) -> None:
    assert read_speculative_config({"num_speculative_tokens": 2, "model": model}).method == method


def test_other_settings_that_do_not_go_with_it() -> None:
    with pytest.raises(ConfigError, match="give num_speculative_tokens in the latter"):
        make_llm(speculative_config=SPECULATION, num_speculative_tokens=2)
    with pytest.raises(ConfigError, match="to speculate, give speculative_config"):
        make_llm(num_speculative_tokens=2)


def test_batch_sizes_bound_the_depth(plain: PlainDecoding, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = [[2, 2, 1], [3, 9, 0]]
    llm = make_llm(speculative_config=SPECULATION | {"num_speculative_tokens_per_batch_size": ranges})
    records: list[StepRecord] = []
    llm.engine.core.on_step = records.append
    proposer = Oracle(ORACLES["right"])
    monkeypatch.setattr(drafts_of(llm), "_proposer", proposer)
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (9, 17, 33)]
    wanted = plain.generate(PROMPTS[:3], params)
    proposer.known = [one.prompt_token_ids + one.outputs[0].token_ids for one in wanted]
    assert texts(llm.generate(PROMPTS[:3], params)) == texts(wanted)
    depths: dict[int, int] = {}
    for record in records:
        drafts = record.num_decode_tokens - record.num_decodes
        depths[record.num_decodes] = max(drafts, depths.get(record.num_decodes, 0))
    assert depths == {0: 0, 1: K, 2: 2, 3: 0}


def test_the_budget_learns_each_step_with_its_duration(drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[StepRecord] = []
    learnt: list[tuple[int, int, float]] = []

    def learn(batch: ScheduledBatch, output: StepOutput, seconds: float) -> None:
        learnt.append((batch.num_tokens, sum(map(len, output.token_ids)), seconds))

    monkeypatch.setattr(drafts_of(drafting), "learn", learn)
    monkeypatch.setattr(drafting.engine.core, "on_step", records.append)
    drafting.generate(PROMPTS[:1], SamplingParams(**UNFINISHED))
    assert [(tokens, seconds) for tokens, _, seconds in learnt] == [(one.num_tokens, one.seconds) for one in records]
    assert sum(number for _, number, _ in learnt) >= UNFINISHED["max_tokens"]


def test_explain_says_how_the_depth_is_chosen() -> None:
    for settings, says in ((LOOKUP, "by acceptance and durations of steps"), (SPECULATION, "all that ngram makes")):
        assert f"speculation: 0 to {K} drafts a decode, {says}" in "; ".join(
            make_llm(speculative_config=settings).plan.notes
        )


@pytest.mark.parametrize(("length", "rates"), [(1, (0, 0, 0)), (2.5, (1, 0.5, 0)), (4, (1, 1, 1))])
def test_an_acceptance_length_is_that_of_its_rates(length: float, rates: tuple[float, ...]) -> None:
    given = {"num_speculative_tokens": 3, **SYNTHETIC}
    assert read_speculative_config({**given, "synthetic_acceptance_length": length}).synthetic_rates == rates
    assert read_speculative_config({**given, "synthetic_acceptance_rates": list(rates)}).synthetic_rates == rates
