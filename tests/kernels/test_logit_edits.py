"""Edits of logits in the sampling kernels, against the host's sampler that has counted all tokens before a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from phonograph.core.sampling_params import SamplingParams
from phonograph.kernels.logit_edits import PROMPT_BIT, LogitEdits
from phonograph.kernels.torch.sampling import draw_keys as draw_keys_of
from phonograph.kernels.triton.sampling.sample import make_sample_scratch, sample
from phonograph.sampling.sampler import Sampler
from phonograph.sampling.slot_edits import SlotEdits

VOCAB, ENDS, PROMPT = 90, [7, 88], [3, 3, 50, 61]
DRAFTS = [3, 32, 33, 61, 77]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": -1.0},
    {"temperature": 0.8, "repetition_penalty": 1.7},
    {"temperature": 1.0, "top_k": 8, "frequency_penalty": 1.1, "logit_bias": {3: 2.5, 40: 2.5, 41: -1.25, 7: 9.0}},
    {"temperature": 0.9, "top_p": 0.8, "min_tokens": 3, "logit_bias": {7: 40.0, 88: 39.5, 12: 39.0}},
    {"temperature": 0.0, "min_tokens": 9, "logit_bias": {88: 1e3}},
    {"temperature": 1.0, "min_p": 0.2, "presence_penalty": 1.0, "logit_bias": {token: -np.inf for token in range(70)}},
    {"temperature": 1.0},
]


class Decodes:
    """Sequences with one row of logits each, or with one more for each draft, and their slots on the device."""

    def __init__(self, num_drafts: int, dtype: torch.dtype, device: torch.device, kinds: list[dict[str, Any]]) -> None:
        rng = np.random.default_rng(num_drafts)
        number, self.num_drafts = len(kinds), num_drafts
        self.params = [SamplingParams(seed=seed, **kind) for seed, kind in enumerate(kinds)]
        self.slots = rng.permutation(number + 1)[:number].tolist()
        self.outputs = [rng.integers(0, VOCAB, rng.integers(0, 6)).tolist() for _ in kinds]
        # Drafts repeat tokens, of the output and of one another.
        self.drafts = [rng.choice(DRAFTS, rng.integers(0, num_drafts + 1)).tolist() for _ in kinds]
        self.owners = np.repeat(np.arange(number), [1 + len(drafts) for drafts in self.drafts])
        self.places = np.concatenate([np.arange(1 + len(drafts)) for drafts in self.drafts])
        logits = rng.normal(0, 0.5, (len(self.owners), VOCAB))
        logits[:, DRAFTS] += 6.0  # so that what they are reduced by decides
        self.logits = torch.from_numpy(logits).to(device, dtype)
        # Rows need not stand at the beginning of the step.
        tokens = [token for output, drafts in zip(self.outputs, self.drafts, strict=True) for token in (5, *drafts)]
        self.input_ids = torch.tensor([1, 1, *tokens], dtype=torch.int32, device=device)
        self.edits = SlotEdits(max_num_seqs=number + 1, vocab_size=VOCAB, device=device)
        self.edits.words.fill_(-1)
        self.sampler = Sampler(max_num_seqs=number + 1, vocab_size=VOCAB, device=torch.device("cpu"), seed=0)
        self.sampler.edits = self.edits
        for slot, params, output in zip(self.slots, self.params, self.outputs, strict=True):
            self.sampler.load(slot, params, PROMPT, output, ENDS, 0)

    def host(self) -> list[int]:
        """Return the token of each row by a sampler that is loaded with all tokens before it."""
        tokens: list[int] = []
        for row, owner in enumerate(self.owners):
            output = self.outputs[owner] + self.drafts[owner][: self.places[row]]
            sampler = Sampler(max_num_seqs=1, vocab_size=VOCAB, device=torch.device("cpu"), seed=0)
            sampler.load(0, self.params[owner], PROMPT, output, ENDS, 0)
            tokens += sampler.sample(self.logits[row : row + 1].cpu(), [0], [len(output)]).token_ids
        return tokens

    def device(self, listed: list[int] | None = None) -> list[int]:
        """Return the token of each row by the kernels, -9 for rows that are not listed."""
        device, owners = self.logits.device, self.owners
        slots = np.array(self.slots)[owners]
        parameters = self.sampler.kernel_parameters(slots)
        draws = np.array([len(self.outputs[owner]) for owner in owners]) + self.places
        keys = draw_keys_of(torch.from_numpy(parameters.stream_keys_N), torch.from_numpy(draws))
        kinds = parameters.edits_N * np.where(draws < parameters.min_tokens_N, 2, 1)

        def to_device(array: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.from_numpy(np.asarray(array)).to(device, dtype)

        tokens = torch.full((len(owners),), -9, dtype=torch.int32, device=device)
        state = torch.zeros(len(self.slots) + 1, dtype=torch.int32, device=device)
        sample(
            self.logits,
            to_device(slots),
            to_device(parameters.temperature_N, torch.float32),
            to_device(parameters.top_k_N),
            to_device(parameters.top_p_N, torch.float32),
            to_device(parameters.min_p_N, torch.float32),
            keys.to(device),
            make_sample_scratch(len(owners), VOCAB, device),
            tokens,
            state,
            state.clone(),
            to_device(draws + len(PROMPT)),
            rows_G=None if listed is None else to_device(listed),
            edits=LogitEdits(
                words=self.edits.words,
                biases=self.edits.biases,
                factors=self.edits.factors,
                edits=to_device(kinds),
                row_slots=to_device(slots),
                logits_rows=to_device(np.arange(len(owners)) + 2, torch.int64),
                input_ids=self.input_ids,
            ),
            most_drafts=self.num_drafts,
        )
        return tokens.tolist()

    def counts(self) -> np.ndarray:
        """Return the counted tokens of each sequence, int [N, V]; those of one without edits are -1."""
        words = self.edits.words[self.slots].cpu().numpy()
        return np.where(words == -1, -1, words & (1 << PROMPT_BIT) - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_a_row_sees_all_tokens_before_it(num_drafts: int, dtype: torch.dtype, device: torch.device) -> None:
    made = Decodes(num_drafts, dtype, device, KINDS * 2)
    before, tokens = made.counts(), made.device()
    assert tokens == made.host()
    assert len({*tokens}) > 3 and len(tokens) >= 14 + num_drafts
    # With drafts `accept` counts what is kept.
    expected = before.copy()
    if not num_drafts:
        edited = [row for row in range(len(KINDS) * 2) if row % len(KINDS) < len(KINDS) - 1]
        expected[edited, np.array(tokens)[edited]] += 1
    assert (made.counts() == expected).all()


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_rows_that_are_listed(num_drafts: int, device: torch.device) -> None:
    made = Decodes(num_drafts, torch.float32, device, KINDS)
    expected, host = made.counts(), made.host()
    rows = [int(np.flatnonzero(made.owners == owner)[-1]) for owner in (1, 4, 6)]
    tokens = made.device([rows[0], -1, *rows[1:]])
    assert [token for token in tokens if token != -9] == [host[row] for row in rows]
    for owner, row in ((1, rows[0]), (4, rows[1])):
        expected[owner, tokens[row]] += not num_drafts
    assert (made.counts() == expected).all()


def test_edits_keep_all_bits_of_logits(device: torch.device) -> None:
    """A bias below the spacing of 16-bit logits decides."""
    kinds = [
        {"temperature": temperature, "top_k": top_k, "logit_bias": {30: 1e-3}}
        for temperature, top_k in ((0, 0), (1, 1))
    ]
    made = Decodes(0, torch.float16, device, kinds)
    made.logits.fill_(20.0)
    assert made.device() == [30, 30] == made.host()


def test_a_token_that_is_banned_everywhere_is_none(device: torch.device) -> None:
    bans = {token: -np.inf for token in range(VOCAB) if token not in ENDS}
    made = Decodes(0, torch.float32, device, [{"temperature": 0.0, "min_tokens": 9, "logit_bias": bans}])
    before = made.counts()
    assert made.device() == [-1] == made.host() and (made.counts() == before).all()


def test_slots_are_loaded_anew(device: torch.device) -> None:
    edits = SlotEdits(max_num_seqs=2, vocab_size=VOCAB, device=device)
    loaded = SamplingParams(presence_penalty=1.0, logit_bias={5: 1.0}, min_tokens=2)
    assert edits.load(1, loaded, PROMPT, [9, 9, 3], ENDS)
    words = edits.words[1].tolist()
    assert (words[9], words[3], words[50], words[7], words[5]) == (2, 1 + (1 << 20), 1 << 20, 1 << 21, 1 << 22)
    assert edits.load(1, SamplingParams(frequency_penalty=0.5), [4], [], ENDS)
    assert edits.words[1].nonzero().flatten().tolist() == [4] and edits.factors[1].tolist() == [1.0, 0.0, 0.5, 0.0]
    for params, ends in ((SamplingParams(), ENDS), (SamplingParams(min_tokens=3), [])):
        assert not edits.load(1, params, PROMPT, [9], ends)
    assert not edits.words[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"top_k": 6}])
def test_draws_follow_the_penalized_distribution(settings: dict[str, Any], device: torch.device) -> None:
    """Chi-square over the tokens behind a draft, with a key for each row."""
    number = 2000
    params = {"temperature": 1.0, "frequency_penalty": 0.7, "logit_bias": {11: 0.5}, **settings}
    made = Decodes(0, torch.float32, device, [params] * number)
    made.outputs = [[3, 3, 11] for _ in range(number)]
    for slot, one in zip(made.slots, made.params, strict=True):
        made.sampler.load(slot, one, PROMPT, [3, 3, 11], ENDS, 0)
    made.logits.fill_(-30.0)
    made.logits[:, [3, 11, 20, 80]] = torch.tensor([1.0, 0.5, 0.0, 0.2], device=device)
    logits = np.array([1.0 - 1.4, 0.5 + 0.5 - 0.7, 0.0, 0.2])
    expected = number * np.exp(logits) / np.exp(logits).sum()
    tokens = made.device()
    counts = np.array([tokens.count(token) for token in (3, 11, 20, 80)])
    assert counts.sum() == number
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # p = 0.001, 3 degrees
