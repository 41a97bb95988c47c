"""Engines of models with state layers: transformers' tokens in every mode, slots that come and go, planted faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import STATE_FAMILIES, VOCAB_SIZE, make_checkpoint
from invariants import check_scheduler
from state_faults import (
    OPERATORS,
    another_boundary,
    not_reset,
    not_restored,
    one_token_is_a_decode,
    padding_writes,
    plant,
)
from transformers import PreTrainedModel

from phonograph import LLM, SamplingParams
from phonograph.cli.group_lines import sharing_reason
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.engine.groups.state_slots import state_bytes
from phonograph.engine.plan import make_plan
from phonograph.errors import ConfigError, PhonographError, UnsupportedModelError
from phonograph.graphs.modes import GraphMode, GraphSupport
from phonograph.models.spec import read_model_spec
from phonograph.runner.synthetic_batches import SyntheticBatches

LENGTHS = 1, 2, 3, 63, 64, 65, 127
ANSWER = 48
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
SHORT = replace(GREEDY, max_tokens=12)
MIB = 1 << 20


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8, "num_kv_blocks": 128, "device": "cpu"}
    defaults["cudagraph_capture_sizes"] = [1, 4, 16, 32]
    return LLM(model=str(folder), **{**defaults, **settings})


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def check_greedy(reference: PreTrainedModel, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Check that each token is the likeliest after those before it."""
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + answer])).logits[0]
        assert answer == logits[len(prompt) - 1 : -1].argmax(1).tolist()


def wanted_of(reference: PreTrainedModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    greedy = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        return [reference.generate(torch.tensor([one]), **greedy)[0, len(one) :].tolist() for one in prompts]


@pytest.fixture(scope="module", params=OPERATORS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(request.param, folder), folder


@pytest.fixture(scope="module")
def folder(made: tuple[PreTrainedModel, Path]) -> Path:
    return made[1]


def test_five_modes_answer_as_transformers(made: tuple[PreTrainedModel, Path]) -> None:
    """Chunks of 32 tokens end anywhere in prompts, next to decodes of other requests."""
    reference, folder = made
    prompts = prompts_of(*LENGTHS)
    whole = tokens_of(make_llm(folder, cudagraph_mode="FULL"), prompts, GREEDY)
    assert all(len(answer) == ANSWER for answer in whole)
    check_greedy(reference, prompts, whole)
    for mode in GraphMode:
        llm = make_llm(folder, cudagraph_mode=mode)
        assert llm.plan.resolution.mode is mode
        assert tokens_of(llm, prompts, SHORT) == [answer[: SHORT.max_tokens] for answer in whole], mode


@pytest.mark.parametrize("family", [family for family in STATE_FAMILIES if family not in OPERATORS])
def test_other_families_answer_as_transformers(family: str, tmp_path: Path) -> None:
    reference, prompts = make_checkpoint(family, tmp_path), prompts_of(1, 2, 65, 1000)
    llm = make_llm(tmp_path, max_num_batched_tokens=100, num_kv_blocks=160)
    check_greedy(reference, prompts, tokens_of(llm, prompts, SHORT))


def test_factors_are_folded_into_weights_of_8_bits(tmp_path: Path) -> None:
    """Projections whose sizes FP8 takes; without the factors, log-probabilities are others."""
    make_checkpoint("falcon_h1", tmp_path, hidden_size=128, num_attention_heads=2, intermediate_size=256)
    params = replace(SHORT, max_tokens=1, logprobs=0)
    found = []
    for quantization in (None, "fp8"):
        llm = make_llm(tmp_path, quantization=quantization)
        found.append([output.outputs[0].cumulative_logprob for output in llm.generate(prompts_of(20, 50), params)])
    torch.testing.assert_close(*map(torch.tensor, found), rtol=0, atol=0.05)


def test_many_requests_through_few_slots(folder: Path) -> None:
    """Slots are used again, requests are preempted and begin again; each answer is the one that it has alone."""
    lengths = [1 + 7 * index % 40 for index in range(24)]
    prompts = prompts_of(*lengths, seed=3)
    alone = make_llm(folder, cudagraph_mode="NONE")
    wanted = [tokens_of(alone, [prompt], SHORT)[0] for prompt in prompts]
    llm = make_llm(folder, num_kv_blocks=14, max_model_len=64)
    assert tokens_of(llm, prompts, SHORT) == wanted
    assert llm.engine.core.scheduler.stats.num_preemptions > 0
    check_scheduler(llm.engine.core.scheduler)


def test_an_aborted_request_leaves_a_slot_to_the_next(folder: Path) -> None:
    first, *others = prompts_of(20, 1, 1, 30, seed=4)
    wanted = tokens_of(make_llm(folder), others, SHORT)
    llm = make_llm(folder, max_num_seqs=1)
    output = llm.session.add(first, GREEDY)
    for _ in range(5):
        llm.session.step()
    llm.session.abort(output)
    assert tokens_of(llm, others, SHORT) == wanted


def cached_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[tuple[list[int], int]]:
    """Answer prompts one after another; return their tokens and the prompt tokens that were cached."""
    outputs = [llm.generate([prompt], params)[0] for prompt in prompts]
    return [(output.outputs[0].token_ids, output.num_cached_tokens or 0) for output in outputs]


def test_prefixes_end_at_checkpoints(folder: Path) -> None:
    """A prompt again, its continuation, prompts that share a part of it: the same answers as without the cache."""
    first, *tails = prompts_of(100, 30, 20, 50, seed=5)
    prompts = [first, first, first + tails[0], *(first[:60] + tail for tail in tails), first[:97]]
    wanted = [tokens for tokens, _ in cached_of(make_llm(folder, enable_prefix_caching=False), prompts, SHORT)]
    for mode in ("FULL", "NONE", "PIECEWISE"):
        llm = make_llm(folder, cudagraph_mode=mode, state_checkpoint_share=0.5)
        found = cached_of(llm, prompts, SHORT)
        assert [tokens for tokens, _ in found] == wanted, mode
        # The first prompt that shares 56 tokens writes the checkpoint that the others start from.
        assert [count for _, count in found] == [0, 96, 96, 0, 56, 56, 96], mode
        assert {one.name: one.value for one in llm.get_metrics()}["phonograph:state_checkpoint_hits"] == 5, mode
        assert any("checkpoints of the states" in note for note in llm.plan.notes)


@pytest.mark.parametrize("shared", [30, 300])
def test_most_prompts_that_share_a_beginning_find_it(folder: Path, shared: int) -> None:
    head, *tails = prompts_of(shared, *[5 + index % 9 for index in range(40)], seed=6)
    llm = make_llm(folder, max_num_batched_tokens=64)
    outputs = llm.generate([head + tail for tail in tails], replace(SHORT, max_tokens=2))
    hits = sum((output.num_cached_tokens or 0) > 0 for output in outputs)
    assert hits >= 0.9 * len(tails)


def test_checkpoints_at_an_interval(folder: Path) -> None:
    """A prompt that was cut finds the last of them before its end."""
    prompt = prompts_of(150, seed=7)[0]
    llm = make_llm(folder, state_checkpoint_interval=32, max_num_batched_tokens=100, state_checkpoint_share=0.5)
    plain = make_llm(folder, enable_prefix_caching=False)
    prompts = [prompt, prompt[:140], prompt[:70], prompt[:33]]
    wanted = [tokens for tokens, _ in cached_of(plain, prompts, SHORT)]
    assert cached_of(llm, prompts, SHORT) == [*zip(wanted, [0, 128, 64, 32], strict=True)]


def test_few_checkpoints_and_many_prompts(folder: Path) -> None:
    """Checkpoints are evicted, and requests are preempted, aborted and fail; answers stay those of requests alone."""
    heads = prompts_of(24, 40, 56, seed=8)
    prompts = [
        heads[index % 3] + tail for index, tail in enumerate(prompts_of(*[1 + index % 7 for index in range(15)]))
    ]
    alone = make_llm(folder, enable_prefix_caching=False)
    wanted = [tokens_of(alone, [prompt], SHORT)[0] for prompt in prompts]
    memory = alone.plan.memory
    share = 4.5 * memory.states / 4 / (24 * memory.block)
    llm = make_llm(folder, num_kv_blocks=24, max_model_len=100, state_checkpoint_share=min(0.5, share))
    assert 2 <= llm.plan.memory.num_checkpoints <= 6
    assert tokens_of(llm, prompts, SHORT) == wanted
    llm.reset_prefix_cache()
    assert cached_of(llm, prompts[:1], SHORT) == [(wanted[0], 0)]
    assert tokens_of(llm, prompts[:6], SHORT) == wanted[:6]
    check_scheduler(llm.engine.core.scheduler)


def states_of(llm: LLM) -> list[torch.Tensor]:
    pool = llm.engine.core.runner._program._states
    return [state for of_layer in pool.values() for state in of_layer]


def test_states_are_verified_and_dummy_runs_write_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_nan(*size: Any, **settings: Any) -> torch.Tensor:
        made = empty(*size, **settings)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with monkeypatch.context() as patch:
        from phonograph.engine import build

        empty = torch.empty
        allocate = build.allocate_state_pool
        patch.setattr(
            build, "allocate_state_pool", lambda *args, **named: allocate(*args, **{**named, "make_empty": all_nan})
        )
        llm = make_llm(folder)
    assert len(states_of(llm)) >= 3 and llm.engine.captured.num_graphs > 5
    assert all(bool(state.isnan().all()) for state in states_of(llm)), "captures ran, and wrote no state"
    report = llm.verify(num_replays=30)
    assert report.ok, report.mismatches[:3]


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        (padding_writes, {"states of no sequence that the step wrote"}),
        (not_reset, {"logits", "states"}),
        (one_token_is_a_decode, {"logits", "states"}),
        (not_restored, {"logits", "states"}),
        (another_boundary, {"states"}),
    ],
)
def test_planted_faults_are_found_by_verify(
    folder: Path,
    fault: Callable[[list[Any]], None],
    caught: set[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault is in replays only, as one of a kernel in a graph is."""
    plant(fault, request.node.callspec.params["made"], monkeypatch)
    report = make_llm(folder).verify(num_replays=20)
    assert caught <= {mismatch.tensor for mismatch in report.mismatches}


def test_a_dummy_run_that_writes_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = SyntheticBatches._load

    def writing(self: SyntheticBatches, *args: Any, writes_states: bool = True) -> Any:
        return load(self, *args)

    monkeypatch.setattr(SyntheticBatches, "_load", writing)
    with pytest.raises(AssertionError, match="wrote no state"):
        test_states_are_verified_and_dummy_runs_write_none(folder, monkeypatch)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float16"}, "dtype='float16'.*bfloat16 or float32 works"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'.*auto works"),
        ({"state_checkpoint_interval": 12}, "state_checkpoint_interval=12.*block size; 16 works"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config=.*leave it out"),
    ],
)
def test_settings_that_do_not_go_with_states(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(folder, **settings)


def test_bfloat16_answers(folder: Path) -> None:
    """States stay in float32, and the last inputs of the convolution are in the model's type."""
    llm = make_llm(folder, dtype="bfloat16")
    first, *others = (state.dtype for state in states_of(llm)[: len(states_of(llm)) // 3])
    assert first is torch.bfloat16 and all(dtype is torch.float32 for dtype in others)
    assert all(len(tokens) == 12 for tokens in tokens_of(llm, prompts_of(3, 70), SHORT))


def test_graph_support_is_that_of_the_weakest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = read_model_spec(folder).states[0]
    support = replace(mixer.graph_support, level=GraphSupport.NEVER, reason="a planted reason")
    monkeypatch.setattr(type(mixer), "graph_support", property(lambda _: support))
    llm = make_llm(folder)
    assert llm.plan.resolution.support is support and llm.plan.resolution.mode is GraphMode.PIECEWISE
    with pytest.raises(PhonographError, match="a planted reason"):
        make_llm(folder, cudagraph_mode="FULL")


QWEN3_6 = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "max_position_embeddings": 262144,
    "dtype": "bfloat16",
}
"""Qwen3.6-35B-A3B: all other sizes are the defaults of its class."""


@pytest.mark.parametrize(("name", "kept"), [("h200", 256), ("h100", 32)])
def test_sizes_of_a_published_model(name: str, kept: int, tmp_path: Path) -> None:
    """Fewer sequences run, with a note, if the states of all leave no room for the KV cache."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_6))
    model = read_model_spec(tmp_path)
    assert 34e9 < model.num_parameters < 36e9 and len(model.states) == 30
    plan = make_plan(EngineConfig(model=str(tmp_path), load_format="dummy"), model, known_device(name))
    memory, limits = plan.memory, plan.limits
    assert memory.states // limits.max_num_seqs == 30 * (2 * MIB + 3 * 8192 * 2) == state_bytes(model, "bfloat16")
    assert limits.max_num_seqs == kept and memory.num_checkpoints > 0
    lowered = [note for note in plan.notes if note.startswith("max_num_seqs 256 -> ")]
    assert len(lowered) == (kept < 256) and all("states of a sequence take" in note for note in lowered)
    taken = memory.weights + memory.graphs + memory.attention + memory.sampling + memory.states
    assert taken + memory.checkpoints + memory.kv_cache < 0.9 * known_device(name).memory
    assert sharing_reason(plan, plan.selection, plan.attention).endswith("not tested with layers that have a state")


def test_heads_that_no_gpu_kernel_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_6, "linear_key_head_dim": 256}))
    config, model = EngineConfig(model=str(tmp_path), load_format="dummy"), read_model_spec(tmp_path)
    with pytest.raises(UnsupportedModelError, match="heads of 256 and 128 in a gated delta net"):
        make_plan(config, model, known_device("h200"))


def test_keys_that_no_gpu_kernel_has_are_refused(tmp_path: Path) -> None:
    make_checkpoint("bamba", tmp_path, mamba_d_state=300)
    with pytest.raises(UnsupportedModelError, match="a state of 300 numbers .* up to 256; device=cpu works"):
        make_plan(EngineConfig(model=str(tmp_path)), read_model_spec(tmp_path), known_device("h200"))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", GraphMode)
def test_a_gpu_answers_as_transformers(mode: GraphMode, made: tuple[PreTrainedModel, Path]) -> None:
    """Graphs equal eager steps.

    Full graphs need a kernel of attention, which float32 has not: there only first tokens are compared, and one counts
    as right if transformers in float32 has it within a tenth of the logits' deviation. Routers may turn in bfloat16. In
    float32 one whole answer may turn at a near-tie.
    """
    reference, folder = made
    prompts = prompts_of(*LENGTHS)
    wanted = wanted_of(reference, prompts, 16)
    is_exact = mode in (GraphMode.PIECEWISE, GraphMode.NONE)
    dtype = "float32" if is_exact else "bfloat16"
    with torch.no_grad():
        firsts = [reference(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    near = [(logits >= logits.max() - 0.1 * logits.std()).nonzero().flatten().tolist() for logits in firsts]
    assert sum(map(len, near)) < 2 * len(prompts)
    llm = make_llm(folder, device="cuda", dtype=dtype, block_size=16, cudagraph_mode=mode)
    for _ in range(2):
        answers = tokens_of(llm, prompts, replace(GREEDY, max_tokens=16))
        if is_exact:
            assert sum(one == other for one, other in zip(answers, wanted, strict=True)) >= len(prompts) - 1
        else:
            assert sum(one[0] in other for one, other in zip(answers, near, strict=True)) >= len(prompts) - 2
    if mode is not GraphMode.NONE:
        report = llm.verify(num_replays=200)
        assert report.ok, report.mismatches[:3]


@pytest.mark.gpu
@pytest.mark.parametrize("family", [family for family in STATE_FAMILIES if family not in OPERATORS])
def test_other_families_on_a_gpu(family: str, tmp_path: Path) -> None:
    """Answers are those of transformers in float32, and graphs equal eager steps in bfloat16."""
    reference, prompts = make_checkpoint(family, tmp_path), prompts_of(1, 2, 65, 1000)
    gpu = {"device": "cuda", "block_size": 16, "max_num_batched_tokens": 100, "num_kv_blocks": 160}
    llm = make_llm(tmp_path, dtype="float32", cudagraph_mode="PIECEWISE", **gpu)
    wanted, answers = wanted_of(reference, prompts, SHORT.max_tokens), tokens_of(llm, prompts, SHORT)
    assert sum(one == other for one, other in zip(answers, wanted, strict=True)) >= len(prompts) - 1
    report = make_llm(tmp_path, dtype="bfloat16", **gpu).verify(num_replays=50)
    assert report.ok, report.mismatches[:3]
