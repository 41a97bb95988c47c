"""Suffix decoding on a CPU: it changes no token, and drafts from earlier outputs too."""

from __future__ import annotations

from typing import Any

import pytest
from drafted_requests import KINDS, PROMPTS, UNFINISHED, PlainDecoding, make_llm, plain_decoding, texts

from phonograph.config.speculative_config import MOST_DRAFTS, SuffixSettings, read_speculative_config
from phonograph.core.batch import DraftCounts
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM
from phonograph.errors import ConfigError
from phonograph.speculation.suffix_drafts import SuffixDrafts

K = 3
SUFFIX = {"method": "suffix", "num_speculative_tokens": K, "adaptive_depth": False}
TIGHT = {"max_num_batched_tokens": 16, "block_size": 16, "num_kv_blocks": 12}
"""Chunked prompts, and too few blocks for four sequences."""


@pytest.fixture(scope="module")
def plain() -> PlainDecoding:
    return plain_decoding()


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return make_llm(speculative_config=SUFFIX)


def counts_of(llm: LLM) -> DraftCounts:
    return llm.engine.core.scheduler.stats.drafts


def test_tokens_are_those_of_plain_decoding(plain: PlainDecoding, drafting: LLM) -> None:
    """Requests of all kinds run together. The second time, drafts come from the outputs of the first."""
    params = [SamplingParams(**(UNFINISHED | KINDS[kind])) for kind in KINDS for _ in PROMPTS[:4]]
    prompts = PROMPTS[:4] * len(KINDS)
    wanted, gained = texts(plain.generate(prompts, params)), list[int]()
    for _ in range(2):
        before = counts_of(drafting).accepted
        assert texts(drafting.generate(prompts, params)) == wanted
        gained.append(counts_of(drafting).accepted - before)
    assert gained[1] > 1.5 * gained[0] > 0
    assert sum(counts_of(drafting).accepted_by_position) == counts_of(drafting).accepted


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_few_blocks_and_the_end_of_the_context(mode: str, plain: PlainDecoding) -> None:
    """Preempted sequences are loaded again, and their output is kept once."""
    settings: dict[str, Any] = {**TIGHT, "cudagraph_mode": mode}
    drafting = make_llm(**settings, speculative_config=SUFFIX)
    prompts = [[3 + index % 7, 5, 6, 7] * (1 + 6 * index) for index in range(5)]
    total = 0
    for params in ({"max_tokens": 90}, {"max_tokens": 20}):
        asked = SamplingParams(temperature=0.8, seed=4, ignore_eos=True, **params)
        wanted = texts(plain.generate(prompts, asked))
        assert texts(drafting.generate(prompts, asked)) == wanted
        total += sum(len(one[0]) for one in wanted)
    stats = drafting.engine.core.scheduler.stats
    assert stats.num_preemptions and stats.drafts.accepted
    drafts = drafting.engine.core.runner.drafts
    assert isinstance(drafts, SuffixDrafts)
    # Sequences that ended are kept when the next step comes.
    drafting.generate(prompts[:1], SamplingParams(max_tokens=1))
    assert total - stats.num_preemptions <= sum(token >= 0 for token in drafts.outputs.index.tokens) <= total


def test_adaptive_depth(plain: PlainDecoding) -> None:
    drafting = make_llm(speculative_config=SUFFIX | {"adaptive_depth": True})
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    wanted = texts(plain.generate(PROMPTS, params))
    assert all(texts(drafting.generate(PROMPTS, params)) == wanted for _ in range(3))
    assert counts_of(drafting).verified > 0


def test_aborted_requests_leave_their_output_to_others(drafting: LLM) -> None:
    """A request repeats one that was aborted, whose output was the only place of these tokens."""
    params = SamplingParams(temperature=1.2, seed=77, max_tokens=40, ignore_eos=True)
    core, session = drafting.engine.core, drafting.session
    first = session.add([5, 9, 6, 4], params)
    for _ in range(12):
        session.step()
    session.abort(first)
    known = len(first.outputs[0].token_ids)
    before = core.scheduler.stats.drafts.accepted
    (again,) = drafting.generate([[5, 9, 6, 4]], params)
    assert again.outputs[0].token_ids[:known] == first.outputs[0].token_ids
    assert core.scheduler.stats.drafts.accepted - before >= known - 8


@pytest.mark.parametrize(
    ("first", "second", "shares"), [(None, None, 1), ("a", None, 0), (None, "a", 0), ("a", "a", 0)]
)
def test_salted_requests_share_no_outputs(first: str | None, second: str | None, shares: int, drafting: LLM) -> None:
    """A client cannot learn from the time of an answer that one with a `cache_salt` had the same text."""
    params = SamplingParams(temperature=1.2, seed=13 + len(f"{first} {second}"), max_tokens=40, ignore_eos=True)
    drafting.generate([{"prompt_token_ids": [5, 9, 6, 4]} | ({"cache_salt": first} if first else {})], params)
    before = counts_of(drafting).accepted
    drafting.generate([{"prompt_token_ids": [5, 9, 6, 4]} | ({"cache_salt": second} if second else {})], params)
    assert (counts_of(drafting).accepted - before > 20) == shares


def test_verify_and_explain(drafting: LLM) -> None:
    report = drafting.verify(num_replays=30)
    assert report.ok, report.mismatches
    assert "all that suffix makes" in "; ".join(drafting.plan.notes)


def test_defaults_are_those_of_vllm_but_for_the_number_of_drafts() -> None:
    config = read_speculative_config({"method": "suffix"})
    assert config.num_speculative_tokens == MOST_DRAFTS and config.suffix == SuffixSettings(24, 10000, 1.0, 0.1)
    given = {"suffix_decoding_max_tree_depth": 8, "suffix_decoding_max_cached_requests": 0}
    given |= {"suffix_decoding_max_spec_factor": 2, "suffix_decoding_min_token_prob": 0.5}
    assert read_speculative_config({"method": "suffix", **given}).suffix == SuffixSettings(8, 0, 2, 0.5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"suffix_decoding_max_tree_depth": 1}, "max_tree_depth=.*1.*must be a whole number from 2 to 1024"),
        ({"suffix_decoding_max_tree_depth": 8.0}, "max_tree_depth=.*8.0.*must be a whole number"),
        ({"suffix_decoding_max_cached_requests": -1}, "max_cached_requests=.*-1.*from 0 to"),
        ({"suffix_decoding_max_spec_factor": -0.5}, "max_spec_factor=.*-0.5.*must be a number from 0 to 1000"),
        ({"suffix_decoding_max_spec_factor": float("nan")}, "max_spec_factor=.*nan.*must be a number"),
        ({"suffix_decoding_min_token_prob": 1.5}, "min_token_prob=.*1.5.*must be a number from 0 to 1"),
        ({"suffix_decoding_min_token_prob": True}, "min_token_prob=.*True.*must be a number from 0 to 1"),
        ({"suffix_decoding_depth": 3}, "suffix_decoding_depth=.*is not known; the keys are method"),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max=.*3.*belongs to method ngram"),
        ({"model": "x"}, "model=.*x.*belongs to methods draft_model"),
        ({"num_speculative_tokens": 32}, "num_speculative_tokens=.*32.*from 1 to 15"),
        ({"method": "ngram", "suffix_decoding_min_token_prob": 0.1}, "min_token_prob=.*belongs to method suffix"),
    ],
)
def test_refused_configurations(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_speculative_config({"method": "suffix", "num_speculative_tokens": K, **given})
