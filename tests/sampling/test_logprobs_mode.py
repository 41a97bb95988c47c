"""All values of `logprobs_mode` against float64, by the host's sampler, and in whole engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exact_scores import END, KINDS, MODES, PENALTIES, VOCAB, check_position, check_whole, exact_scores
from ladders import Ladder
from servers import EngineThread, serving

from phonograph import LLM, BeamSearchParams
from phonograph.config.server_config import ServerConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.outputs import RequestOutput
from phonograph.errors import ConfigError, RequestError
from phonograph.kernels.torch.sampling import Rows, filtered
from phonograph.sampling.accept import sample_runs
from phonograph.sampling.logprobs import ScoreKind, prompt_logprobs
from phonograph.sampling.sampler import Sampler
from phonograph.text.logprob_views import PositionLogprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_the_sampler_of_the_host(mode: str, dtype: torch.dtype) -> None:
    """Rows of all kinds together, some with a grammar, and runs of drafts of which some are right."""
    rng = np.random.default_rng(len(mode))
    params = [SamplingParams(seed=seed, **kind) for seed, kind in enumerate(KINDS * 2)]
    number = len(params)
    device = torch.device("cpu")
    sampler = Sampler(max_num_seqs=number, vocab_size=VOCAB, device=device, seed=0, scores=ScoreKind.named(mode))
    grammars = [Ladder(40, VOCAB, END) if index % 5 == 2 else None for index in range(number)]
    prompts = [rng.integers(0, VOCAB, 4).tolist() for _ in params]
    for slot, one in enumerate(params):
        sampler.load(slot, one, prompts[slot], [], [END], 0, grammars[slot])
    outputs: list[list[int]] = [[] for _ in params]
    found: list[list[Any]] = [[] for _ in params]
    rows: list[list[np.ndarray]] = [[] for _ in params]
    for _ in range(6):
        logits = torch.from_numpy(rng.normal(0, 2.5, (2 * number, VOCAB))).to(dtype)
        logits[:, END] = -6.0
        before = logits.clone()
        # The greedy rows have a draft that is right.
        drafts = logits.float().argmax(1).numpy()
        firsts, draws = np.arange(number) * 2, np.array([len(output) for output in outputs])
        runs = sample_runs(sampler, logits, firsts, np.full(number, 2), range(number), draws, drafts)
        assert torch.equal(logits, before) and not runs.failures
        for slot, tokens in enumerate(runs.token_ids):
            outputs[slot] += tokens
            found[slot] += runs.logprobs.get(slot, [])
            rows[slot] += [logits[2 * slot + place].float().numpy() for place in range(len(tokens))]
    assert {len(output) for output in outputs} >= {6, 12}
    for slot, one in enumerate(params):
        check_whole(mode, one, prompts[slot], outputs[slot], found[slot], rows[slot], grammars[slot])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("top", [0, 5, -1])
def test_prompts_have_raw_numbers(mode: str, top: int) -> None:
    generator = torch.Generator().manual_seed(top + 1)
    logits, targets = torch.randn(7, VOCAB, generator=generator) * 3, [5, 0, 99, 5, 7, 8, 9]
    listed = [[4], [5, 6], [-1, 7], [1], [2], [3], [4]]
    as_logits = ScoreKind.named(mode).as_logits
    plain = prompt_logprobs(logits, lambda rows: rows, targets, top, as_logits=as_logits, max_bytes=9000)
    both = prompt_logprobs(logits, lambda rows: rows, targets, top, listed, as_logits=as_logits)
    raw = mode.replace("processed", "raw")
    for row, target, one, other, more in zip(logits, targets, plain, both, listed, strict=True):
        exact = exact_scores(raw, row.numpy(), SamplingParams(), [], [])
        check_position(one, exact, target, top)
        assert other.token_ids == [*one.token_ids, *more]
        wanted = [exact[token] if token >= 0 else -np.inf for token in more]
        assert other.logprobs[len(one.logprobs) :] == pytest.approx(wanted, abs=2e-5)


def made_by(mode: str, prompts: list[list[int]], params: list[SamplingParams], **settings: Any) -> list[RequestOutput]:
    with LLM("demo", device="cpu", max_num_seqs=3, max_model_len=64, logprobs_mode=mode, **settings) as llm:
        if mode.endswith("logits"):
            with pytest.raises(RequestError, match=f"logprobs_mode='{mode}': a beam search adds up"):
                llm.beam_search("1 2 3", BeamSearchParams(beam_width=2, max_tokens=2))
        return llm.generate(prompts, params, use_tqdm=False)


def test_an_engine() -> None:
    """Raw logits of one engine give the numbers of the others, with and without drafts."""
    rng = np.random.default_rng(7)
    edits: dict[str, Any] = {"logit_bias": {int(token): 3.0 for token in rng.integers(0, 2000, 9)}, **PENALTIES}
    allowed = sorted({*rng.integers(5, 2000, 90).tolist()})
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50, **edits},
        {"temperature": 1.3, "allowed_token_ids": allowed, "min_p": 0.01, **edits},
        {"temperature": 0.0, **edits},
    ]
    rest: dict[str, Any] = {"logprobs": -1, "prompt_logprobs": -1, "max_tokens": 5, "ignore_eos": True}
    params = [SamplingParams(seed=3, **kind, **rest) for kind in kinds]
    prompts = [[7, 8, 9, 7, 8, 9, 7, 8], [70, 80, 90], [11, 12] * 4]
    raw = made_by("raw_logits", prompts, params)
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    for mode, settings in (
        ("raw_logprobs", {}),
        ("processed_logprobs", {"speculative_config": speculation}),
        ("processed_logits", {}),
    ):
        found = made_by(mode, prompts, params, **settings)
        for one, other, prompt, asked in zip(raw, found, prompts, params, strict=True):
            completion = other.outputs[0]
            assert completion.token_ids == one.outputs[0].token_ids
            mask = None
            for place, (before, after) in enumerate(
                zip(one.outputs[0].logprobs or (), completion.logprobs or (), strict=True)
            ):
                logits = whole_row(before)
                if asked.allowed_token_ids:
                    mask = np.isin(np.arange(len(logits)), allowed)
                done = completion.token_ids[:place]
                exact = exact_scores(mode, logits, asked, prompt, done, allowed_V=mask)
                assert np.allclose(whole_row(after), exact, rtol=1e-5, atol=2e-4)
            assert completion.cumulative_logprob is not None and np.isfinite(completion.cumulative_logprob)
            scored = list(zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True))
            assert len(scored) == len(prompt) and scored[0] == (None, None)
            for before, after in scored[1:]:
                assert before is not None and after is not None
                exact = exact_scores(mode.replace("processed", "raw"), whole_row(before), asked, [], [])
                assert np.allclose(whole_row(after), exact, rtol=1e-5, atol=2e-4)


def whole_row(position: PositionLogprobs) -> np.ndarray:
    row = np.full(len(position), np.nan)
    row[position.token_ids] = position.logprobs
    return row


def test_a_server() -> None:
    """Tokens that a filter removes have the least number that JSON gets here, as in vLLM."""
    body = {"model": "demo", "prompt": "1 2 3", "max_tokens": 2, "temperature": 1.0, "top_k": 2, "logprobs": 5}
    with EngineThread(logprobs_mode="processed_logits") as thread, serving(thread, ServerConfig()) as server:
        (choice,) = server.post("/v1/completions", body).json()["choices"]
        for top in choice["logprobs"]["top_logprobs"]:
            assert sorted(top.values())[:3] == [-9999.0] * 3 and len([one for one in top.values() if one > -9e3]) == 2
        refused = server.post("/v1/completions", {**body, "use_beam_search": True, "n": 2, "top_k": None})
        assert refused.status_code == 400 and "raw_logprobs works" in refused.text, refused.text
    with pytest.raises(ConfigError, match="logprobs_mode='raw'.*processed_logits"):
        LLM("demo", logprobs_mode="raw")


@pytest.mark.parametrize("by_rank", [True, False])
def test_the_drawn_token_is_kept(by_rank: bool) -> None:
    """A kernel that sums in another order may have drawn a token behind the border of a filter."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    number, half = torch.ones(2, dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)
    rows = Rows(logits, logits.amax(1), torch.zeros(2, dtype=torch.int64), half, half, number, torch.tensor([1, 0]))
    found = filtered(rows, torch.tensor([2, 3]), by_rank=by_rank)
    assert found.tolist() == [[0.0, -np.inf, -4.0, -np.inf], [-np.inf, -np.inf, -np.inf, 0.0]]
