"""Promises to a user: the same tokens in every mode, beside any requests, after a preemption, and after aborts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from invariants import check_scheduler

from phonograph.attention.reference.backend import ReferenceBackend
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM
from phonograph.errors import (
    BackendError,
    CaptureError,
    ConfigError,
    MemoryLimitError,
    PhonographError,
    RequestError,
    RequestFailure,
)
from phonograph.graphs.modes import GraphMode

LABELS = {
    GraphMode.NONE: {"eager"},
    GraphMode.PIECEWISE: {"piecewise"},
    GraphMode.FULL: {"full decode", "full mixed"},
    GraphMode.FULL_DECODE_ONLY: {"full decode", "eager"},
    GraphMode.FULL_AND_PIECEWISE: {"full decode", "piecewise"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama3")
    make_checkpoint("llama3", path)
    return str(path)


def make_llm(folder: str, **settings) -> LLM:
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8, "num_kv_blocks": 128}
    if not settings.keys() & {"cudagraph_capture_sizes", "max_num_batched_tokens"}:
        defaults["max_cudagraph_capture_size"] = 32
    return LLM(model=folder, **{**defaults, **settings})


def random_prompts(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def tokens_of(outputs) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def test_five_modes_give_the_same_tokens(folder: str) -> None:
    prompts = random_prompts(2, 1, 9, 40, 75, 3, 18, 50)
    params = [SamplingParams(temperature=0.8, seed=index, max_tokens=20, ignore_eos=True) for index in range(7)]
    params[2] = params[5] = GREEDY
    results = {}
    for mode in GraphMode:
        llm = make_llm(folder, cudagraph_mode=mode)
        assert llm.plan.resolution.mode is mode
        results[mode] = tokens_of(llm.generate(prompts, params))
        assert set(llm.step_counts) == LABELS[mode], "each mode must run what it says"
    assert all(result == results[GraphMode.NONE] for result in results.values())


@pytest.mark.parametrize("method", ["schedule", "write_kv"])
def test_pieces_leave_out_what_reads_on_the_host(folder: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(6, 9, 40, 3)
    expected = tokens_of(make_llm(folder, cudagraph_mode="NONE").generate(prompts, GREEDY))
    original = getattr(ReferenceBackend, method)

    def read_and_run(self: ReferenceBackend, *arguments: Any) -> None:
        metadata = arguments[0] if method == "schedule" else arguments[-1].metadata
        metadata.common.seq_lens.tolist()
        original(self, *arguments)

    monkeypatch.setattr(ReferenceBackend, method, read_and_run)
    settings = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [4, 32]}
    with pytest.raises(CaptureError):
        make_llm(folder, **settings)
    start = ReferenceBackend.__init__

    def start_as_on_a_gpu(self: ReferenceBackend, *arguments: Any) -> None:
        start(self, *arguments)
        self.reads_on_host = True

    monkeypatch.setattr(ReferenceBackend, "__init__", start_as_on_a_gpu)
    llm = make_llm(folder, **settings)
    assert tokens_of(llm.generate(prompts, GREEDY)) == expected
    assert set(llm.step_counts) == {"piecewise"}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layouts_block_sizes_and_larger_prompts_than_graphs(folder: str, layout: str) -> None:
    prompts = random_prompts(3, 30, 90)
    expected = tokens_of(make_llm(folder).generate(prompts, GREEDY))
    llm = make_llm(
        folder,
        kv_cache_layout=layout,
        block_size=32,
        num_kv_blocks=40,
        max_num_batched_tokens=100,
        max_cudagraph_capture_size=16,
    )
    assert tokens_of(llm.generate(prompts, GREEDY)) == expected
    assert llm.step_counts["eager"] >= 1, "a prefill above the largest graph runs eagerly, and is counted so"


def test_output_does_not_depend_on_company_or_preemption(folder: str) -> None:
    prompts = random_prompts(4, 40, 33, 25, 47, 30)
    params = [SamplingParams(temperature=1.0, seed=7 + index, max_tokens=60, ignore_eos=True) for index in range(5)]
    alone = [
        tokens_of(make_llm(folder).generate([prompt], one))[0] for prompt, one in zip(prompts, params, strict=True)
    ]
    together = make_llm(folder)
    assert tokens_of(together.generate(prompts, params)) == alone
    tight = make_llm(folder, num_kv_blocks=26, max_model_len=200, enable_prefix_caching=False)
    assert tokens_of(tight.generate(prompts, params)) == alone
    assert tight.engine.core.scheduler.stats.num_preemptions > 0, "the test must preempt to say anything"


def test_an_engine_seed_repeats_requests_without_one(folder: str) -> None:
    prompts, params = random_prompts(5, 10, 20), SamplingParams(temperature=1.0, max_tokens=16, n=2, ignore_eos=True)
    first, second, other = (tokens_of(make_llm(folder, seed=seed).generate(prompts, params)) for seed in (1, 1, 2))
    assert first == second != other
    assert first[0] != first[1], "samples of one prompt differ"


def test_abort_in_the_middle_leaves_the_others_alone(folder: str) -> None:
    prompts = random_prompts(6, 40, 33, 25)
    expected = tokens_of(make_llm(folder).generate(prompts, GREEDY))
    llm = make_llm(folder)
    outputs = [llm.session.add(prompt, GREEDY) for prompt in prompts]
    for _ in range(8):
        llm.session.step()
    llm.session.abort(outputs[1])
    while llm.session.has_unfinished:
        llm.session.step()
    assert outputs[1].outputs[0].finish_reason == "abort"
    assert tokens_of([outputs[0], outputs[2]]) == [expected[0], expected[2]]
    check_scheduler(llm.engine.core.scheduler)


def test_an_engine_reports_a_failed_step(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(folder)
    runner = llm.engine.core.runner
    monkeypatch.setattr(runner, "submit", lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate([[5, 6]], GREEDY)
    monkeypatch.undo()
    with pytest.raises(PhonographError, match="ZeroDivisionError.*make a new one"):
        llm.generate([[5, 6]], GREEDY)


def test_leaving_a_stream_early_ends_its_request(folder: str) -> None:
    llm = make_llm(folder)
    for output in llm.stream(random_prompts(7, 10)[0], GREEDY):
        if len(output.outputs[0].token_ids) == 3:
            break
    assert not llm.session.has_unfinished


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "prompt.*empty"),
        ([5] * 600, GREEDY, "600.*512"),
        ([VOCAB_SIZE], GREEDY, f"prompt={VOCAB_SIZE}.*0 to {VOCAB_SIZE - 1}"),
        ([-1], GREEDY, "prompt=-1"),
        ([1.5], GREEDY, "prompt=1.5.*integers"),
        ("text", GREEDY, "tokenizer"),
        ([5], SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
        ([5], SamplingParams(stop=["x"]), "stop.*tokenizer"),
    ],
)
def test_one_bad_request_never_takes_the_others_down(folder: str, prompt, params, message) -> None:
    llm = make_llm(folder)
    good = random_prompts(8, 12, 30)
    expected = tokens_of(make_llm(folder).generate(good, GREEDY))
    outputs = llm.generate([good[0], prompt, good[1]], [GREEDY, params, GREEDY])
    assert tokens_of(outputs) == expected
    with pytest.raises(RequestError, match=message):
        raise outputs[1].error or AssertionError("the bad request was accepted")
    if prompt:
        with pytest.raises(RequestError, match=message):
            llm.generate([prompt], params)


def test_logits_that_are_not_finite_end_only_their_request(folder: str) -> None:
    good = random_prompts(8, 12, 30)
    expected = tokens_of(make_llm(folder).generate(good, GREEDY))
    poison = next(token for token in range(3, VOCAB_SIZE) if not any(token in met for met in good + expected))
    llm = make_llm(folder)
    with torch.inference_mode():
        llm.engine.core.runner._program.model.embedding_VE[poison] = float("nan")
    outputs = llm.generate([good[0], [5, poison, 6], good[1]], GREEDY)
    assert tokens_of([outputs[0], outputs[2]]) == expected
    assert outputs[1].outputs == [] and isinstance(outputs[1].error, RequestFailure)
    assert "not finite" in str(outputs[1].error)


def test_a_prompt_that_cannot_fit_the_cache_of_n_samples_queues_nothing(folder: str) -> None:
    llm = make_llm(folder)
    with pytest.raises(RequestError):
        llm.session.add([5] * 512, SamplingParams(n=3))
    assert not llm.session.has_unfinished


def test_a_step_without_metadata_is_refused(folder: str) -> None:
    runner = make_llm(folder, cudagraph_mode="NONE").engine.core.runner
    with torch.inference_mode(), pytest.raises(AssertionError, match="metadata is built before"):
        runner._program.run(num_tokens=8, num_reqs=4, num_logits=4, every_row=False, pieces=False)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_padding_never_poisons(folder: str, mode: str) -> None:
    """NaN in all memory that belongs to no request: unused blocks, the graph's pool, embeddings of padded tokens."""
    prompts = random_prompts(11, 21, 9, 30)
    # Token 0 is what padded rows hold, so no request may have it.
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logit_bias={0: -math.inf})
    expected = tokens_of(make_llm(folder).generate(prompts, params))
    llm = make_llm(folder, cudagraph_mode=mode, cudagraph_capture_sizes=[4, 32])
    runner, program = llm.engine.core.runner, llm.engine.core.runner._program
    with torch.inference_mode():
        for cache in program.attention._kv_caches:
            cache.fill_(torch.nan)
        program.model.embedding_VE[0] = torch.nan
    outputs = [llm.session.add(prompt, params) for prompt in prompts]
    while llm.session.has_unfinished:
        runner.runtime.poison()
        llm.session.step()
    assert tokens_of(outputs) == expected
    assert "eager" not in runner.counts


def test_memory_that_is_not_there_is_an_error(folder: str) -> None:
    with pytest.raises(
        MemoryLimitError,
        match=r"num_kv_blocks=10000000000000: a KV cache of .* does not fit .* \d+ blocks \(\d+ bytes\) fit",
    ):
        make_llm(folder, num_kv_blocks=10**13)


def test_settings_that_cannot_work_are_errors(folder: str) -> None:
    for settings, message, kind in (
        (
            {"num_kv_blocks": 3, "max_model_len": 512},
            "max_model_len=512.*64 KV blocks.*num_kv_blocks=3.*lower max_model_len to 24",
            MemoryLimitError,
        ),
        ({"max_model_len": 513}, "max_model_len=513.*512", ConfigError),
        ({"cudagraph_capture_sizes": [33, 40]}, "cudagraph_capture_sizes=33.*1 to 32", ConfigError),
        ({"cudagraph_capture_sizes": 0}, "cudagraph_capture_sizes", ConfigError),
        ({"max_cudagraph_capture_size": 64}, "max_cudagraph_capture_size=64.*max_num_batched_tokens=32", ConfigError),
        ({"attention_backend": "nonsense"}, "attention_backend='nonsense'.*reference", ConfigError),
        ({"attention_backend": "flashinfer"}, "flashinfer", BackendError),
        ({"num_speculative_tokens": 2}, "num_speculative_tokens=2", ConfigError),
        ({"device": "cuda"}, "device='cuda'.*cpu or auto works", ConfigError),
    ):
        with pytest.raises(kind, match=message):
            make_llm(folder, **settings)


def test_verify_graphs_at_start_and_reuse_after_it(folder: str) -> None:
    prompts = random_prompts(9, 40, 12)
    expected = tokens_of(make_llm(folder).generate(prompts, GREEDY))
    llm = make_llm(folder, verify_graphs=True)
    assert tokens_of(llm.generate(prompts, GREEDY)) == expected
    report = llm.verify(num_replays=60)
    assert report.ok and report.num_replays >= 60
    assert set(report.replays) == set(llm.plan.captures.largest_first())
    assert tokens_of(llm.generate(prompts, GREEDY)) == expected, "verify leaves no stale prefix behind"
