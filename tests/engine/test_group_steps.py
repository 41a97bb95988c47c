"""Steps with several KV groups against transformers, in pages of which those behind windows are freed and poisoned."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from group_driver import GroupDriver, Hand

from phonograph.attention.reference.backend import ReferenceBackend, ReferenceCapabilities
from phonograph.engine.llm import LLM
from phonograph.graphs.modes import GraphMode
from phonograph.runner.cpu_inputs import CpuInputs
from phonograph.runner.group_builder import GroupBuilder
from phonograph.runner.pools import kv_pool
from phonograph.runner.step_attention import StepAttention

MIXED = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 2 + ["sliding_attention"],
}
NEAR = 1e-4


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "max_model_len": 256,
        "block_size": 8,
        "num_kv_blocks": 140,
        "cudagraph_capture_sizes": [1, 4, 16, 48],
    }
    return LLM(model=str(folder), **{**defaults, **settings})


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check(reference: Any, *hands: Hand) -> None:
    for hand in hands:
        with torch.inference_mode():
            expected = reference(torch.tensor([hand.tokens])).logits[0].double().log_softmax(-1)
        rows = expected[hand.prompt_len - 1 : -1]
        assert hand.tokens[hand.prompt_len :] == rows.argmax(-1).tolist()
        assert (torch.stack(hand.logprobs) - rows).abs().max() <= NEAR


def run(llm: LLM, *, chunk: int, outputs: int) -> list[Hand]:
    """Prompts of many lengths, that start at different steps beside decodes."""
    driver = GroupDriver(llm.engine, chunk=chunk)
    hands = [driver.add(prompt(seed, length)) for seed, length in enumerate((3, 61, 24))]
    running: list[Hand] = []
    for hand in hands:
        running.append(hand)
        while len(hand.tokens) - hand.computed > 1:
            driver.step(*running)
    while len(hands[-1].tokens) < hands[-1].prompt_len + outputs:
        driver.step(*running)
    chunk_blocks = -(-chunk // 8)
    for group, kv in enumerate(driver.groups):
        if kv.window is not None:
            assert driver.most_live[group] <= -(-kv.window // 8) + chunk_blocks + 2
    return hands


@pytest.mark.parametrize("mode", GraphMode)
def test_five_modes(tmp_path: Path, mode: GraphMode) -> None:
    """A window of 11 is longer than a block and shorter than a chunk of 17."""
    reference = make_checkpoint("qwen2_window", tmp_path, **MIXED, sliding_window=11)
    llm = make_llm(tmp_path, cudagraph_mode=mode)
    assert [group.window for group in llm.plan.kv.groups] == [11, 11, None]
    hands = run(llm, chunk=17, outputs=40)
    check(reference, *hands)
    assert ("eager" in llm.engine.core.runner.counts) == (not mode.mixed_full and not mode.piecewise)


@pytest.mark.parametrize("window", [2, 8, 9, 23, 70])
@pytest.mark.parametrize("chunk", [5, 40])
def test_windows_around_a_block_a_chunk_and_the_prompt(tmp_path: Path, window: int, chunk: int) -> None:
    reference = make_checkpoint("qwen2_window", tmp_path, **MIXED, sliding_window=window)
    check(reference, *run(make_llm(tmp_path), chunk=chunk, outputs=20))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_single_sliding_group(tmp_path: Path, layout: str) -> None:
    reference = make_checkpoint("mistral", tmp_path)
    llm = make_llm(tmp_path, kv_cache_layout=layout)
    assert [group.window for group in llm.plan.kv.groups] == [9]
    check(reference, *run(llm, chunk=12, outputs=20))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_prefixes_are_shared_by_group(tmp_path: Path, layout: str) -> None:
    """A sequence takes all blocks of a full group, and those of the last window of a sliding group."""
    reference = make_checkpoint("qwen2_window", tmp_path, **MIXED, sliding_window=11)
    llm = make_llm(tmp_path, kv_cache_layout=layout)
    driver = GroupDriver(llm.engine, chunk=16)
    first = driver.add(prompt(0, 50))
    for _ in range(3):
        driver.step(first)
    second = driver.add(first.tokens[:48] + prompt(1, 30), first)
    assert second.first_live == [4, 4, 0]
    while len(second.tokens) < second.prompt_len + 20:
        driver.step(*([first, second] if len(second.tokens) % 2 else [second]))
    check(reference, first, second)


@pytest.mark.parametrize("seed", range(4))
def test_random_operations(tmp_path: Path, seed: int) -> None:
    """Sequences begin, share prefixes and end in any order; a slot's tables keep what the last sequence left there."""
    rng = random.Random(seed)
    layer_types = rng.choices(["sliding_attention", "full_attention"], k=5)
    window = rng.randint(2, 40)
    settings = {"num_hidden_layers": 5, "layer_types": layer_types, "sliding_window": window}
    reference = make_checkpoint("qwen2_window", tmp_path, **settings)
    llm = make_llm(tmp_path, block_size=rng.choice([2, 4, 8]), num_kv_blocks=600)
    driver = GroupDriver(llm.engine, chunk=rng.choice([3, 11, 40]), seed=seed)
    running: list[Hand] = []
    ended: list[Hand] = []
    size = driver.groups[0].block_size
    while len(ended) < 12:
        parents = [hand for hand in running if hand.computed and hand.computed % size == 0]
        if parents and len(running) < 4 and rng.random() < 0.8:
            parent = rng.choice(parents)
            shared = parent.tokens[: parent.computed]
            running.append(driver.add(shared + prompt(rng.randrange(1000), rng.randint(1, 30)), parent))
        elif len(running) < 4 and rng.random() < 0.3:
            running.append(driver.add(prompt(rng.randrange(1000), rng.randint(1, 70))))
        for hand in [hand for hand in running if len(hand.tokens) > 120 or rng.random() < 0.02]:
            running.remove(hand)
            ended.append(hand)
            driver.end(hand)
        # One prompt in progress beside the decodes, as in a schedule.
        waiting = [hand for hand in running if len(hand.tokens) - hand.computed > 1]
        batch = [hand for hand in running if hand not in waiting or hand is waiting[0]]
        if batch:
            driver.step(*batch)
    check(reference, *(hand for hand in ended if hand.logprobs))
    for hand in running:
        driver.end(hand)
    assert sorted(driver.free) == list(range(600)), "every page is free at the end"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2_window")
    make_checkpoint("qwen2_window", path, **MIXED, sliding_window=11)
    return path


def mismatches(folder: Path, **settings: Any) -> set[str]:
    """Return the names of what differs between replays and eager runs."""
    report = make_llm(folder, cudagraph_capture_sizes=[4, 24], **settings).verify(num_replays=40)
    return {one.tensor for one in report.mismatches}


@pytest.mark.parametrize("settings", [{}, {"kv_cache_layout": "HND"}, {"kv_cache_dtype": "fp8"}])
def test_replays_equal_eager_runs(folder: Path, settings: dict[str, str]) -> None:
    assert mismatches(folder, **settings) == set()


def test_a_window_that_is_one_key_too_wide_reads_a_freed_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ReferenceBackend.forward

    def wider(self: ReferenceBackend, query_THD: torch.Tensor, call: Any, *outs: Any) -> None:
        left, right = call.layer.window
        layer = replace(call.layer, window=(left + 1, right)) if left >= 0 else call.layer
        original(self, query_THD, call._replace(layer=layer), *outs)

    monkeypatch.setattr(ReferenceBackend, "forward", wider)
    assert "NaN rows, where blocks behind windows are NaN," in mismatches(folder)


def test_a_group_with_the_table_of_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers read it in replays and eagerly alike, so only the tables themselves differ from those drawn."""
    original = StepAttention._metadata

    def metadata(self: StepAttention, group: int) -> Any:
        return original(self, 2) if group == 1 else original(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(StepAttention, "_metadata", metadata)
        assert "block table of KV group 1" in mismatches(folder)
    write = CpuInputs.write

    def swapped(self: CpuInputs, *args: Any, **settings: Any) -> Any:
        commons = write(self, *args, **settings)
        self.block_tables_np[0] = self.block_tables_np[1]
        return commons

    monkeypatch.setattr(CpuInputs, "write", swapped)
    assert "block table of KV group 0" in mismatches(folder)


def test_a_group_that_writes_where_another_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = GroupBuilder.build

    def wrong(self: GroupBuilder, commons: Any, **settings: Any) -> Any:
        shared = replace(commons[1], slot_mapping=commons[0].slot_mapping)
        return build(self, (commons[0], shared, commons[2]), **settings)

    monkeypatch.setattr(GroupBuilder, "build", wrong)
    assert "kv of KV group 1" in mismatches(folder)


def test_backends_that_need_finite_blocks_get_a_cache_of_zeros(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels multiply values behind a window by 0, which makes NaN of NaN."""
    original = ReferenceBackend.forward

    def reads_freed_blocks(self: ReferenceBackend, query_THD: torch.Tensor, call: Any, out: Any, *lse: Any) -> None:
        original(self, query_THD, call, out, *lse)
        first = call.metadata.common.block_table[:1, 0].long()
        out += 0 * call.kv_cache[1].index_select(0, first).sum()

    monkeypatch.setattr(ReferenceBackend, "forward", reads_freed_blocks)
    assert "logits" in mismatches(folder)
    monkeypatch.setattr(ReferenceCapabilities, "skips_freed_blocks", False)
    assert mismatches(folder) == set()
    allocate = kv_pool.allocate_kv_caches

    def allocate_nan(*args: Any, **settings: Any) -> list[torch.Tensor]:
        return [cache.fill_(torch.nan) for cache in allocate(*args, **settings)]

    monkeypatch.setattr(kv_pool, "allocate_kv_caches", allocate_nan)
    caches = make_llm(folder).engine.core.runner._program.attention._kv_caches
    assert len(caches) == 6 and all(cache.isfinite().all() for cache in caches)
