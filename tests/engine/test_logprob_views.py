"""Log-probabilities and times of outputs as vLLM's users read them."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import math
import pickle
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phonograph import LLM, AsyncLLM, EngineConfig, SamplingParams
from phonograph.core.batch import TokenLogprobs
from phonograph.engine.offline.model_defaults import default_sampling_params
from phonograph.engine.outputs import CompletionOutput, RequestOutput
from phonograph.errors import ModelError, RequestError
from phonograph.text.logprob_views import Logprob, LogprobsView, PositionLogprobs, no_text

SCORED = SamplingParams(max_tokens=6, temperature=0.8, seed=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
SETTINGS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "enforce_eager": True}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", **SETTINGS)


async def last_output(params: SamplingParams) -> RequestOutput:
    async with AsyncLLM("demo", **SETTINGS) as llm:
        outputs = [output async for output in llm.generate("1 2 3", params)]
    return outputs[-1]


@pytest.mark.parametrize("engine", ["LLM", "AsyncLLM"])
def test_outputs_read_as_those_of_vllm(llm: LLM, engine: str) -> None:
    output = llm.generate("1 2 3", SCORED)[0] if engine == "LLM" else asyncio.run(last_output(SCORED))
    (sample,) = output.outputs
    assert sample.logprobs is not None and output.prompt_logprobs is not None and llm.tokenizer is not None
    assert len(sample.logprobs) == len(sample.token_ids) == 6
    for token_id, position in zip(sample.token_ids, sample.logprobs, strict=True):
        assert position[token_id].logprob <= 0 and position[token_id].rank >= 1
        assert position[token_id].decoded_token == llm.tokenizer.texts.text(token_id)
        assert next(iter(position)) == token_id and 2 <= len(position) <= 3
        likely = [one for one in position.values() if one.rank <= 2]
        assert [one.rank for one in sorted(likely, key=lambda one: -one.logprob)] == [1, 2]
    texts = [position[token].decoded_token for token, position in zip(sample.token_ids, sample.logprobs, strict=True)]
    assert "".join(map(str, texts)) == sample.text
    assert sample.cumulative_logprob == sum(
        position[token].logprob for token, position in zip(sample.token_ids, sample.logprobs, strict=True)
    )
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token_id, position in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]:
        assert position is not None and token_id in position and position[token_id].decoded_token is not None


def test_all_of_the_vocabulary(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=-1, prompt_logprobs=-1, ignore_eos=True)
    (output,) = llm.generate("1 2 3", params)
    positions = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
    assert len(positions) == len(output.prompt_token_ids) - 1 + 3
    for position in positions:
        assert position is not None and len(position) == llm.engine.plan.model.vocab_size
        assert math.fsum(math.exp(one.logprob) for one in position.values()) == pytest.approx(1, abs=1e-4)
        assert {token_id: position[token_id] for token_id in position} == dict(position.items())
    (few,) = llm.generate("1 2 3", dataclasses.replace(params, logprobs=3))
    assert few.outputs[0].token_ids == output.outputs[0].token_ids
    for whole, part in zip(positions[-3:], few.outputs[0].logprobs or (), strict=True):
        assert whole is not None and all(whole[token_id] == one for token_id, one in part.items())


@pytest.mark.parametrize(("start", "others"), [(0, None), (3, None), (2, 2), (1, -1)])
def test_listed_tokens_of_a_prompt(start: int, others: int | None) -> None:
    """Rows of several lengths, in chunks of a prompt, beside the log-probabilities of the whole vocabulary."""
    rng, settings = random.Random(start), {**SETTINGS, "max_num_batched_tokens": 8, "max_num_seqs": 4}
    prompts = [[rng.randrange(5, 200) for _ in range(length)] for length in (19, 5)]
    with LLM("demo", **settings) as llm:
        whole = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=-1))
        rows = [
            [[rng.randrange(2048) for _ in range(rng.choice([0, 1, 4]))] + [-1, 7][:1] for _ in prompt[1 + start :]]
            for prompt in prompts
        ]
        asked = [
            SamplingParams(
                max_tokens=2,
                prompt_logprobs=others,
                prompt_logprob_token_ids=one if start else np.array([(row + [-1] * 4)[:4] for row in one]),  # pyright: ignore[reportArgumentType]
                prompt_logprob_start=start,
            )
            for one in rows
        ]
        for _ in range(2):  # the second time with cached prefixes
            for output, full, params in zip(llm.generate(prompts, asked), whole, asked, strict=True):
                found, listed = output.prompt_token_id_logprobs, params.prompt_logprob_token_ids
                assert found is not None and listed is not None and found.dtype == np.float32
                assert found.shape == (len(output.prompt_token_ids) - 1 - start, max(map(len, listed)))
                for place, row in enumerate(listed):
                    position = (full.prompt_logprobs or ())[place + 1 + start]
                    assert position is not None
                    expected = [position[one].logprob if one >= 0 else -math.inf for one in row]
                    expected += [-math.inf] * (found.shape[1] - len(row))
                    assert found[place].tolist() == pytest.approx(expected, abs=1e-4)
                assert output.prompt_logprobs is not None and full.prompt_logprobs is not None
                for token_id, one, all_of_it in zip(
                    output.prompt_token_ids[1:], output.prompt_logprobs[1:], full.prompt_logprobs[1:], strict=True
                ):
                    assert one is not None and all_of_it is not None and one.token_ids[0] == token_id
                    count = {None: 0, 2: 2, -1: len(all_of_it)}[others]
                    assert one.token_ids[1:] == all_of_it.token_ids[1 : 1 + count]


def test_listed_tokens_of_a_prompt_by_the_other_engine() -> None:
    params = SamplingParams(max_tokens=1, prompt_logprob_token_ids=[[5, 6], [7]], prompt_logprob_start=1)

    async def last() -> RequestOutput:
        async with AsyncLLM("demo", **SETTINGS) as engine:
            return [output async for output in engine.generate([9, 8, 7, 6], params)][-1]

    with LLM("demo", **SETTINGS) as llm:
        (expected,) = llm.generate([[9, 8, 7, 6]], params)
    found = asyncio.run(last()).prompt_token_id_logprobs
    assert found is not None and found.shape == (2, 2) and found[1, 1] == -np.inf
    np.testing.assert_array_equal(found, expected.prompt_token_id_logprobs)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"prompt_logprob_token_ids": [[5]]}, "must be 3 scored rows: all of 4 tokens of the prompt but the first"),
        ({"prompt_logprob_token_ids": [[5]] * 3, "prompt_logprob_start": 1}, "must be 2 scored rows"),
        ({"prompt_logprob_token_ids": [[5], [6], [2048]]}, "2048: the model's token ids are 0 to 2047"),
        ({"prompt_logprob_token_ids": [[5], [6], [-2]]}, "must be an integer >= -1"),
        ({"prompt_logprob_token_ids": [[], [], []]}, "must have rows of 1 to 1024 token ids"),
        ({"prompt_logprob_token_ids": [[5] * 1025]}, "must have rows of 1 to 1024 token ids"),
        ({"prompt_logprob_token_ids": [5, 6, 7]}, "must be a list of token ids"),
        ({"prompt_logprob_start": 1}, "needs prompt_logprob_token_ids"),
        ({"prompt_logprob_start": -1}, "must be an integer >= 0"),
    ],
)
def test_wrong_lists_for_prompts_are_refused(llm: LLM, values: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        (output,) = llm.generate([[9, 8, 7, 6]], SamplingParams(**values))
        assert output.error is not None
        raise output.error
    assert says in str(caught.value)


@pytest.mark.parametrize("engine", ["LLM", "AsyncLLM"])
def test_times_of_a_request(llm: LLM, engine: str) -> None:
    before, clock = time.time(), time.monotonic()
    params = SamplingParams(max_tokens=6, n=2, ignore_eos=True)
    output = llm.generate("1 2 3", params)[0] if engine == "LLM" else asyncio.run(last_output(params))
    metrics = output.metrics
    assert metrics is not None and before <= metrics.arrival_time <= time.time()
    assert clock <= metrics.queued_ts <= metrics.first_token_ts <= metrics.last_token_ts <= time.monotonic()
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts
    assert metrics.num_generation_tokens == 12
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None


def test_a_request_that_ends_before_its_first_token_has_no_times(llm: LLM) -> None:
    output = llm.session.add([5, 6], SCORED)
    llm.session.abort(output)
    assert output.metrics is not None and output.metrics.first_token_latency == 0
    assert output.metrics.first_token_ts == output.metrics.last_token_ts == output.metrics.num_generation_tokens == 0


def test_a_copy_of_an_output_keeps_the_texts_of_its_tokens(llm: LLM) -> None:
    (output,) = llm.generate("1 2 3", SCORED)
    for copied in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert copied == output and copied.outputs[0] == output.outputs[0]
        assert [dict(one) for one in copied.outputs[0].logprobs] == [dict(one) for one in output.outputs[0].logprobs]
        assert len(pickle.dumps(copied)) < 10_000, "the tokenizer is left behind"


def test_a_view_is_a_sequence_of_mappings() -> None:
    positions = [None, TokenLogprobs([7, 9, 7], [-2.0, -0.5, -2.0], [2, 1, 2])]
    view: LogprobsView[PositionLogprobs | None] = LogprobsView(positions, {7: "a", 9: "b"}.get)
    expected = {7: Logprob(-2.0, 2, "a"), 9: Logprob(-0.5, 1, "b")}
    assert view[0] is None and view[1] == expected == view[-1] and view[1:] == [expected]
    assert list(view[1].items()) == list(expected.items()) and repr(view) == repr([None, expected])
    with pytest.raises(KeyError, match="8"):
        view[1][8]
    with pytest.raises(IndexError):
        view[2]
    assert view[1].token_ids == [7, 9, 7] and view[1].logprobs[1] == -0.5 and view[1].ranks == [2, 1, 2]
    assert view == [None, expected] and view != [None] and view == LogprobsView(list(positions), no_text)
    positions.append(None)
    assert len(view) == 3, "it grows with the output"


def test_the_outputs_of_a_failed_request_carry_its_reason(llm: LLM) -> None:
    for output in (llm.generate([[5] * 300, [5]])[0], pickle.loads(pickle.dumps(llm.generate([[5] * 300, [5]])[0]))):
        assert output.finished and len(output.outputs) == 0 and not list(output.outputs)
        with pytest.raises(IndexError, match="refused or failed: prompt length=300: tokens leave no room"):
            output.outputs[0]
    output = llm.session.add([5, 6], SCORED)
    llm.session.fail(output, RequestError("prompt", 3, "was withdrawn"))
    with pytest.raises(IndexError, match="was withdrawn"):
        output.outputs[0]
    assert output.error is not None and llm.generate("1 2 3", SCORED)[0].error is None


def test_an_output_reads_its_log_probabilities_lazily() -> None:
    asked: list[int] = []
    positions = [TokenLogprobs([token_id], [-1.0], [1]) for token_id in range(5)]
    output = CompletionOutput(0, logprobs=positions, token_text=lambda token_id: asked.append(token_id) or "x")
    assert output.logprobs is not None and output.cumulative_logprob == -5.0 and not asked
    assert output.logprobs[3][3].decoded_token == "x" and asked == [3]


def test_the_tokenizer_is_that_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template([{"role": "user", "content": "2 + 3"}], tokenize=False)
    assert "2 + 3" in text and tokenizer.encode("1 2 3") == llm.generate("1 2 3", SCORED)[0].prompt_token_ids


def test_requests_without_parameters_take_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "top_p": 0.9, "top_k": None}))
    config = EngineConfig(model=str(tmp_path))
    assert default_sampling_params(config) == SamplingParams(temperature=0.0, top_p=0.9)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="generation_config.json: is unusable; requests with sampling_params"):
        default_sampling_params(config)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for home in ("offline.offline_engine", "process.async_verbs"):
        monkeypatch.setattr(f"phonograph.engine.{home}.default_sampling_params", lambda config: greedy)
    with LLM("demo", **SETTINGS) as llm:
        assert llm.get_default_sampling_params() == greedy
        expected = llm.generate("1 2 3", greedy)[0].outputs[0].token_ids
        assert llm.generate("1 2 3")[0].outputs[0].token_ids == expected
        assert [*llm.stream("1 2 3")][-1].outputs[0].token_ids == expected
        assert len(llm.chat([{"role": "user", "content": "2 + 3"}])[0].outputs[0].token_ids) == 4

    async def asynchronous() -> list[int]:
        async with AsyncLLM("demo", **SETTINGS) as llm:
            assert await llm.get_default_sampling_params() == greedy
            assert (await llm.get_tokenizer()).encode("1") == llm.tokenizer.encode("1")
            return [output async for output in llm.generate("1 2 3")][-1].outputs[0].token_ids

    assert asyncio.run(asynchronous()) == expected
