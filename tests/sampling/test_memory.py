"""The memory plan's number for sampling is at least what the sampler allocates, counted by the allocator's events."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ladders import Ladder
from torch.profiler import ProfilerActivity, profile

from phonograph.core.sampling_params import SamplingParams
from phonograph.sampling import sampler as sampler_module
from phonograph.sampling.logprobs import ScoreKind
from phonograph.sampling.sampler import Sampler

SLOTS, VOCAB = 12, 40_000
KINDS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_p": 0.9999, "temperature": 50.0},
    {"top_k": 2000},
    {"top_k": 50, "min_p": 0.1},
    {"temperature": 1.0},
    {"temperature": 0.0, "logprobs": 1024},
]


@pytest.mark.parametrize("chunk_rows", [1, 4, SLOTS])
@pytest.mark.parametrize("kind", [*KINDS, {"top_p": 0.9, "logprobs": 1024}, None])
def test_no_more_is_allocated(kind: dict[str, Any] | None, chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sampler_module._CHUNK_LOGITS, "cpu", chunk_rows * VOCAB)
    scores = ScoreKind(processed=True)
    sampler = Sampler(max_num_seqs=SLOTS, vocab_size=VOCAB, device=torch.device("cpu"), seed=0, scores=scores)
    logits = torch.randn(SLOTS, VOCAB)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for slot in range(SLOTS):
            settings = KINDS[slot % len(KINDS)] if kind is None else kind
            params = SamplingParams(**settings, presence_penalty=1.0, logit_bias={7: 1.0})
            sampler.load(slot, params, [1, 2], [], [5], 0, Ladder(5, VOCAB, VOCAB - 1))
        sampled = sampler.sample(logits.clone(), range(SLOTS), [1] * SLOTS)
    assert not sampled.failures and min(sampled.token_ids) >= 0
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():  # pyright: ignore[reportOptionalMemberAccess]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    planned = Sampler.nbytes(max_num_seqs=SLOTS, vocab_size=VOCAB, device_type="cpu", logits_bytes=4)
    assert peak <= planned, f"{(peak - planned) / (chunk_rows * VOCAB):.1f} bytes a logit of a chunk more than planned"
    assert peak > SLOTS * VOCAB * 5, "the counts of penalties are there"


def test_the_plan_of_a_large_server() -> None:
    planned = Sampler.nbytes(max_num_seqs=256, vocab_size=128_256, device_type="cuda", logits_bytes=2)
    assert 164e6 < planned < 700e6
