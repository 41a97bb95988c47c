"""Engines of models with state layers: transformers' tokens in every mode, slots that come and go, planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import STATE_FAMILIES, VOCAB_SIZE, make_checkpoint
from invariants import check_scheduler
from transformers import PreTrainedModel

from phonograph import LLM, SamplingParams
from phonograph.errors import ConfigError, PhonographError
from phonograph.graphs.modes import GraphMode, GraphSupport
from phonograph.kernels.torch.state import gated_delta as operators
from phonograph.models.layers.states.gated_delta_net import GatedDeltaNet
from phonograph.runner.synthetic_batches import SyntheticBatches

LENGTHS = 1, 2, 3, 63, 64, 65, 127
ANSWER = 128
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
SHORT = replace(GREEDY, max_tokens=12)
OPERATOR = torch.ops.phonograph.gated_delta.default


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8, "num_kv_blocks": 128}
    defaults["max_cudagraph_capture_size"] = 32
    return LLM(model=str(folder), **{**defaults, **settings})


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def wanted_of(reference: PreTrainedModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    greedy = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        return [reference.generate(torch.tensor([one]), **greedy)[0, len(one) :].tolist() for one in prompts]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("qwen3_5")
    return make_checkpoint("qwen3_5", folder), folder


@pytest.fixture(scope="module")
def folder(made: tuple[PreTrainedModel, Path]) -> Path:
    return made[1]


def test_five_modes_answer_as_transformers(made: tuple[PreTrainedModel, Path]) -> None:
    """Chunks of 32 tokens end anywhere in prompts, next to decodes of other requests."""
    reference, folder = made
    prompts = prompts_of(*LENGTHS)
    wanted = wanted_of(reference, prompts, ANSWER)
    for mode in GraphMode:
        llm = make_llm(folder, cudagraph_mode=mode)
        assert llm.plan.resolution.mode is mode
        count = ANSWER if mode is GraphMode.FULL else 24
        params = replace(GREEDY, max_tokens=count)
        assert tokens_of(llm, prompts, params) == [tokens[:count] for tokens in wanted], mode


@pytest.mark.parametrize("family", [family for family in STATE_FAMILIES if family != "qwen3_5"])
def test_other_families_answer_as_transformers(family: str, tmp_path: Path) -> None:
    reference, prompts = make_checkpoint(family, tmp_path), prompts_of(1, 2, 65, 1000)
    llm = make_llm(tmp_path, max_num_batched_tokens=100, num_kv_blocks=160)
    assert tokens_of(llm, prompts, SHORT) == wanted_of(reference, prompts, SHORT.max_tokens)


def test_many_requests_through_few_slots(folder: Path) -> None:
    """Slots are used again, requests are preempted and begin again; each answer is the one that it has alone."""
    lengths = [1 + 7 * index % 40 for index in range(64)]
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


def test_a_prompt_twice_recomputes_it(folder: Path) -> None:
    """The prefix cache is off, with the reason in the notes."""
    llm, prompts = make_llm(folder), prompts_of(50, seed=5)
    assert not llm.plan.prefix_caching and any("prefix cache off: the layers" in note for note in llm.plan.notes)
    first, second = (llm.generate(prompts, SHORT)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids and not second.num_cached_tokens


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
    assert len(states_of(llm)) == 6 and llm.engine.captured.num_graphs > 10
    assert all(bool(state.isnan().all()) for state in states_of(llm)), "captures ran, and wrote no state"
    report = llm.verify(num_replays=60)
    assert report.ok, report.mismatches[:3]


def clamped(*args: Any) -> None:
    """Padding rows have a token of their own, and write to slot 0."""
    args = list(args)
    args[8] = args[8].clamp_min(0)
    starts, lens = args[6].clone(), args[7].clone()
    if int(starts[-1]) < len(args[0]):
        starts[-1] += 1
        lens[-1] += 1
    args[6], args[7] = starts, lens
    original(*args)


def not_reset(*args: Any) -> None:
    """Sequences without context read their slot."""
    args = list(args)
    args[7] = args[7] + 1
    original(*args)


def one_token_is_a_decode(*args: Any) -> None:
    """Prompts of one token read the state of their slot."""
    args = list(args)
    args[7] = torch.where(args[6].diff() == 1, args[7] + 1, args[7])
    original(*args)


original = operators.gated_delta


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        (clamped, {"slots of no sequence that the step wrote"}),
        (not_reset, {"logits", "states"}),
        (one_token_is_a_decode, {"logits", "states"}),
    ],
)
def test_planted_faults_are_found_by_verify(
    folder: Path, fault: Callable[..., None], caught: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is in replays only, as one of a kernel in a graph is."""
    monkeypatch.setattr(OPERATOR, "python_function", fault)
    report = make_llm(folder).verify(num_replays=40)
    found = {mismatch.tensor for mismatch in report.mismatches}
    assert caught <= found


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
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config=.*leave it out"),
    ],
)
def test_settings_that_do_not_go_with_states(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(folder, **settings)


def test_bfloat16_answers(folder: Path) -> None:
    """States stay in float32, and the last inputs of the convolution are in the model's type."""
    llm = make_llm(folder, dtype="bfloat16")
    assert [state.dtype for state in states_of(llm)[:2]] == [torch.bfloat16, torch.float32]
    assert all(len(tokens) == 12 for tokens in tokens_of(llm, prompts_of(3, 70), SHORT))


def test_graph_support_is_that_of_the_weakest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    support = replace(GatedDeltaNet.graph_support.fget(None), level=GraphSupport.NEVER, reason="a planted reason")
    monkeypatch.setattr(GatedDeltaNet, "graph_support", property(lambda _: support))
    llm = make_llm(folder)
    assert llm.plan.resolution.support is support and llm.plan.resolution.mode is GraphMode.PIECEWISE
    with pytest.raises(PhonographError, match="a planted reason"):
        make_llm(folder, cudagraph_mode="FULL")
