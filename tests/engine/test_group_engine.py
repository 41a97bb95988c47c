"""The whole engine with several KV groups against transformers: modes, prefixes, preemption, aborts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from invariants import check_scheduler

from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.groups.group_facts import group_facts
from phonograph.engine.llm import LLM
from phonograph.graphs.modes import GraphMode
from phonograph.runner.group_builder import GroupBuilder

TYPES = ["sliding_attention"] * 3 + ["full_attention"] * 2 + ["sliding_attention"]
MIXED = {"num_hidden_layers": 6, "layer_types": TYPES, "sliding_window": 11}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen2_window", "gpt_oss"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    folder = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(request.param, folder, **MIXED), str(folder)


def make_llm(folder: str, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 256,
        "block_size": 8,
        "num_kv_blocks": 200,
        "cudagraph_capture_sizes": [1, 4, 16, 32],
    }
    return LLM(model=folder, **{**defaults, **settings})


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def check(model: Any, outputs: Any) -> None:
    for output in outputs:
        tokens = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([output.prompt_token_ids + tokens])).logits[0]
        assert tokens == logits.argmax(-1)[len(output.prompt_token_ids) - 1 : -1].tolist()


def check_all_pages_free(llm: LLM) -> None:
    assert llm.engine.core.scheduler.stats.blocks_used == 0
    check_scheduler(llm.engine.core.scheduler)


@pytest.mark.parametrize("mode", GraphMode)
def test_five_modes_with_prefixes_found_again(reference: tuple[Any, str], mode: GraphMode) -> None:
    model, folder = reference
    llm = make_llm(folder, cudagraph_mode=mode)
    assert [group.window for group in llm.plan.kv.groups] == [11, 11, None]
    (shared,) = prompts(0, 60)
    asked = [shared + tail for tail in prompts(1, 1, 9, 40)] + prompts(2, 3, 75)
    first = llm.generate(asked, GREEDY)
    again = llm.generate(asked, GREEDY)
    check(model, [*first, *again])
    assert all(output.num_cached_tokens >= 56 for output in again[:3])
    assert again[4].num_cached_tokens >= 64
    check_all_pages_free(llm)


@pytest.mark.parametrize("mode", GraphMode)
def test_gemma_4_in_five_modes(mode: GraphMode, tmp_path: Path) -> None:
    """Groups of two block sizes, layers that read another's pages, values that are keys, embeddings in layers."""
    model = make_checkpoint("gemma4_shared", tmp_path, attention_k_eq_v=True, num_global_key_value_heads=1)
    llm = make_llm(str(tmp_path), cudagraph_mode=mode, num_kv_blocks=70)
    facts = group_facts(llm.plan)
    assert [(group.layers, group.readers, group.window) for group in facts] == [
        ((0,), (), 9),
        ((1,), (3, 4), 9),
        ((2,), (5,), None),
    ]
    (shared,) = prompts(0, 60)
    asked = [shared + tail for tail in prompts(1, 1, 9, 40)] + prompts(2, 3, 75)
    first = llm.generate(asked, GREEDY)
    again = llm.generate(asked, GREEDY)
    check(model, [*first, *again])
    assert any(output.num_cached_tokens >= 48 for output in again)
    check_all_pages_free(llm)


@pytest.mark.parametrize("window", [3, 8, 21, 70, 300])
def test_windows_beside_sinks(window: int, tmp_path: Path) -> None:
    """Windows below and above a block of 8, a chunk of 32, the prompts and the context, whose layers all have sinks."""
    model = make_checkpoint("gpt_oss", tmp_path, num_hidden_layers=4, sliding_window=window)
    llm = make_llm(str(tmp_path))
    assert [group.window for group in llm.plan.kv.groups] == ([None] if window == 300 else [window, None])
    asked = prompts(7, 60, 5, 41)
    for _ in range(2):
        outputs = llm.generate(asked, replace(GREEDY, logprobs=VOCAB_SIZE))
        check(model, outputs)
        for output in outputs:
            tokens = torch.tensor(output.prompt_token_ids + output.outputs[0].token_ids)
            with torch.inference_mode():
                expected = model(tokens.unsqueeze(0)).logits[0, len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
            for row, expected_V in zip(output.outputs[0].logprobs, expected, strict=True):
                found = torch.tensor(row.logprobs)
                torch.testing.assert_close(found, expected_V[row.token_ids], rtol=0, atol=1e-4)
    check_all_pages_free(llm)


@pytest.mark.parametrize("num_blocks", [75, 90])
def test_preempted_requests(reference: tuple[Any, str], num_blocks: int) -> None:
    model, folder = reference
    llm = make_llm(folder, num_kv_blocks=num_blocks, enable_prefix_caching=num_blocks == 90, max_model_len=200)
    check(
        model,
        llm.generate(prompts(3, 90, 100, 80, 95, 60), SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)),
    )
    assert llm.engine.core.scheduler.stats.num_preemptions
    check_all_pages_free(llm)


def test_aborts_of_sequences_that_share_prefixes(reference: tuple[Any, str]) -> None:
    model, folder = reference
    llm = make_llm(folder)
    rng = random.Random(0)
    session = llm.session
    (shared,) = prompts(4, 90)
    outputs: list[Any] = []
    for step in range(300):
        if step < 200 and rng.random() < 0.3:
            begin = shared[: rng.randint(0, 90)]
            outputs.append(session.add(begin + prompts(step, rng.randint(1, 40))[0], GREEDY))
        if outputs and rng.random() < 0.1:
            session.abort(rng.choice(outputs))
        session.step()
        check_scheduler(llm.engine.core.scheduler)
    while session.has_unfinished:
        session.step()
    finished = [output for output in outputs if len(output.outputs[0].token_ids) == 40]
    assert len(finished) > 20
    check(model, finished)
    check_all_pages_free(llm)


def test_a_context_beyond_what_a_sliding_model_keeps(tmp_path: Path) -> None:
    """A single sliding group holds a window and a chunk of each request, not its whole context."""
    model = make_checkpoint("mistral", tmp_path)
    llm = make_llm(str(tmp_path), num_kv_blocks=20, max_num_batched_tokens=16, cudagraph_capture_sizes=[1, 4, 16])
    outputs = llm.generate(prompts(5, 200, 150, 170), SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    check(model, outputs)
    check_all_pages_free(llm)


@pytest.mark.parametrize("block_size", [4, 8])
def test_a_request_takes_the_planned_pages(reference: tuple[Any, str], block_size: int) -> None:
    _, folder = reference
    llm = make_llm(folder, block_size=block_size, enable_prefix_caching=False, num_kv_blocks=400)
    facts = group_facts(llm.plan)
    planned = sum(group.blocks_per_request for group in facts)
    llm.session.add(prompts(6, 255)[0], SamplingParams(temperature=0.0, max_tokens=1))
    most = 0
    while llm.session.has_unfinished:
        llm.session.step()
        most = max(most, llm.engine.core.scheduler.stats.blocks_used)
    # A sliding group saves a block if the chunk begins at the border of one.
    assert planned - len(facts) <= most <= planned


def _other_tables(self: GroupBuilder, commons: Any, *, key: Any) -> Any:
    second = commons[1]
    tables = replace(commons[0], block_table=second.block_table), replace(second, block_table=commons[0].block_table)
    return RIGHT_BUILD(self, [*tables, *commons[2:]], key=key)


def _other_slots(self: GroupBuilder, commons: Any, *, key: Any) -> Any:
    return RIGHT_BUILD(self, [replace(common, slot_mapping=commons[-1].slot_mapping) for common in commons], key=key)


RIGHT_BUILD = GroupBuilder.build


@pytest.mark.parametrize(
    ("fault", "build", "window"),
    [
        ("a group reads another's block table", _other_tables, 11),
        ("groups write to the pages of the last", _other_slots, 11),
        ("a window is too long by one", RIGHT_BUILD, 12),
        ("a window is too short by one", RIGHT_BUILD, 10),
    ],
)
def test_planted_faults(
    reference: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, fault: str, build: Any, window: int
) -> None:
    """Each of these faults changes tokens, so that the tests above see it."""
    model, folder = reference
    monkeypatch.setattr(GroupBuilder, "build", build)
    llm = make_llm(folder, hf_overrides={"sliding_window": window})
    outputs = llm.generate(prompts(7, 60, 75, 90), GREEDY)
    with pytest.raises(AssertionError):
        assert all(output.outputs for output in outputs)  # logits that are not numbers end a request
        check(model, outputs)
