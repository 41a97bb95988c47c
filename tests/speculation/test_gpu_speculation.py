"""Speculation on a GPU: the tokens of plain decoding, graphs equal to eager, a hot path without waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import eagle_heads
import pytest
import torch
from device_checks import no_wait_or_allocation
from safetensors.torch import save_file

from demo_tasks.tasks import problems
from phonograph.attention.flashinfer.capabilities import FlashInferCapabilities
from phonograph.core.batch import DraftCounts
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM
from phonograph.engine.outputs import RequestOutput
from phonograph.errors import ConfigError
from phonograph.models.spec import read_model_spec

pytestmark = pytest.mark.gpu

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
MODEL = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3, "adaptive_depth": False}
"""The model is its own draft model, so that its drafts are right wherever rounding does not decide."""
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "adaptive_depth": False}
HEAD = {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 4, "adaptive_depth": False}
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
KINDS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(max_tokens=40, temperature=1.2, seed=5, ignore_eos=True),
    "filtered": SamplingParams(max_tokens=40, temperature=0.9, top_p=0.8, top_k=30, seed=6, ignore_eos=True),
    "penalized": SamplingParams(max_tokens=40, temperature=0.8, repetition_penalty=1.2, seed=7, ignore_eos=True),
    "counted": SamplingParams(max_tokens=40, temperature=0.0, frequency_penalty=0.3, logprobs=3, ignore_eos=True),
    "biased": SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=8, min_tokens=20, logit_bias={20: 1.5}),
    "scored": SamplingParams(max_tokens=40, temperature=0.0, logprobs=0, ignore_eos=True),
}
UNEDITED = "greedy", "drawn", "filtered"
"""Kinds whose drafts a draft model draws as the model does."""
RULED = [
    SamplingParams(max_tokens=30, allowed_token_ids=[*range(1, 2000)], logprobs=1, seed=9),
    SamplingParams(max_tokens=40, temperature=0.0, structured_outputs={"regex": "([0-9]{1,3}[+=-]){12}"}),
    SamplingParams(max_tokens=40, temperature=1.0, seed=4, structured_outputs={"regex": "([0-9]{1,3}[+=-]){12}"}),
]
"""Requests whose rows are masked behind the step."""
PENALIZED = SamplingParams(max_tokens=200, temperature=0.0, presence_penalty=0.2, ignore_eos=True, detokenize=False)


def make_llm(**settings: Any) -> LLM:
    limits = {"max_num_seqs": 16, "num_kv_blocks": 2048, "max_num_batched_tokens": 256}
    return LLM(**{"model": "demo", "device": "cuda", "max_cudagraph_capture_size": 128, **limits, **settings})


def prompts(llm: LLM) -> list[list[int]]:
    """Return questions of the demo model, half of them behind themselves, so that answers repeat what was said."""
    asked = [llm.encode_chat([{"role": "user", "content": problem.question}]) for problem in problems(4, 24)]
    return [one * 2 if index % 2 else one for index, one in enumerate(asked)]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]


def results_of(outputs: list[RequestOutput]) -> list[tuple[list[int], list[list[tuple[int, float, int]]]]]:
    """Return the tokens of each output, and ids, log-probabilities and ranks at each position."""
    several = [one for output in outputs for one in output.outputs]
    return [
        (
            one.token_ids,
            [[(key, value.logprob, value.rank) for key, value in row.items()] for row in one.logprobs or ()],
        )
        for one in several
    ]


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return make_llm(speculative_config=NGRAM)


@pytest.mark.parametrize("backend", ["triton", "flash_attn"])
def test_tokens_are_bit_by_bit_those_of_plain_decoding(backend: str) -> None:
    settings = {"attention_backend": backend, "batch_invariant": True}
    try:
        plain, drafting = make_llm(**settings), make_llm(**settings, speculative_config=NGRAM)
    except ConfigError as error:
        pytest.skip(str(error))
    for name, params in KINDS.items():
        before = drafting.engine.core.scheduler.stats.drafts.accepted
        wanted, found = (results_of(llm.generate(prompts(llm), params)) for llm in (plain, drafting))
        assert found == wanted, name
        assert drafting.engine.core.scheduler.stats.drafts.accepted > before, name
    counts = drafting.engine.core.scheduler.stats.drafts
    assert 0 < counts.accepted < counts.verified


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
@pytest.mark.parametrize(
    "speculation", [{**NGRAM, "adaptive_depth": False}, SUFFIX, MODEL, HEAD], ids=["lookup", "suffix", "model", "head"]
)
def test_requests_of_all_kinds_together(speculation: dict[str, Any], mode: str) -> None:
    """Requests with a grammar have masks at each position; a draft model makes their drafts behind the masks."""
    settings = {"batch_invariant": True, "cudagraph_mode": mode}
    plain, drafting = (make_llm(**settings, **more) for more in ({}, {"speculative_config": speculation}))
    params = [*RULED, *KINDS.values()]
    mixture = [params[index % len(params)] for index in range(len(prompts(plain)))]
    wanted, found = (results_of(llm.generate(prompts(llm), mixture)) for llm in (plain, drafting))
    assert found == wanted
    before = drafting.engine.core.scheduler.stats.drafts
    mixture = [RULED[index % len(RULED)] for index in range(len(prompts(plain)))]
    wanted, found = (results_of(llm.generate(prompts(llm), mixture)) for llm in (plain, drafting))
    assert found == wanted
    counts = drafting.engine.core.scheduler.stats.drafts
    assert counts.verified > before.verified and counts.accepted > before.accepted
    if speculation is MODEL:
        # Masks of a few tokens change few choices, so that the model is its own good draft model.
        drafting.generate(prompts(drafting), RULED[0])
        after = drafting.engine.core.scheduler.stats.drafts
        assert after.accepted - counts.accepted > 0.6 * (after.verified - counts.verified)


def test_masks_and_passes_behind_them_run_in_graphs() -> None:
    """Nothing is compiled when they run first, and with a head that is mostly right, decodes are fewer."""
    from triton import knobs

    llm, compiled = make_llm(speculative_config=HEAD), list[str]()
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["repr"])
    try:
        params = SamplingParams(temperature=0.0, max_tokens=80, bad_words=["no such text"])
        for count in (1, 3, 12):
            llm.generate(prompts(llm)[: 2 * count : 2], params)
    finally:
        knobs.runtime.jit_post_compile_hook = before
    counts = llm.engine.core.scheduler.stats.drafts
    assert not compiled and counts.accepted > counts.decodes > 0


def test_tokens_with_suffix_decoding_are_bit_by_bit_those_of_plain_decoding() -> None:
    """The second time the outputs are known, so that most drafts are right."""
    plain, drafting = (make_llm(batch_invariant=True, **more) for more in ({}, {"speculative_config": SUFFIX}))
    before = DraftCounts()
    for name, params in KINDS.items():
        wanted = tokens_of(plain.generate(prompts(plain), params))
        for number in range(2):
            assert tokens_of(drafting.generate(prompts(drafting), params)) == wanted, name
            counts = drafting.engine.core.scheduler.stats.drafts
            gained, verified = counts.accepted - before.accepted, counts.verified - before.verified
            assert number == 0 or gained > 0.8 * verified > 0, name
            before = counts
    report = drafting.verify(num_replays=200)
    assert report.ok, [str(mismatch) for mismatch in report.mismatches[:5]]


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("speculation", [{**NGRAM, "adaptive_depth": False}, SUFFIX], ids=["ngram", "suffix"])
def test_flashinfer_with_exact_lengths(speculation: dict[str, Any], mode: str) -> None:
    """Outputs are those without drafts, and about as many drafts are right as with our kernels."""
    missing = FlashInferCapabilities().missing()
    if missing is not None:
        pytest.skip(missing)
    settings = {"attention_backend": "flashinfer", "cudagraph_mode": mode}
    plain, drafting = (make_llm(**settings, **more) for more in ({}, {"speculative_config": speculation}))
    pairs = zip(*(tokens_of(one.generate(prompts(one), GREEDY)) for one in (plain, drafting)), strict=True)
    same = sum(wanted[:12] == found[:12] for wanted, found in pairs)
    assert same >= 21, f"{same} of 24 answers"
    shares: list[float] = []
    for llm in (make_llm(speculative_config=speculation), drafting):
        before = llm.engine.core.scheduler.stats.drafts
        for params in KINDS.values():
            llm.generate(prompts(llm), params)
        counts = llm.engine.core.scheduler.stats.drafts
        shares.append((counts.accepted - before.accepted) / (counts.verified - before.verified))
    assert shares[1] > 0.8 * shares[0] > 0, shares
    report = drafting.verify(num_replays=200)
    assert report.ok, [str(mismatch) for mismatch in report.mismatches[:5]]
    assert any(key.query_len == 5 for key in report.replays)


def test_tokens_with_a_draft_model_are_bit_by_bit_those_of_plain_decoding() -> None:
    plain, drafting = (make_llm(batch_invariant=True, **more) for more in ({}, {"speculative_config": MODEL}))
    counts = DraftCounts()
    for name, params in KINDS.items():
        wanted, found = (results_of(llm.generate(prompts(llm), params)) for llm in (plain, drafting))
        assert found == wanted, name
        if name == UNEDITED[-1]:
            counts = drafting.engine.core.scheduler.stats.drafts
            assert counts.accepted > 0.95 * counts.verified > 0
    assert drafting.engine.core.scheduler.stats.drafts.accepted > 1.1 * counts.accepted


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
def test_a_draft_model_that_is_the_model_is_right(mode: str) -> None:
    llm = make_llm(
        speculative_config=MODEL, cudagraph_mode=mode, max_num_batched_tokens=64, max_cudagraph_capture_size=64
    )
    for name in UNEDITED:
        llm.generate(prompts(llm), KINDS[name])
    counts = llm.engine.core.scheduler.stats.drafts
    assert counts.accepted > 0.9 * counts.verified > 0
    if mode != "NONE":
        report = llm.verify(num_replays=200)
        assert report.ok, [str(mismatch) for mismatch in report.mismatches[:5]]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("eagle3", {"draft_vocab_size": 500}),
        ("eagle3", {"draft_vocab_size": 500, "fc_norm": True, "norm_output": True}),
        ("eagle", {}),
    ],
)
def test_a_head_of_random_weights_changes_no_token(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(2)
    config = changes | {"hidden_size": 256, "intermediate_size": 640, "num_key_value_heads": 2}
    config |= {"vocab_size": 2048, "head_dim": 64, "max_position_embeddings": 8192}
    if method == "eagle":
        config = eagle_heads.FIRST | config | {"rms_norm_eps": read_model_spec("demo").rms_norm_eps}
        tensors = eagle_heads.first_tensors(config, owns_embedding=False, bias=True)
    else:
        config = eagle_heads.HEAD | config
        tensors = eagle_heads.head_tensors(config, "midlayer", owns_embedding=False, states=3)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    head = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 3, "adaptive_depth": False}
    plain, drafting = (make_llm(batch_invariant=True, **more) for more in ({}, {"speculative_config": head}))
    for name, params in KINDS.items():
        wanted, found = (results_of(llm.generate(prompts(llm), params)) for llm in (plain, drafting))
        assert found == wanted, name
    assert drafting.engine.core.scheduler.stats.drafts.verified > 0
    report = drafting.verify(num_replays=200)
    assert report.ok, [str(mismatch) for mismatch in report.mismatches[:5]]


def test_the_head_of_the_demo_model_is_right_for_most_drafts() -> None:
    llm = make_llm(speculative_config=HEAD)
    llm.generate(prompts(llm)[::2], SamplingParams(temperature=0.0, max_tokens=80))
    counts = llm.engine.core.scheduler.stats.drafts
    assert counts.accepted > 2 * counts.decodes > 0


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"])
def test_answers_begin_as_those_of_plain_decoding(mode: str, drafting: LLM) -> None:
    plain = make_llm()
    llm = drafting if mode == "FULL" else make_llm(speculative_config=NGRAM, cudagraph_mode=mode)
    pairs = zip(*(tokens_of(one.generate(prompts(one), GREEDY)) for one in (plain, llm)), strict=True)
    same = sum(wanted[:12] == found[:12] for wanted, found in pairs)
    assert same >= 21, f"{same} of 24 answers"


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_every_graph_equals_eager_bit_by_bit(mode: str, drafting: LLM) -> None:
    llm = drafting if mode == "FULL" else make_llm(speculative_config=NGRAM, cudagraph_mode=mode)
    report = llm.verify(num_replays=400)
    assert report.ok, [str(mismatch) for mismatch in report.mismatches[:5]]
    assert any(key.query_len == 5 for key in report.replays)


def test_the_hot_path_neither_waits_nor_allocates(drafting: LLM) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0, detokenize=False)
    for index, prompt in enumerate(prompts(drafting)[:8]):
        drafting.session.add(prompt, PENALIZED if index % 2 else params)
    core = drafting.engine.core
    for _ in range(6):
        core.step()
    with no_wait_or_allocation():
        for _ in range(16):
            core.step()
    while drafting.session.has_unfinished:
        drafting.session.step()


def test_nothing_is_compiled_while_serving(drafting: LLM) -> None:
    from triton import knobs

    compiled: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["repr"])
    try:
        several = [[5 + token % 50 for token in range(length)] for length in (1, 3, 17, 100, 300, 700)]
        for params in KINDS.values():
            drafting.generate(several, params)
            drafting.generate(several[:1], params)
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert not compiled
