"""What a plan counts and refuses, at the edges of its limits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from phonograph.attention.cascade import MIN_REQUESTS, cascade_bytes
from phonograph.config import EngineConfig
from phonograph.device import GIB, known_device
from phonograph.engine import memory
from phonograph.engine.plan import EnginePlan, make_plan
from phonograph.errors import ConfigError, MemoryLimitError
from phonograph.models.spec import read_model_spec
from phonograph.models.workspace import Workspace
from phonograph.runner.grammar_masks import bitmask_words

DEMO = read_model_spec("demo")


def plan_of(device: str = "cpu", model: Any = DEMO, **settings: Any) -> EnginePlan:
    return make_plan(EngineConfig(model="demo", **settings), model, known_device(device))


def test_blocks_for_exactly_one_request_are_enough_and_one_less_is_not() -> None:
    for tokens in (64, 49):
        assert plan_of(max_model_len=tokens, num_kv_blocks=4).memory.num_blocks == 4
        with pytest.raises(MemoryLimitError, match="needs 4 KV blocks"):
            plan_of(max_model_len=tokens, num_kv_blocks=3)


def test_no_more_sequences_than_blocks() -> None:
    plan = plan_of(max_model_len=64, num_kv_blocks=4, max_num_seqs=8)
    assert plan.limits.max_num_seqs == 4 and any("max_num_seqs 8 -> 4" in note for note in plan.notes)


def test_a_cpu_claims_what_its_requests_could_use_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_free(gib: int, **settings: Any) -> memory.MemoryPlan:
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=gib * GIB))
        return plan_of(enforce_eager=True, **settings).memory

    assert with_free(64, max_num_seqs=2, max_model_len=50).num_blocks == 2 * 4
    wide = {"max_num_seqs": 100_000}
    found = with_free(1, **wide)
    assert GIB // 2 - 2 * found.block - found.weights < found.kv_cache <= GIB // 2
    found = with_free(64, **wide)
    assert 2 * GIB - found.block < found.kv_cache <= 2 * GIB


def test_a_gpus_workspace_is_that_of_the_largest_step_with_masks_of_all_rows() -> None:
    plan = plan_of("h200", enforce_eager=True, max_num_seqs=100, max_num_batched_tokens=4096)
    workspace = Workspace.nbytes(DEMO, 4096, 100, plan.dtype)
    assert plan.memory.graphs == workspace + 4 * bitmask_words(DEMO.vocab_size) * 100


def test_a_cascade_takes_its_buffers_on_top() -> None:
    settings = {"attention_backend": "flash_attn", "max_model_len": 1024, "enforce_eager": True}
    model = replace(DEMO, head_size=64, rope_frequencies=(1.0,) * 32, context_length=4096)
    plain = plan_of("h200", model, **settings)
    plan = plan_of("h200", model, cascade_attention=True, **settings)
    capabilities, batches = plan.selection.capabilities, plan.limits.of_batches
    extra = cascade_bytes(capabilities, plan.attention, plan.device, batches, ())
    own = capabilities.buffer_bytes(plan.attention, plan.device, batches, ())
    assert extra > 0 and plan.memory.attention == own + extra
    assert plain.memory.attention == own


def test_limits_that_follow_from_each_other() -> None:
    assert plan_of(max_num_batched_tokens=16).limits.max_num_seqs == 16
    assert plan_of(max_num_seqs=1000).limits.max_num_batched_tokens == 1000
    with pytest.raises(ConfigError, match="max_model_len=1: must hold a prompt token and an output token"):
        plan_of(max_model_len=1)
    sized = plan_of(max_num_batched_tokens=64, max_num_seqs=8, max_cudagraph_capture_size=64)
    assert max(key.num_tokens for key in sized.captures.largest_first()) == 64


def test_a_cascade_with_the_fewest_requests_that_can() -> None:
    settings = {"cascade_attention": True, "attention_backend": "reference", "max_model_len": 300}
    model = replace(DEMO, context_length=4096)
    assert plan_of(model=model, max_num_seqs=MIN_REQUESTS, enforce_eager=True, **settings).attention.cascade
    with pytest.raises(ConfigError, match="max_num_seqs=7 has none"):
        plan_of(model=model, max_num_seqs=MIN_REQUESTS - 1, enforce_eager=True, **settings)


def test_batch_invariance_is_not_for_cpus() -> None:
    with pytest.raises(ConfigError, match="batch_invariant=True: .*it works on a GPU"):
        plan_of(batch_invariant=True)


@pytest.mark.parametrize(
    ("device", "own", "dtype"),
    [("h200", "float32", "bfloat16"), ("h200", "float16", "float16"), ("cpu", "bfloat16", "float32")],
)
def test_auto_is_the_models_type_or_a_faster_one(device: str, own: str, dtype: str) -> None:
    assert plan_of(device, replace(DEMO, dtype=own)).dtype == dtype


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("auto", "float32"), ("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")],
)
def test_types_of_the_cache(given: str, dtype: str) -> None:
    assert plan_of(kv_cache_dtype=given).attention.kv_cache_dtype == dtype


def test_attention_serves_every_window_of_the_model() -> None:
    windows = ((-1, -1), (31, 0)) * (DEMO.num_layers // 2 or 1)
    assert plan_of(model=replace(DEMO, windows=windows)).attention.windows == ((-1, -1), (31, 0))
