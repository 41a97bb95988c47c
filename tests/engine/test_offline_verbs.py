"""Verbs of an `LLM` beside generate: the prefix cache, metrics, queued prompts and beam search."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phonograph import LLM, BeamSearchParams, SamplingParams, StructuredOutputs
from phonograph.core.batch import TokenLogprobs
from phonograph.engine.offline.beam_search import beam_search, completed
from phonograph.engine.outputs import CompletionOutput
from phonograph.errors import ConfigError, RequestError, RequestFailure

SETTINGS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "enforce_eager": True, "block_size": 8, "seed": 0}
SHORT = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
PROMPT = [3 + place * place % 199 for place in range(40)]


@pytest.fixture(scope="module")
def shared() -> LLM:
    return LLM("demo", **SETTINGS)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert not shared.session.has_unfinished and not shared.session._samples and not shared._enqueued
    assert shared.engine.core.scheduler.stats.blocks_used == 0


def test_a_reset_forgets_the_cached_prefixes(llm: LLM) -> None:
    (first, again) = [llm.generate(PROMPT, SHORT)[0] for _ in range(2)]
    assert again.num_cached_tokens >= 32
    assert llm.reset_prefix_cache() is True
    (after,) = llm.generate(PROMPT, SHORT)
    assert after.num_cached_tokens == 0 and after.outputs[0].token_ids == first.outputs[0].token_ids
    stream = llm.stream(PROMPT, SHORT)
    next(stream)
    llm.reset_prefix_cache()
    *_, last = stream
    assert last.outputs[0].token_ids == first.outputs[0].token_ids
    assert llm.generate(PROMPT, SHORT)[0].num_cached_tokens == 0, "its blocks are older than the reset"


def metrics(llm: LLM) -> dict[tuple[str, ...], float]:
    found = {(metric.name, *metric.labels.values()): metric.value for metric in llm.get_metrics()}
    assert len(found) == len(llm.get_metrics())
    return found


def test_metrics_count_what_has_ended(llm: LLM) -> None:
    before = metrics(llm)
    llm.generate([PROMPT, PROMPT[:7]], SamplingParams(n=2, max_tokens=3, ignore_eos=True))
    stream = llm.stream(PROMPT, SHORT)
    next(stream)
    assert metrics(llm)["vllm:num_requests_running",] == 1 and metrics(llm)["vllm:kv_cache_usage_perc",] > 0
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    after = metrics(llm)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:prompt_tokens",] == 87 and grown["vllm:generation_tokens",] == 13
    assert grown["vllm:request_success", "length"] == 4 and grown["vllm:request_success", "abort"] == 1
    assert after["vllm:num_requests_running",] == after["vllm:kv_cache_usage_perc",] == 0
    assert sum(value for name, value in grown.items() if name[0] == "phonograph:steps") > 3
    names = {name for name, *_ in after}
    assert names > {"vllm:prefix_cache_hits", "vllm:num_preemptions", "vllm:num_requests_waiting"}


def test_queued_prompts_are_answered_later_and_in_order(llm: LLM) -> None:
    prompts = [PROMPT[:length] for length in (9, 3, 30)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, SHORT)]
    steps = llm.step_counts.total()
    ids = [*llm.enqueue(prompts[:2], SHORT), *llm.enqueue(prompts[2], [SHORT])]
    assert len(set(ids)) == 3 and llm.step_counts.total() == steps and llm.session.has_unfinished
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm.wait_for_completion() == []


def test_calls_between_enqueue_and_wait_answer_both(llm: LLM) -> None:
    expected = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    llm.enqueue(PROMPT, SHORT)
    assert llm.generate(PROMPT[:9], SHORT)[0].finished
    (output,) = llm.wait_for_completion()
    assert output.outputs[0].token_ids == expected


def test_a_refused_prompt_among_queued_ones_has_its_error(llm: LLM) -> None:
    llm.enqueue([PROMPT, [10**6], PROMPT * 9], SHORT)
    first, *refused = llm.wait_for_completion()
    assert first.error is None and [isinstance(one.error, RequestError) for one in refused] == [True, True]
    for wrong in ({"sampling_params": [SHORT] * 2}, {"sampling_params": SHORT, "priority": ["x", "y", "z"]}):
        with pytest.raises(RequestError):
            llm.enqueue([10**6], **wrong)
    assert llm.wait_for_completion() == []


def test_an_error_while_queueing_leaves_nothing_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    add, added = llm.session.add, list[Any]()

    def fails(*arguments: Any, **options: Any) -> Any:
        if added:
            raise ZeroDivisionError
        added.append(add(*arguments, **options))
        return added[0]

    monkeypatch.setattr(llm.session, "add", fails)
    with pytest.raises(ZeroDivisionError):
        llm.enqueue([PROMPT, PROMPT], SHORT)


def test_queued_prompts_fail_when_the_engine_closes() -> None:
    llm = LLM("demo", **SETTINGS)
    llm.enqueue(PROMPT, SHORT)
    (output,) = llm._enqueued
    llm.close()
    assert isinstance(output.error, RequestFailure) and "was closed" in str(output.error)


def scores_of(llm: LLM, prompt: list[int], rest: list[int]) -> float:
    """Sum of the log-probabilities of tokens after a prompt, by one prefill."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([prompt + rest], params)
    assert output.prompt_logprobs is not None
    found = 0.0
    for token_id, position in list(zip(prompt + rest, output.prompt_logprobs, strict=True))[len(prompt) :]:
        assert position is not None
        found += position[token_id].logprob
    return found


def test_one_beam_is_greedy(llm: LLM) -> None:
    (output,) = llm.beam_search(PROMPT, BeamSearchParams(beam_width=1, max_tokens=5, ignore_eos=True))
    (sequence,) = output.sequences
    assert sequence.tokens == PROMPT + llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    assert sequence.finish_reason == "length" and llm.tokenizer is not None
    assert sequence.text == llm.tokenizer.decode(sequence.tokens)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 3.0])
def test_beams_are_the_likeliest_sequences(llm: LLM, penalty: float) -> None:
    """Two tokens by a search of its own, over all continuations that two beams can have."""
    rng, eos = random.Random(5), frozenset(llm.session.eos_token_ids)
    for _ in range(3):
        prompt = [rng.randrange(5, 200) for _ in range(rng.randint(2, 20))]
        top = SamplingParams(max_tokens=1, temperature=0, logprobs=6, ignore_eos=True)

        def likely(tokens: list[int], top: SamplingParams = top) -> list[tuple[int, float]]:
            (output,) = llm.generate([tokens], top)
            assert output.outputs[0].logprobs is not None
            return [(token, one.logprob) for token, one in output.outputs[0].logprobs[0].items()]

        beams, ended = [(prompt, 0.0)], list[tuple[list[int], float]]()
        for _ in range(2):
            grown = [(tokens, token, total + value) for tokens, total in beams for token, value in likely(tokens)]
            ended += [(tokens, total) for tokens, token, total in grown if token in eos]
            rest = [([*tokens, token], total) for tokens, token, total in grown if token not in eos]
            beams = sorted(rest, key=lambda one: -one[1] / len(one[0]) ** penalty)[:3]
        expected = sorted([*ended, *beams], key=lambda one: -one[1] / len(one[0]) ** penalty)[:3]
        params = BeamSearchParams(beam_width=3, max_tokens=2, length_penalty=penalty)
        (output,) = llm.beam_search([prompt], params)
        assert [one.tokens for one in output.sequences] == [tokens for tokens, _ in expected]
        for one, (tokens, total) in zip(output.sequences, expected, strict=True):
            assert math.isclose(one.cum_logprob, total, abs_tol=1e-4)
            if one.finish_reason == "length":
                assert math.isclose(one.cum_logprob, scores_of(llm, prompt, tokens[len(prompt) :]), abs_tol=1e-3)


def test_beams_of_allowed_tokens_are_the_likeliest_of_all(llm: LLM) -> None:
    """So many beams that nothing is cut, beside all outputs of three tokens; most of them are unlikely."""
    rng = random.Random(11)
    prompt, allowed = [rng.randrange(5, 200) for _ in range(9)], rng.sample(range(5, 200), 4)
    scores = {one: scores_of(llm, prompt, list(one)) for one in itertools.product(allowed, repeat=3)}
    params = BeamSearchParams(16, 3, allowed_token_ids=allowed)
    (output,) = llm.beam_search([prompt], params)
    expected = sorted(scores, key=lambda one: -scores[one])[:16]
    assert [tuple(one.tokens[len(prompt) :]) for one in output.sequences] == expected
    for one, tokens in zip(output.sequences, expected, strict=True):
        assert math.isclose(one.cum_logprob, scores[tokens], abs_tol=1e-3)
        assert all(set(position) <= set(allowed) for position in one.logprobs)
    (drawn,) = llm.beam_search([prompt], dataclasses.replace(params, beam_width=1, temperature=50.0))
    assert {*drawn.sequences[0].tokens[len(prompt) :]} <= set(allowed)


def test_beams_of_a_structured_output(llm: LLM) -> None:
    (eos,) = llm.session.eos_token_ids
    assert llm.tokenizer is not None
    choices = {"red", "blue", "green"}
    params = BeamSearchParams(3, 12, structured_outputs=StructuredOutputs(choice=choices))
    for output in llm.beam_search([PROMPT, "Tom has"], params):
        prompt = PROMPT if output.sequences[0].tokens[: len(PROMPT)] == PROMPT else llm.tokenizer.encode("Tom has")
        for one in output.sequences:
            tokens = one.tokens[len(prompt) :]
            assert llm.tokenizer.decode(tokens) in choices and (one.finish_reason, one.stop_reason) == ("stop", eos)
            assert math.isclose(one.cum_logprob, scores_of(llm, prompt, [*tokens, eos]), abs_tol=1e-3)
    params = BeamSearchParams(2, 5, structured_outputs={"regex": "[0-9]+"}, allowed_token_ids=llm.tokenizer.encode("7"))  # pyright: ignore[reportArgumentType]
    (output,) = llm.beam_search([PROMPT], params)
    assert [llm.tokenizer.decode(one.tokens[len(PROMPT) :]) for one in output.sequences] == ["77777"]
    one_end = dataclasses.replace(params, structured_outputs={"choice": ["7"]}, allowed_token_ids=None)  # pyright: ignore[reportArgumentType]
    (output,) = llm.beam_search([PROMPT], one_end)
    assert [llm.tokenizer.decode(one.tokens[len(PROMPT) :]) for one in output.sequences] == ["7"]
    with pytest.raises(RequestError, match="contradicts structured_outputs"):
        dataclasses.replace(params, ignore_eos=True)


def test_a_beam_ends_at_the_end_of_sequence_or_of_the_context(llm: LLM) -> None:
    (output,) = llm.generate("1 2 3", SamplingParams(max_tokens=40, temperature=0))
    assert output.outputs[0].finish_reason == "stop", "the demo model ends this answer"
    wanted = output.outputs[0].token_ids
    for shows in (False, True):
        params = BeamSearchParams(1, 60, include_stop_str_in_output=shows)
        ((sequence,),) = [one.sequences for one in llm.beam_search({"prompt": "1 2 3"}, params)]
        assert (sequence.finish_reason, sequence.stop_reason) == ("stop", wanted[-1])
        assert sequence.tokens == output.prompt_token_ids + (wanted if shows else wanted[:-1])
        assert len(sequence.logprobs) == len(wanted)
    params = BeamSearchParams(1, 60, include_stop_str_in_output=True, skip_special_tokens=False)
    (shown,) = llm.beam_search("1 2 3", params)[0].sequences
    assert llm.tokenizer is not None and shown.text == llm.tokenizer.decode(shown.tokens, skip_special_tokens=False)
    assert shown.text.endswith("<|end|>")
    params = BeamSearchParams(2, 60, ignore_eos=True)
    long, short = llm.beam_search([PROMPT + PROMPT, PROMPT], params)
    assert [len(one.tokens) for one in long.sequences] == [96, 96]
    assert [len(one.tokens) for one in short.sequences] == [96, 96]
    assert {one.finish_reason for one in long.sequences} == {"length"}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((0, 5), "beam_width=0: must be an integer >= 1 and <= 512"),
        ((513, 5), "beam_width=513"),
        ((2, 0), "max_tokens=0: must be an integer >= 1"),
        ((2, True), "max_tokens=True"),
        ((2, 5, 1), "ignore_eos=1: must be True or False"),
        ((2, 5, False, -1.0), "temperature=-1.0: must be a finite number >= 0"),
        ((2, 5, False, 0.0, math.nan), "length_penalty=nan"),
    ],
)
def test_wrong_parameters_of_beam_search_are_refused(values: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(*values)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("penalty", "shows", "end", "best"),
    [
        (0.0, False, -1.2, "ended"),  # -1.2 and -1.5
        (1.0, False, -1.2, "longer"),  # -1.2 / 1 and -1.5 / 3
        (1.0, True, -1.2, "longer"),  # The end-of-sequence token does not count: not -1.2 / 2.
        (1.0, True, -0.9, "longer"),
        (1.0, True, -0.4, "ended"),
    ],
)
def test_a_sequence_is_ranked_by_its_length(penalty: float, shows: bool, end: float, best: str) -> None:
    """After token 1: the end (9) or token 2. After token 2: token 3."""
    rows = {1: {9: end, 2: -1.0}, 2: {3: -0.5}, 3: {3: -9.0}}

    async def generate(beams: list[list[int]], step: SamplingParams) -> list[CompletionOutput]:
        assert (step.logprobs, step.max_tokens, step.temperature) == (4, 1, 0.0)
        outputs: list[CompletionOutput] = []
        for beam in beams:
            row = rows[beam[-1]]
            scored = [TokenLogprobs([*row], [*row.values()], [*range(1, len(row) + 1)])]
            outputs.append(CompletionOutput(0, token_ids=[next(iter(row))], logprobs=scored))
        return outputs

    params = BeamSearchParams(2, 2, length_penalty=penalty, include_stop_str_in_output=shows)
    (output,) = completed(beam_search([[1]], params, generate, eos=frozenset({9}), context_len=50))
    ended, longer = ([1, 9] if shows else [1]), [1, 2, 3]
    assert [one.tokens for one in output.sequences] == ([ended, longer] if best == "ended" else [longer, ended])
    assert {tuple(one.tokens): (one.cum_logprob, one.finish_reason, one.stop_reason) for one in output.sequences} == {
        tuple(ended): (end, "stop", 9),
        (1, 2, 3): (-1.5, "length", None),
    }


def test_a_wrong_prompt_ends_a_beam_search(llm: LLM) -> None:
    params = BeamSearchParams(2, 3)
    for prompts, says in (([PROMPT, PROMPT * 9], "prompt length=360"), ([[]], "empty"), ([[10**6]], "token ids are 0")):
        with pytest.raises(RequestError, match=says):
            llm.beam_search(prompts, params)
    with pytest.raises(RequestError, match="must be BeamSearchParams"):
        llm.beam_search(PROMPT, SHORT)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match="is not a parameter of beam search; did you mean beam_width"):
        BeamSearchParams(beam_with=2, max_tokens=3)  # pyright: ignore[reportCallIssue]


def test_a_profile_is_written_between_two_verbs(tmp_path: Path) -> None:
    with LLM("demo", profile_dir=str(tmp_path / "new" / "profiles"), **SETTINGS) as llm:
        with pytest.raises(RequestError, match="stop_profile='now': no profile is running; start_profile begins one"):
            llm.stop_profile()
        llm.start_profile()
        with pytest.raises(RequestError, match="start_profile='now': a profile is running; stop_profile ends it"):
            llm.start_profile()
        llm.generate(PROMPT, SHORT)
        path = Path(llm.stop_profile())
    with gzip.open(path) as file:
        assert any(event["name"].startswith("aten::") for event in json.load(file)["traceEvents"])
    other = LLM("demo", profile_dir=str(tmp_path), **SETTINGS)
    other.start_profile()
    other.close()
    assert not torch._C._autograd._profiler_enabled(), "close ends the profile"


def test_a_profile_needs_a_folder(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="profile_dir=None: start_profile needs the folder"):
        llm.start_profile()
    (tmp_path / "file").touch()
    with (
        LLM("demo", profile_dir=str(tmp_path / "file"), **SETTINGS) as other,
        pytest.raises(ConfigError, match=r"profile_dir='.*file': cannot be made \(.*File exists"),
    ):
        other.start_profile()
