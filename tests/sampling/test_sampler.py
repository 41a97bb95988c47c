"""The sampler as the runner uses it: batches, slots, preemption, masks, faults."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from phonograph.core.sampling_params import SamplingParams
from phonograph.sampling.sampler import Sampler

CPU = torch.device("cpu")


def make_sampler(vocab_size: int, max_num_seqs: int = 32, seed: int | None = 0) -> Sampler:
    return Sampler(max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=CPU, seed=seed)


def random_logits(rows: int, vocab_size: int, seed: int, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


VARIETY: list[dict[str, object]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "repetition_penalty": 1.5},
    {},
    {"temperature": 0.5, "logprobs": 0},
    {"temperature": 3.0, "min_p": 0.05},
    {"top_k": 1},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 3, "min_p": 0.3, "presence_penalty": 1.0},
    {"top_k": 1100},
    {"top_p": 0.5},
    {"top_p": 0.99, "temperature": 2.0},
    {"top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.7, "logprobs": 2},
    {"logit_bias": {4: 3.0, 700: -math.inf}},
    {"min_tokens": 8, "temperature": 1.5},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1021, 1500])
def test_a_request_gets_the_same_tokens_in_any_batch(dtype: torch.dtype, vocab_size: int) -> None:
    requests = [SamplingParams(seed=i // 2, **settings) for i, settings in enumerate(VARIETY)]
    steps = 5
    logits = random_logits(len(requests) * steps, vocab_size, 1).view(steps, len(requests), vocab_size).to(dtype)

    def load(sampler: Sampler, slot: int, i: int, output: list[int]) -> None:
        sampler.load(slot, requests[i], [1, 2, 2, i], output, [0, 5], i % 2)

    alone: list[list[int]] = []
    alone_logprobs: list[list[object]] = []
    for i in range(len(requests)):
        sampler = make_sampler(vocab_size)
        load(sampler, 0, i, [])
        results = [sampler.sample(logits[step, i : i + 1], [0], [step]) for step in range(steps)]
        alone.append([result.token_ids[0] for result in results])
        alone_logprobs.append([result.logprobs.get(0) for result in results])
    assert len({tuple(tokens) for tokens in alone}) > len(requests) // 2

    rng = random.Random(2)
    for _ in range(6):
        sampler = make_sampler(vocab_size)
        chosen = rng.sample(range(len(requests)), rng.randint(2, len(requests)))
        slot_of = dict(zip(chosen, rng.sample(range(32), len(chosen)), strict=True))
        for i in chosen:
            load(sampler, slot_of[i], i, [])
        for step in range(steps):
            for i in rng.sample(chosen, 2):  # preempted, and loaded again elsewhere or here
                sampler.clear(slot_of[i])
                slot_of[i] = rng.choice([slot for slot in range(32) if slot not in slot_of.values()] + [slot_of[i]])
                load(sampler, slot_of[i], i, alone[i][:step])
            rng.shuffle(chosen)
            result = sampler.sample(logits[step, chosen], [slot_of[i] for i in chosen], [step] * len(chosen))
            assert result.token_ids == [alone[i][step] for i in chosen]
            assert min(result.token_ids) >= 0 and not result.failures
            for i in chosen:
                found, expected = result.logprobs.get(slot_of[i]), alone_logprobs[i][step]
                assert (found is None) == (requests[i].logprobs is None)
                if found is not None:
                    assert (found.token_ids, found.ranks) == (expected.token_ids, expected.ranks)
                    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_draws_what_the_cpu_draws(dtype: torch.dtype) -> None:
    """The integers are the same; their logarithms may differ in the last bit, which decides no draw here."""
    logits = random_logits(len(VARIETY), 1500, 15).to(dtype)
    logits[0] = 1.0  # all equal
    tokens: list[list[list[int]]] = []
    for device in (CPU, torch.device("cuda")):
        sampler = Sampler(max_num_seqs=32, vocab_size=1500, device=device, seed=0)
        for slot, settings in enumerate(VARIETY):
            sampler.load(slot, SamplingParams(seed=slot, **settings), [1, 2], [3], [0, 5], 0)
        rows = logits.to(device)
        lengths = range(1, 12)
        tokens.append([sampler.sample(rows, range(len(VARIETY)), [n] * len(VARIETY)).token_ids for n in lengths])
    assert tokens[0] == tokens[1]


def test_logits_are_only_read() -> None:
    logits = random_logits(len(VARIETY), 1021, 3)
    before = logits.clone()
    sampler = make_sampler(1021)
    for slot, settings in enumerate(VARIETY):
        sampler.load(slot, SamplingParams(**settings), [1], [], [0], 0)
    sampler.sample(logits, range(len(VARIETY)), [0] * len(VARIETY))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_k": 1}, {"temperature": 0, "logit_bias": {0: 0.0}}])
def test_greedy_takes_the_first_of_equals(dtype: torch.dtype, settings: dict[str, object]) -> None:
    logits = random_logits(40, 1000, 4).clamp_(max=3.0).to(dtype)  # many rows share their maximum
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sum(row.count(max(row)) > 1 for row in logits.tolist()) > 30
    sampler = make_sampler(1000, 40)
    for slot in range(40):
        sampler.load(slot, SamplingParams(**settings), [1], [], [], 0)
    assert sampler.sample(logits, range(40), [0] * 40).token_ids == expected


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-8, 0.001])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(30, 1021, 5, spread=50.0)
    sampler = make_sampler(1021)
    for top_p in (1.0, 0.9):
        for slot in range(30):
            sampler.load(
                slot, SamplingParams(temperature=temperature, top_p=top_p, logit_bias={9: -math.inf}), [], [], [], 0
            )
        expected = logits.index_fill(1, torch.tensor([9]), -math.inf).argmax(dim=-1).tolist()
        assert sampler.sample(logits, range(30), [0] * 30).token_ids == expected


@pytest.mark.parametrize("settings", [{}, {"top_k": 50}, {"top_p": 0.99}])
def test_huge_temperature_is_uniform_over_what_is_allowed(settings: dict[str, object]) -> None:
    sampler = make_sampler(11, 500)
    for slot in range(500):
        sampler.load(slot, SamplingParams(temperature=1e300, logit_bias={4: -math.inf}, **settings), [], [], [], 0)
    sampled = sampler.sample(random_logits(500, 11, 6), range(500), [0] * 500)
    assert min(sampled.token_ids) >= 0
    assert set(sampled.token_ids) == set(range(11)) - {4}


@pytest.mark.parametrize("settings", [{}, {"top_k": 50}, {"top_p": 0.99}])
def test_min_p_of_one_keeps_the_equals_of_the_best(settings: dict[str, object]) -> None:
    logits = random_logits(1, 101, 14)
    logits[:, [5, 60, 100]] = 9.0
    sampler = make_sampler(101, 100)
    for slot in range(100):
        sampler.load(slot, SamplingParams(min_p=1.0, **settings), [], [], [], 0)
    assert set(sampler.sample(logits.expand(100, -1), range(100), [0] * 100).token_ids) == {5, 60, 100}


@pytest.mark.parametrize("settings", VARIETY)
def test_banned_tokens_in_the_logits_are_never_drawn(settings: dict[str, object]) -> None:
    logits = random_logits(30, 1200, 7)
    allowed = [3, 500, 501, 1199]
    banned = torch.full_like(logits, -math.inf)
    banned[:, allowed] = logits[:, allowed]
    sampler = make_sampler(1200)
    for slot in range(30):
        sampler.load(slot, SamplingParams(**settings), [1], [], [0], 0)
    sampled = sampler.sample(banned, range(30), [0] * 30)
    assert min(sampled.token_ids) >= 0
    assert set(sampled.token_ids) <= set(allowed)


@pytest.mark.parametrize("fault", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_row_without_a_token_takes_no_other_down(fault: float) -> None:
    count = len(VARIETY)
    requests = [SamplingParams(seed=i, **settings) for i, settings in enumerate(VARIETY)]
    logits = random_logits(2 * count, 1500, 8)

    def sample(rows: torch.Tensor) -> tuple[list[int], list[int], set[int]]:
        sampler = make_sampler(1500)
        for slot in range(2 * count):
            sampler.load(slot, requests[slot % count], [1], [], [0], 0)
        sampled = sampler.sample(rows, range(2 * count), [0] * 2 * count)
        assert not sampled.failures
        return sampled.token_ids, [s for s in range(2 * count) if sampled.token_ids[s] < 0], set(sampled.logprobs)

    expected, none_invalid, with_logprobs = sample(logits)
    assert none_invalid == []
    broken = logits.clone()
    broken[1::2, slice(None) if fault == -math.inf else 77] = fault
    tokens, invalid, logprobs = sample(broken)
    assert invalid == list(range(1, 2 * count, 2))
    assert tokens[::2] == expected[::2]
    assert tokens[1::2] == [-1] * count
    assert logprobs == {slot for slot in with_logprobs if slot % 2 == 0}


@pytest.mark.parametrize("settings", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.9}, {"presence_penalty": -1.0}])
def test_min_tokens_masks_what_would_end_the_request(settings: dict[str, object]) -> None:
    """Even where the model, and a bias, want nothing else."""
    logits = random_logits(20, 101, 9)
    logits[:, [7, 100]] = 40.0
    sampler = make_sampler(101)
    for slot in range(20):
        params = SamplingParams(min_tokens=3, logit_bias={7: 50.0}, **settings)
        sampler.load(slot, params, [1], [], [7, 100, 7], 0)
    for length in range(5):
        ended = {token in (7, 100) for token in sampler.sample(logits, range(20), [length] * 20).token_ids}
        assert ended == {length >= 3}


def test_bias_of_one_slot_leaves_the_others_alone() -> None:
    logits = random_logits(3, 50, 10)
    sampler = make_sampler(50)
    greedy = logits.argmax(dim=-1).tolist()
    for slot, bias in enumerate(({}, {13: 100.0, greedy[1]: 3.0}, {})):
        sampler.load(slot, SamplingParams(temperature=0, logit_bias=bias), [], [], [], 0)
    assert sampler.sample(logits, [0, 1, 2], [0] * 3).token_ids == [greedy[0], 13, greedy[2]]
    sampler.clear(1)
    sampler.load(1, SamplingParams(temperature=0), [], [], [], 0)
    assert sampler.sample(logits, [0, 1, 2], [0] * 3).token_ids == greedy


def test_penalties_follow_the_tokens_sampled() -> None:
    """Greedy, step by step, against counts kept in Python; slots are reused with other histories."""
    vocab_size, rng = 31, random.Random(11)
    sampler = make_sampler(vocab_size, 4)
    changed = 0
    for round_ in range(6):
        requests = [
            SamplingParams(
                temperature=0,
                repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
                presence_penalty=rng.choice([0.0, 0.9, -0.4]),
                frequency_penalty=rng.choice([0.0, 0.5, -0.2]),
            )
            for _ in range(4)
        ]
        prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 6))] for _ in range(4)]
        outputs = [[rng.randrange(vocab_size) for _ in range(rng.choice([0, 3]))] for _ in range(4)]
        for slot in range(4):
            sampler.load(slot, requests[slot], prompts[slot], outputs[slot], [], 0)
        for step in range(12):
            order = rng.sample(range(4), 4)
            logits = random_logits(4, vocab_size, 100 * round_ + step, spread=1.0)
            sampled = sampler.sample(logits, order, [len(outputs[slot]) for slot in order])
            for row, slot in enumerate(order):
                values = logits[row].tolist()
                plain = values.index(max(values))
                for token in set(prompts[slot] + outputs[slot]):
                    penalty = requests[slot].repetition_penalty
                    values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
                for token in outputs[slot]:
                    values[token] -= requests[slot].frequency_penalty
                for token in set(outputs[slot]):
                    values[token] -= requests[slot].presence_penalty
                expected = values.index(max(values))
                assert sampled.token_ids[row] == expected
                changed += expected != plain
                outputs[slot].append(expected)
    assert changed > 25


def test_seeds() -> None:
    logits = random_logits(1, 1000, 12).expand(4, -1)

    def tokens(seed: int | None, requests: list[SamplingParams], indices: list[int]) -> list[list[int]]:
        sampler = make_sampler(1000, seed=seed)
        for slot, (params, index) in enumerate(zip(requests, indices, strict=True)):
            sampler.load(slot, params, [], [], [], index)
        steps = [sampler.sample(logits, range(4), [draw] * 4).token_ids for draw in range(10)]
        return [list(column) for column in zip(*steps, strict=True)]

    unseeded, seeded = [SamplingParams()] * 4, [SamplingParams(seed=5)] * 4
    assert tokens(1, unseeded, [0] * 4) == tokens(1, unseeded, [0] * 4)
    assert tokens(1, unseeded, [0] * 4) != tokens(2, unseeded, [0] * 4)
    assert tokens(None, unseeded, [0] * 4) != tokens(None, unseeded, [0] * 4)
    assert len({tuple(row) for row in tokens(1, unseeded, [0] * 4)}) == 4
    zero = [SamplingParams(seed=0)] * 4
    assert tokens(1, zero, [0] * 4) == tokens(2, zero, [0] * 4)
    # A request's own seed does not care for the engine's; its samples differ by their index alone.
    assert tokens(1, seeded, [0, 1, 2, 0]) == tokens(None, seeded, [0, 1, 2, 0])
    rows = tokens(1, seeded, [0, 1, 2, 0])
    assert rows[0] == rows[3]
    assert len({tuple(row) for row in rows}) == 3


def test_a_cleared_slot_keeps_nothing() -> None:
    logits = random_logits(1, 64, 13)
    sampler = make_sampler(64, 2)
    used = SamplingParams(
        temperature=2.0, top_k=3, min_p=0.2, logprobs=4, repetition_penalty=3.0, logit_bias={5: 90.0}, min_tokens=9
    )
    sampler.load(0, used, list(range(64)), [1], [int(logits.argmax())], 0)
    sampler.sample(logits, [0], [1])
    sampler.clear(0)
    sampler.clear(0)
    parameters = sampler.kernel_parameters(np.array([0]))
    assert not (parameters.temperature_N[0] or parameters.edits_N[0] or parameters.min_tokens_N[0])
    assert sampler.logprobs[0] == -1
    sampler.load(1, SamplingParams(temperature=1.0), [], [], [], 0)
    sampled = sampler.sample(logits.expand(2, -1), [0, 1], [0, 0])
    assert sampled.token_ids[0] == int(logits.argmax()) and sampled.logprobs == {}
    sampler.load(0, SamplingParams(temperature=0), [], [], [], 0)
    sampled = sampler.sample(logits, [0], [0])
    assert sampled.token_ids == [int(logits.argmax())]
    assert sampled.logprobs == {}
    sampler.load(0, SamplingParams(temperature=0, presence_penalty=2.0), [], [], [], 0)
    assert sampler.sample(logits, [0], [0]).token_ids == [int(logits.argmax())]


def test_nothing_to_sample() -> None:
    sampled = make_sampler(10).sample(torch.empty(0, 10), [], [])
    assert (sampled.token_ids, sampled.logprobs, sampled.failures) == ([], {}, {})
