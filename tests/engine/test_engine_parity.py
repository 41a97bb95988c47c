"""The whole engine against transformers: every family, ragged, chunked, prefix-cached, in graphs."""

from __future__ import annotations

import pytest
import torch
from checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint

from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM

OUTPUT_TOKENS = 24


def _prompts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(3, VOCAB_SIZE, (40,), generator=generator).tolist()
    tails = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (1, 7, 33, 60)]
    return [shared + tail for tail in tails] + [tails[1], tails[3][:1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logits_of_every_position(family: str, tmp_path) -> None:
    reference = make_checkpoint(family, tmp_path)
    # Chunks of 24 tokens cut every longer prompt; four sequences share a step; blocks of 8 are found again.
    llm = LLM(
        model=str(tmp_path),
        max_num_seqs=4,
        max_num_batched_tokens=24,
        block_size=8,
        num_kv_blocks=160,
        max_cudagraph_capture_size=24,
    )
    prompts = _prompts(1)
    greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=VOCAB_SIZE)
    outputs = llm.generate(prompts, greedy)
    again = llm.generate(prompts, greedy)
    scored = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=VOCAB_SIZE))

    assert "eager" not in llm.step_counts
    assert {"full decode", "full mixed"} <= set(llm.step_counts)
    assert any(output.num_cached_tokens >= 40 for output in again), "the second run must find prefixes"
    for prompt, first, second, score in zip(prompts, outputs, again, scored, strict=True):
        completion = first.outputs[0]
        with torch.inference_mode():
            whole = torch.tensor([prompt + completion.token_ids])
            logits = reference(whole).logits[0].double()
        expected = logits.log_softmax(-1)
        greedy_tokens = logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
        assert completion.token_ids == greedy_tokens
        assert second.outputs[0].token_ids == greedy_tokens
        for run in (completion, second.outputs[0]):
            assert run.logprobs is not None
            _assert_rows_equal(run.logprobs, expected[len(prompt) - 1 : -1])
        assert score.prompt_logprobs is not None and score.prompt_logprobs[0] is None
        _assert_rows_equal(score.prompt_logprobs[1:], expected[: len(prompt) - 1])


def _assert_rows_equal(rows, expected_TV: torch.Tensor) -> None:
    assert len(rows) == len(expected_TV)
    for row, expected_V in zip(rows, expected_TV, strict=True):
        got_V = torch.full((VOCAB_SIZE,), float("nan"), dtype=torch.float64)
        got_V[row.token_ids] = torch.tensor(row.logprobs, dtype=torch.float64)
        assert (got_V - expected_V).abs().max() <= 1e-4
