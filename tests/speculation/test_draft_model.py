"""A draft model on a CPU: the tokens of plain decoding, and drafts that are right where both models agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from drafted_requests import (
    KINDS,
    PROMPTS,
    UNFINISHED,
    PlainDecoding,
    make_llm,
    plain_decoding,
    shallow_demo,
    texts,
)

from phonograph.core.batch import ScheduledBatch
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM
from phonograph.scheduling import prompt_tails

K = 3
SELF = {"method": "draft_model", "model": str(shallow_demo()), "num_speculative_tokens": K, "adaptive_depth": False}
TIGHT = {"max_num_batched_tokens": 16, "block_size": 16, "num_kv_blocks": 8}
"""Chunked prompts, and too few blocks for four sequences."""


@pytest.fixture(scope="module")
def plain() -> PlainDecoding:
    return plain_decoding()


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return make_llm(speculative_config=SELF)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_plain_decoding(kind: str, plain: PlainDecoding, drafting: LLM) -> None:
    params = SamplingParams(**(UNFINISHED | KINDS[kind]))
    before = drafting.engine.core.scheduler.stats.drafts
    assert texts(drafting.generate(PROMPTS, params)) == texts(plain.generate(PROMPTS, params))
    after = drafting.engine.core.scheduler.stats.drafts
    verified, accepted = after.verified - before.verified, after.accepted - before.accepted
    if kind in ("greedy", "sampled", "filtered", "samples", "prompt scored", "scored", "biased", "least"):
        # The draft model is the model, and draws with the same noise.
        assert verified > 50 and accepted == verified
    elif kind in ("one", "switched off"):
        assert verified == 0
    else:
        # It draws without penalties and masks.
        assert 0 < accepted < verified


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_another_model_with_few_blocks(mode: str, plain: PlainDecoding, tmp_path: Path) -> None:
    """Prompts in chunks, preemption, prefixes that are found again: drafts may be wrong, tokens are not."""
    make_checkpoint("qwen3", tmp_path, vocab_size=2048, num_hidden_layers=2)
    speculation = SELF | {"model": str(tmp_path)}
    llm = make_llm(speculative_config=speculation, cudagraph_mode=mode, max_num_seqs=4, **TIGHT)
    own = make_llm(speculative_config=SELF, cudagraph_mode=mode, **(TIGHT | {"num_kv_blocks": 64}))
    several = [prompt * 3 for prompt in PROMPTS]
    for kind in ("greedy", "sampled"):
        params = SamplingParams(**(UNFINISHED | {"max_tokens": 40} | KINDS[kind]))
        wanted = texts(plain.generate(several, params))
        assert texts(llm.generate(several, params)) == wanted == texts(own.generate(several, params))
    wrong, right = (one.engine.core.scheduler.stats for one in (llm, own))
    assert wrong.num_preemptions and right.prefix_hits
    assert wrong.drafts.accepted < 0.2 * wrong.drafts.verified
    assert right.drafts.accepted == right.drafts.verified > 100


def test_equal_prompts_copy_the_keys_of_the_draft_model(plain: PlainDecoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a prompt that is in no full block: two blocks of 16 tokens, 12 tokens and the last one."""
    monkeypatch.setattr(prompt_tails, "WORTH_A_STEP", 1)
    llm = make_llm(speculative_config=SELF)
    runner: Any = llm.engine.core.runner
    for cache in runner._sampling._draft_runner.runner._program.attention._kv_caches:
        cache.normal_(std=8)
    batches: list[ScheduledBatch] = []
    submit = runner.submit
    monkeypatch.setattr(runner, "submit", lambda batch: (batches.append(batch), submit(batch))[1])
    params = SamplingParams(**(UNFINISHED | {"temperature": 0.0}))
    prompts = [[7 + token * token % 90 for token in range(45)]] * 4
    assert texts(llm.generate(prompts, params)) == texts(plain.generate(prompts, params))
    assert [lens for one in batches if (lens := one.query_lens[one.num_decodes :])] == [[45], [1, 1, 1]]
    assert sum(len(one.copies) for one in batches) == 3
    counts = llm.engine.core.scheduler.stats.drafts
    assert counts.accepted == counts.verified > 50


def test_drafts_end_with_the_context(drafting: LLM, plain: PlainDecoding) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    prompts = [[5 + token % 50 for token in range(length)] for length in (100, 118, 126, 127)]
    assert texts(drafting.generate(prompts, params)) == texts(plain.generate(prompts, params))


def test_a_small_budget_takes_the_rest_in_the_next_step(plain: PlainDecoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model that is behind catches up, and has no drafts until then."""
    llm = make_llm(speculative_config=SELF)
    draft_runner: Any = llm.engine.core.runner._sampling
    monkeypatch.setattr(draft_runner._draft_runner, "_max_num_tokens", 6)
    params = SamplingParams(**(UNFINISHED | KINDS["greedy"]))
    prompts = [[5 + token % 50 for token in range(length)] for length in (40, 9, 3)]
    assert texts(llm.generate(prompts, params)) == texts(plain.generate(prompts, params))
    counts = llm.engine.core.scheduler.stats.drafts
    assert 0 < counts.accepted == counts.verified
