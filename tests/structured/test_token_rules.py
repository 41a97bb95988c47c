"""Allowed tokens and forbidden words: masks against a plain definition, alone and beside a grammar, and in engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from token_grammars import END, VOCAB, InTurn
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from phonograph import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from phonograph.core.grammar import GrammarError, Matcher
from phonograph.engine.admission import admitted_bad_words
from phonograph.engine.outputs import RequestOutput
from phonograph.errors import RequestError
from phonograph.kernels.torch.sampling import mask_tokens, prefer_timestamps
from phonograph.structured.token_rules import TimestampRules, TokenRules

SETTINGS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "enforce_eager": True, "seed": 0}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
TOKENS = st.integers(0, 9)


class Revocable(InTurn):
    """A whole matcher."""

    def matcher(self) -> Revocable:
        return Revocable(*self.choices[:-1])

    def validate(self, token_ids: Sequence[int]) -> int:
        choices = self.choices[self.place :]
        return len([*takewhile(lambda pair: pair[0] in pair[1], zip(token_ids, choices, strict=False))])

    def rollback(self, num_tokens: int) -> None:
        self.place -= num_tokens

    def copy(self) -> Revocable:
        other = self.matcher()
        other.place = self.place
        return other


def allowed_by(matcher: Matcher) -> set[int]:
    bitmask_RW = np.full((2, -(-VOCAB // 32)), 7, dtype=np.int32)
    matcher.fill(bitmask_RW, 1)
    assert (bitmask_RW[0] == 7).all(), "another row is not touched"
    return set(np.flatnonzero(np.unpackbits(bitmask_RW[1].view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def naive(output: list[int], allowed: list[int] | None, words: list[list[int]]) -> set[int]:
    """Tokens after which no word is the end of the output."""
    found = set(range(VOCAB) if allowed is None else allowed)
    return {token for token in found if not any([*output, token][-len(word) :] == word for word in words)}


@given(
    allowed=st.none() | st.lists(TOKENS, min_size=1),
    words=st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=6),
    picks=st.lists(st.integers(0, 10**6), max_size=12),
    data=st.data(),
)
def test_masks_are_those_of_the_definition(
    allowed: list[int] | None, words: list[list[int]], picks: list[int], data: st.DataObject
) -> None:
    matcher = TokenRules(VOCAB, allowed=allowed, forbidden=words, inner=None).matcher()
    output: list[int] = []
    for pick in picks:
        expected = naive(output, allowed, words)
        assert allowed_by(matcher) == expected and not matcher.ended
        forbidden = sorted(set(range(12)) - expected)
        if forbidden:
            with pytest.raises(GrammarError, match="is not allowed"):
                matcher.accept(forbidden[pick % len(forbidden)])
        likely = sorted(expected & set(range(10))) or sorted(expected)
        if not likely:
            return
        output.append(likely[pick % len(likely)])
        matcher.accept(output[-1])
    tail = data.draw(st.lists(TOKENS, max_size=6))
    count = 0
    while count < len(tail) and tail[count] in naive(output + tail[:count], allowed, words):
        count += 1
    assert matcher.validate(tail) == count
    other, back = matcher.copy(), data.draw(st.integers(0, len(output)))
    other.rollback(back)
    assert allowed_by(other) == naive(output[: len(output) - back], allowed, words)
    assert allowed_by(matcher) == naive(output, allowed, words), "a copy is independent"


def test_rules_hold_beside_a_grammar() -> None:
    inner: Any = Revocable([3, 40], [31, 32, 64], [3])
    matcher = TokenRules(VOCAB, allowed=[3, 31, 64, END], forbidden=[[3, 31]], inner=inner).matcher()
    assert allowed_by(matcher) == {3} and matcher.validate([3, 31]) == 1 == matcher.validate([3, 40])
    matcher.accept(3)
    assert allowed_by(matcher) == {64}
    with pytest.raises(GrammarError, match="completes a word"):
        matcher.accept(31)
    assert matcher.validate([64, 3, END]) == 3
    for token_id in (64, 3):
        matcher.accept(token_id)
    matcher.rollback(1)
    assert allowed_by(matcher) == {3}
    for token_id in (3, END):
        matcher.accept(token_id)
    assert matcher.ended


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", **SETTINGS)


def first(outputs: list[RequestOutput]) -> Any:
    assert outputs[0].error is None
    return outputs[0].outputs[0]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_are_generated(llm: LLM, temperature: float) -> None:
    params = SamplingParams(max_tokens=20, temperature=temperature, allowed_token_ids=[5, 70, 900])
    sample = first(llm.generate("Tom has 12 apples.", params))
    assert set(sample.token_ids) <= {5, 70, 900} and sample.finish_reason == "length", "the end is not in the list"


def test_forbidden_words_are_not_generated(llm: LLM) -> None:
    assert llm.tokenizer is not None
    prompt = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"
    plain = first(llm.generate(prompt, GREEDY))
    for start in range(0, 8, 2):
        word = tuple(plain.token_ids[start : start + 3])
        found = first(
            llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, bad_words=[word]))
        )
        runs = {tuple(found.token_ids[at : at + 3]) for at in range(10)}
        assert word not in runs and found.token_ids[: start + 2] == plain.token_ids[: start + 2]
    word = plain.text.split()[0]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, bad_words=[word])
    assert word not in first(llm.generate(prompt, params)).text.split()


def test_rules_follow_a_request_through_preemptions() -> None:
    params = [
        SamplingParams(
            max_tokens=60, temperature=0, ignore_eos=True, allowed_token_ids=range(5, 9), bad_words=[[5, 6], [7]]
        )
        for _ in range(4)
    ]
    prompts = [[5 + place] * 20 for place in range(4)]
    found: list[list[list[int]]] = []
    for blocks in (100, 12):
        with LLM("demo", **{**SETTINGS, "max_model_len": 96, "block_size": 8, "num_kv_blocks": blocks}) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            assert (llm.engine.core.scheduler.stats.num_preemptions > 0) == (blocks == 12)
    assert found[0] == found[1]


def test_rules_and_a_structured_output_hold_together(llm: LLM) -> None:
    choice = StructuredOutputs(choice=["apples", "pears", "plums"])
    free = SamplingParams(temperature=0, structured_outputs=choice)
    taken = first(llm.generate("Tom eats", free)).text
    bad = SamplingParams(temperature=0, structured_outputs=choice, bad_words=[taken])
    other = first(llm.generate("Tom eats", bad))
    assert other.text in {"apples", "pears", "plums"} and other.finish_reason == "stop"


async def asynchronous(params: SamplingParams) -> list[int]:
    async with AsyncLLM("demo", **SETTINGS) as llm:
        *_, output = [output async for output in llm.generate("Tom has", params)]
        return output.outputs[0].token_ids


def test_texts_become_tokens_on_the_side_of_the_client(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, bad_words=["apples", " and", "1"])
    assert asyncio.run(asynchronous(params)) == first(llm.generate("Tom has", params)).token_ids
    assert first(llm.generate("Tom has", params)).token_ids != first(llm.generate("Tom has", GREEDY)).token_ids


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids=[]: is empty; give at least one token id"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids=-1: must be an integer >= 0"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids='12': must be a list of token ids"),
        ({"allowed_token_ids": [2048]}, "allowed_token_ids=2048: the model's token ids are 0 to 2047"),
        ({"bad_words": "word"}, "bad_words='word': must be a list of texts"),
        ({"bad_words": [" "]}, "bad_words=' ': each word must have a character"),
        ({"bad_words": [[]]}, "bad_words=[]: each word must have a token"),
        ({"bad_words": [[5, 2048]]}, "bad_words=2048: the model's token ids are 0 to 2047"),
        ({"bad_words": [5]}, "bad_words=5: must be a list of token ids"),
        ({"bad_words": [[5], [6]], "allowed_token_ids": [5, 6]}, "no token is left after the first 0 tokens"),
        ({"bad_words": [[5, 5]], "allowed_token_ids": [5]}, "no token is left after the first 1 token of the output"),
        ({"bad_words": [[token] for token in range(2048)]}, "bad_words='...': no token is left"),
    ],
)
def test_wrong_rules_are_refused_and_the_engine_serves_on(llm: LLM, values: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate("Tom has", SamplingParams(max_tokens=4, **values))
    assert says in str(caught.value)
    assert first(llm.generate("Tom has", GREEDY)).finish_reason == "length"


def test_texts_need_a_tokenizer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.session, "tokenizer", None)
    with pytest.raises(RequestError, match="bad_words=.*needs a tokenizer; give token ids"):
        llm.generate([5, 6], SamplingParams(bad_words=["a"]))
    assert first(llm.generate([5, 6], SamplingParams(bad_words=[[7]], max_tokens=2))).token_ids


def test_a_word_is_forbidden_with_and_without_a_space_before(llm: LLM) -> None:
    assert llm.tokenizer is not None
    params = admitted_bad_words(SamplingParams(bad_words=["apples", " and", [7, 8]]), llm.tokenizer)
    texts = ("apples", " apples", " and")
    assert params.bad_words == (
        *(tuple(llm.tokenizer.encode(text, add_special_tokens=False)) for text in texts),
        (7, 8),
    )
    assert admitted_bad_words(params, None) is params


FIRST, TEXT_END = 60, 50
"""Tokens of the time 0, and of the end of an output, in a vocabulary of 101 tokens."""


@pytest.mark.parametrize("most_first", [None, 5, 90])
@given(output=st.lists(st.one_of(st.integers(0, 58), st.integers(FIRST, 100)), max_size=6), seed=st.integers(0, 99))
def test_timestamps_are_those_of_transformers(most_first: int | None, output: list[int], seed: int) -> None:
    """Masks and the choice of timestamps, next to the logits processor, on outputs that follow the rules or do not."""
    settings = GenerationConfig(eos_token_id=TEXT_END, no_timestamps_token_id=FIRST - 1)
    settings.max_initial_timestamp_index = most_first  # pyright: ignore[reportAttributeAccessIssue]
    processor = WhisperTimeStampLogitsProcessor(settings, begin_index=2)
    rules = TimestampRules(101, first=FIRST, end=TEXT_END, most_first=most_first)
    matcher, followed = rules.matcher(), list[int]()
    for token in output:
        if matcher.validate([token]):
            matcher.accept(token)
            followed.append(token)
    logits_2V = torch.randn((2, 101), generator=torch.Generator().manual_seed(seed)) * 3
    wanted_V = processor(torch.tensor([[0, 0, *followed]]), logits_2V[:1])[0]  # pyright: ignore[reportArgumentType]
    masks_1W = np.zeros((1, 4), np.int32)
    matcher.fill(masks_1W, 0)
    found_2V, masks = logits_2V.clone(), torch.from_numpy(masks_1W)
    found_2V[:1] = mask_tokens(found_2V[:1], masks)
    allowed_V = found_2V[0] > -torch.inf
    assert [bool(matcher.validate([token])) for token in range(101)] == allowed_V.tolist()
    padded = torch.cat([masks, torch.zeros_like(masks)])
    prefer_timestamps(found_2V, torch.tensor([0, -1]), padded, FIRST)
    assert torch.equal(found_2V[0], wanted_V)
    assert torch.equal(found_2V[1], logits_2V[1]), "a row without masks"
    prefer_timestamps(found_2V, torch.tensor([1]), torch.full((1, 4), -1, dtype=torch.int32), FIRST)
    assert torch.equal(found_2V[1], logits_2V[1]), "a row with other masks"


def test_outputs_of_timestamps_go_back() -> None:
    rules = TimestampRules(101, first=FIRST, end=TEXT_END, most_first=3)
    matcher = rules.matcher()
    assert matcher.validate([62, 7, 8, 64, 64, 9]) == 6 and matcher.validate([64]) == 0
    assert matcher.validate([62, 7, 64, 63]) == 3 and matcher.validate([62, 62]) == 1
    for token in (62, 7, 64):
        matcher.accept(token)
    copy = matcher.copy()
    copy.accept(64)
    matcher.rollback(2)
    matcher.accept(9)
    assert copy.validate([64]) == 0 and copy.validate([5, TEXT_END]) == 2
    with pytest.raises(GrammarError, match="61"):
        matcher.accept(61)
