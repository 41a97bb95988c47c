"""Requests refused at the door, by name; each of these ended the engine, or a step of it, when it got further."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

from phonograph import LLM, SamplingParams
from phonograph.errors import RequestError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model="demo", max_model_len=64, max_num_seqs=4, enforce_eager=True, seed=0)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"min_tokens": 2**63, "max_tokens": None}, "min_tokens=9223372036854775808: at most 61 tokens can follow"),
        ({"min_tokens": 2**70, "max_tokens": 2**70}, "min_tokens.*at most 61 tokens"),
        ({"min_tokens": 62, "max_tokens": 100}, "min_tokens=62"),
        ({"stop_token_ids": [2**63]}, "stop_token_ids=9223372036854775808"),
        ({"logit_bias": {2**63: 1.0}}, "logit_bias=9223372036854775808"),
        ({"logit_bias": {2048: 1.0}}, "logit_bias=2048"),
    ],
)
def test_parameters_beyond_model_and_context(llm: LLM, params: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.session.add([5, 6, 7], SamplingParams(**params))
    assert not llm.session.has_unfinished


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 2**70},
        {"top_p": 7e-46},
        {"min_p": 1e-300},
        {"temperature": 1e-300},
        {"temperature": 1e300},
        {"logit_bias": {5: 1e-300}},
        {"min_tokens": 3, "max_tokens": 2**70, "stop_token_ids": [9]},
        {"frequency_penalty": 1e-300},
        {"logprobs": 1024},
    ],
)
def test_numbers_at_the_edge_are_served(llm: LLM, params: dict[str, Any]) -> None:
    bounded = {"max_tokens": 4, "seed": 1, **params}
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(**bounded), use_tqdm=False)
    assert output.error is None and all(0 <= token_id < 2048 for token_id in output.outputs[0].token_ids)
    if params == {"top_k": 2**70}:
        (plain,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, seed=1), use_tqdm=False)
        assert plain.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("request_id", ["", "x" * 257, 5, ["a"]])
def test_ids_of_requests(llm: LLM, request_id: Any) -> None:
    with pytest.raises(RequestError, match="request_id.*must be a string"):
        llm.session.add([5], SamplingParams(), request_id=request_id)


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1])
def test_priorities(llm: LLM, priority: int) -> None:
    with pytest.raises(RequestError, match="priority=.*64 bits"):
        llm.session.add([5], SamplingParams(), priority=priority)


def test_a_text_with_a_token_that_the_model_has_not() -> None:
    llm = LLM(model="demo", max_model_len=64, max_num_seqs=2, enforce_eager=True)
    assert llm.tokenizer is not None
    llm.tokenizer.hugging_face.add_tokens([AddedToken("<added>")])
    good, bad = llm.generate(["Hi", "a <added> b"], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(good.outputs[0].token_ids) == 3
    assert isinstance(bad.error, RequestError) and "has token 2048 of the tokenizer" in str(bad.error)


def test_integers_of_other_libraries_are_token_ids(llm: LLM) -> None:
    params, ids = SamplingParams(temperature=0.0, max_tokens=3), [5, 6, 700]
    expected = llm.generate(ids, params, use_tqdm=False)[0].outputs[0].token_ids
    ones: list[Any] = [[np.int64(i) for i in ids], np.array(ids, np.int32), torch.tensor(ids), tuple(ids)]
    for one in ones:
        for prompts in (one, [one], {"prompt_token_ids": one}):
            (output,) = llm.generate(prompts, params, use_tqdm=False)
            assert output.outputs[0].token_ids == expected
            assert {type(token_id) for token_id in output.prompt_token_ids} == {int}
    both = llm.generate(np.array([ids, ids]), params, use_tqdm=False)  # pyright: ignore[reportArgumentType]
    assert [output.outputs[0].token_ids for output in both] == [expected] * 2
    for wrong in ([np.float32(5)], np.array([True]), [np.int64(2048)], np.array([-1]), np.array([[5], [6]])):
        with pytest.raises(RequestError, match="prompt"):
            llm.session.add(wrong, params)  # pyright: ignore[reportArgumentType]
