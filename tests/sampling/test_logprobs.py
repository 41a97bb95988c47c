"""Reported log-probabilities against float64, and the memory bound of those of prompts."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from phonograph.core.batch import NewSequence, ScheduledBatch, SlotFailure, TokenLogprobs
from phonograph.core.sampling_params import SamplingParams
from phonograph.errors import RequestError
from phonograph.runner.sequences import Sequences
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.logprobs import RAW_LOGPROBS, prompt_logprobs, step_prompt_logprobs, token_logprobs
from phonograph.sampling.sampler import Sampler


def check(found: TokenLogprobs, logits: torch.Tensor, token_id: int, top: int) -> None:
    """Against a float64 softmax and a stable sort."""
    x = logits.double().numpy()
    exact = x - (x.max() + math.log(np.exp(x - x.max()).sum()))
    best = np.argsort(-x, kind="stable")[:top].tolist()
    assert found.token_ids == [token_id, *best]
    assert found.logprobs == pytest.approx(exact[found.token_ids].tolist(), abs=2e-5)
    assert found.ranks == [1 + int((x > x[i]).sum()) for i in found.token_ids]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 17, 1000, 1021])
def test_token_logprobs(dtype: torch.dtype, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(9, vocab_size, generator=generator) * 4).to(dtype)
    logits[2:4] = logits[2:4].round()  # equal logits
    logits[4, 1:] = -math.inf
    token_ids = torch.randint(0, vocab_size, (9,), generator=generator)
    token_ids[4] = 0
    tops = [0, 1, 5, 1024, 2, 0, 20, 3, 7]
    for found, again in zip(
        token_logprobs(logits, token_ids, tops),
        token_logprobs(logits, token_ids, [*tops[:3], 5000, *tops[4:]]),
        strict=True,
    ):
        assert found == again
    for i, found in enumerate(token_logprobs(logits, token_ids, tops)):
        check(found, logits[i], int(token_ids[i]), min(tops[i], vocab_size))


def test_they_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(3, 203, generator=torch.Generator().manual_seed(0)) * 2
    sampler = Sampler(max_num_seqs=5, vocab_size=203, device=torch.device("cpu"), seed=0)
    edits = {"logit_bias": {5: 4.0}, "repetition_penalty": 2.0, "min_tokens": 4}
    sampler.load(4, SamplingParams(temperature=0.3, top_k=5, logprobs=6, **edits), [1, 5], [], [0, 1], 0)
    sampler.load(0, SamplingParams(temperature=0, logprobs=None), [], [], [], 0)
    sampler.load(2, SamplingParams(temperature=1.7, logprobs=0), [], [], [], 0)
    sampled = sampler.sample(logits, [4, 0, 2], [0, 0, 0])
    assert sampled.logprobs.keys() == {4, 2}
    check(sampled.logprobs[4], logits[0], sampled.token_ids[0], 6)
    check(sampled.logprobs[2], logits[2], sampled.token_ids[2], 0)
    sampler.load(0, SamplingParams(temperature=0, logprobs=-1), [], [], [], 0)
    whole = sampler.sample(logits, [4, 0, 2], [0, 0, 0])
    check(whole.logprobs[0], logits[1], whole.token_ids[1], 203)
    check(whole.logprobs[4], logits[0], whole.token_ids[0], 6)


def test_listed_tokens_are_reported_in_place_of_the_most_likely_ones() -> None:
    logits = (torch.randn(4, 203, generator=torch.Generator().manual_seed(3)) * 2).to(torch.bfloat16)
    logits[1:] = logits[1:].round()  # equal logits
    logits[2, 7] = -math.inf
    sampler = Sampler(max_num_seqs=4, vocab_size=203, device=torch.device("cpu"), seed=0)
    lists = {0: [202, 0, 5], 2: [7], 3: [*range(128)]}
    for slot in range(4):
        listed = {"logprob_token_ids": lists[slot]} if slot in lists else {"logprobs": 2}
        sampler.load(slot, SamplingParams(temperature=0, **listed), [1], [], [], 0)
    sampled = sampler.sample(logits, [0, 1, 2, 3], [0] * 4)
    check(sampled.logprobs[1], logits[1], sampled.token_ids[1], 2)
    for slot, token_ids in lists.items():
        found, x = sampled.logprobs[slot], logits[slot].double()
        assert found.token_ids == [sampled.token_ids[slot], *token_ids]
        assert found.logprobs == pytest.approx(x.log_softmax(-1)[found.token_ids].tolist(), abs=2e-5)
        assert found.ranks == [1 + int((x > x[i]).sum()) for i in found.token_ids]
    sampler.clear(0)
    sampler.load(0, SamplingParams(temperature=0, logprobs=1), [1], [], [], 0)
    check(sampler.sample(logits[:1], [0], [0]).logprobs[0], logits[0], sampled.token_ids[0], 1)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"logprob_token_ids": []}, "must have 1 to 128 token ids"),
        ({"logprob_token_ids": range(129)}, "logprob_token_ids='129 token ids': must have 1 to 128"),
        (
            {"logprob_token_ids": [3, 4], "logprobs": 1},
            "logprobs=1: contradicts logprob_token_ids, which lists 2 tokens",
        ),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids=-1: must be an integer >= 0"),
        ({"logprob_token_ids": "34"}, "must be a list of token ids"),
    ],
)
def test_wrong_lists_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        SamplingParams(**values)
    params = SamplingParams(logprob_token_ids=[7, 7, 203])
    assert (params.logprob_token_ids, params.logprobs) == ((7, 203), 2)
    with pytest.raises(RequestError, match="logprob_token_ids=203: the model's token ids are 0 to 202"):
        params.check_vocabulary(203)


@pytest.mark.parametrize("top", [0, 4, -1])
@pytest.mark.parametrize("length", [0, 1, 2, 37])
def test_prompt_logprobs_in_chunks(top: int, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    weight = torch.randn(307, 24, generator=generator)
    hidden = torch.randn(length, 24, generator=generator)
    targets = torch.randint(0, 307, (length,), generator=generator).tolist()
    chunks: list[int] = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        chunks.append(rows.shape[0])
        return rows @ weight.T

    found = prompt_logprobs(hidden, head, targets, top, max_bytes=5 * (307 * 24 + 4 * 32))
    assert sum(chunks) == length
    assert max(chunks, default=0) == min(5 if top >= 0 else 2, max(length - 1, length and 1))
    for i, entry in enumerate(found):
        check(entry, hidden[i] @ weight.T, targets[i], 307 if top < 0 else top)


def test_prompt_logprobs_go_on_where_a_row_takes_more_than_their_memory() -> None:
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    calls: list[int] = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        assert len(calls) <= 4, "there is no progress"
        return rows

    found = prompt_logprobs(hidden, head, [3, 1, 0, 7], 2, max_bytes=1)
    assert calls == [1] * 4
    for row, token_id, entry in zip(hidden, [3, 1, 0, 7], found, strict=True):
        check(entry, row, token_id, 2)


@pytest.mark.parametrize(("vocab_size", "top"), [(5003, 0), (5003, 5), (5003, 1024), (1021, 1000)])
def test_prompt_logprobs_keep_to_their_memory(vocab_size: int, top: int) -> None:
    """Peak of live bytes while it runs, beyond what it was given."""
    max_bytes = 1024**2
    hidden = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(vocab_size, 8, generator=torch.Generator().manual_seed(2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        prompt_logprobs(hidden, lambda rows: rows @ weight.T, [3] * 100, top, max_bytes=max_bytes)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert max_bytes // 4 < peak <= max_bytes


def test_a_step_reports_the_prompt_tokens_of_its_chunks_only() -> None:
    """Its sequences: a decode, a prompt's first chunk, one's last chunk, one without logprobs, and one that fails."""
    sizes = [(1, 4, 5, 1), (3, 0, 9, 2), (4, 5, 9, 0), (3, 0, 9, None), (2, 0, 9, 1)]
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(sum(size[0] for size in sizes), 30, generator=generator)
    live = {
        slot: NewSequence(
            slot=slot,
            request_id="r",
            token_ids=torch.randint(0, 30, (12,), generator=generator).tolist(),
            prompt_len=prompt_len,
            num_computed=0,
            params=SamplingParams(prompt_logprobs=top),
        )
        for slot, (_, _, prompt_len, top) in enumerate(sizes)
    }
    batch = ScheduledBatch(slots=[0, 1, 2, 3, 4], query_lens=[s[0] for s in sizes], context_lens=[s[1] for s in sizes])

    def head(rows: torch.Tensor) -> torch.Tensor:
        if torch.equal(rows[0], hidden[11]):
            raise ValueError("a test")
        return rows

    failures = SlotFailures()
    found = step_prompt_logprobs(batch, live, hidden, head, failures)
    assert failures.by_slot == {4: SlotFailure("log-probabilities of the prompt", "ValueError: a test")}
    # A decode predicts no prompt token, and neither does the last row of a prompt.
    assert {slot: len(entries) for slot, entries in found.items()} == {1: 3, 2: 3}
    for slot, start, first in ((1, 1, 1), (2, 4, 6)):
        for place, entry in enumerate(found[slot]):
            check(entry, hidden[start + place], live[slot].token_ids[first + place], sizes[slot][3] or 0)


@pytest.mark.parametrize("top", [None, 0])
@pytest.mark.parametrize("prompt_len", [1, 2, 5])
def test_a_step_scores_prompts_exactly_where_a_chunk_predicts_one_of_their_tokens(
    prompt_len: int, top: int | None
) -> None:
    """Next to a prompt without log-probabilities, for chunks of one token from any position on."""
    new = [
        NewSequence(
            slot=slot,
            request_id="r",
            token_ids=list(range(8)),
            prompt_len=prompt_len,
            num_computed=0,
            params=SamplingParams(prompt_logprobs=top if slot else None),
        )
        for slot in (0, 1)
    ]
    failures, sequences = SlotFailures(), Sequences(MagicMock(spec=Sampler, scores=RAW_LOGPROBS), max_num_seqs=2)
    sequences.take_over(ScheduledBatch(new=new), failures)
    for context_len in range(7):
        batch = ScheduledBatch(slots=[0, 1], query_lens=[1, 1], context_lens=[0, context_len])
        found = sequences.prompt_logprobs(batch, torch.randn(2, 30), lambda rows: rows, failures)
        assert sequences.scores_prompts(batch) == bool(found) == (top is not None and context_len + 1 < prompt_len)
    sequences.take_over(ScheduledBatch(freed=[1]), failures)
    assert not sequences.scores_prompts(ScheduledBatch(slots=[1], query_lens=[1], context_lens=[0]))
    assert not failures.by_slot
