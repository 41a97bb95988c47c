"""Values that a plan derives from its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from resized import resized
from safetensors.torch import load_file, save_file

from phonograph import LLM
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.engine.plan import make_plan
from phonograph.engine.startup.start import start_engine
from phonograph.errors import ConfigError
from phonograph.graphs.dispatch import StepShape
from phonograph.models.spec import read_model_spec


def test_no_graph_is_captured_for_more_tokens_than_requests_can_have() -> None:
    limits = {"max_num_seqs": 3, "max_model_len": 72, "num_kv_blocks": 96, "max_num_batched_tokens": 512}
    limits["max_cudagraph_capture_size"] = 512
    plan = make_plan(EngineConfig(model="demo", **limits), read_model_spec("demo"), known_device("cpu"))
    assert max(key.num_tokens for key in plan.captures.largest_first()) == 3 * 72
    limits = {**limits, "num_kv_blocks": 7}
    plan = make_plan(EngineConfig(model="demo", **limits), read_model_spec("demo"), known_device("cpu"))
    assert max(key.num_tokens for key in plan.captures.largest_first()) == 72 + 2 * 16


@pytest.mark.parametrize(
    ("settings", "decode", "mixed"),
    [
        ({}, range(1, 9), range(1, 9)),
        ({"max_num_seqs": 3}, range(1, 4), range(1, 9)),
        ({"max_num_batched_tokens": 4}, range(1, 5), range(1, 5)),
        ({"max_cudagraph_capture_size": 20}, [*range(1, 17), 18, 20], [*range(1, 17), 18, 20]),
        ({"max_cudagraph_capture_size": 512, "max_num_seqs": 10}, range(1, 11), [*range(1, 17), 18]),
        ({"cudagraph_capture_sizes": [4, 32]}, [4, 32], [4, 32]),
        ({"cudagraph_mode": "FULL_DECODE_ONLY"}, range(1, 9), []),
        ({"enforce_eager": True}, [], []),
    ],
)
def test_a_cpu_captures_small_steps_without_padding(
    settings: dict[str, Any], decode: Sequence[int], mixed: Sequence[int]
) -> None:
    config = EngineConfig(model="demo", max_model_len=64, **settings)
    plan = make_plan(config, read_model_spec("demo"), known_device("cpu"))
    assert [key.num_tokens for key in plan.captures.decode] == list(decode)
    assert [key.num_tokens for key in plan.captures.mixed][: len(mixed)] == list(mixed)
    explained = any(note.startswith("graphs of up to 8 tokens: on a CPU") for note in plan.notes)
    sized = settings.keys() & {"max_cudagraph_capture_size", "cudagraph_capture_sizes", "enforce_eager"}
    assert explained == (not sized)
    dispatcher = plan.make_dispatcher()
    most = max([*decode, 0])
    for tokens in decode if most <= 10 else ():
        decision = dispatcher.decide(StepShape(num_tokens=tokens, num_reqs=tokens, decode_query_len=1))
        assert decision.key is not None and decision.num_tokens == tokens


def test_drafts_leave_a_decode_graph_for_one_sequence_on_a_cpu() -> None:
    config = EngineConfig(model="demo", num_speculative_tokens=9)
    plan = make_plan(config, read_model_spec("demo"), known_device("cpu"))
    assert [(key.num_tokens, key.num_reqs) for key in plan.captures.drafting] == [(6, 1), (10, 1)]


@pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"num_kv_blocks": 8}])
def test_sizes_that_no_step_can_reach_are_left_out_with_the_reason(limits: dict[str, int]) -> None:
    config = EngineConfig(model="demo", max_model_len=64, cudagraph_capture_sizes=[2, 128, 129, 512], **limits)
    plan = make_plan(config, read_model_spec("demo"), known_device("cpu"))
    assert [key.num_tokens for key in plan.captures.mixed] == [2, 128]
    assert "no mixed graph of 129, 512 tokens: a step has at most 128 tokens where requests have full length" in (
        " ".join(plan.notes)
    )


def test_verification_without_a_size_left_names_the_sizes() -> None:
    llm = LLM(
        model="demo",
        max_model_len=64,
        max_num_seqs=4,
        cudagraph_mode="FULL_DECODE_ONLY",
        cudagraph_capture_sizes=[8, 16],
    )
    with pytest.raises(ConfigError, match=r"cudagraph_capture_sizes=\[8, 16\]: leaves no graph.*max_num_seqs=4"):
        llm.verify()


@pytest.mark.parametrize(
    ("settings", "head_size", "size"),
    [
        ({"attention_backend": "flash_attn"}, 128, 128),
        ({"attention_backend": "flash_attn"}, 64, 64),
        ({"attention_backend": "flash_attn", "block_size": 32}, 128, 32),
        # A number of blocks is one of blocks as they are by default.
        ({"attention_backend": "flash_attn", "num_kv_blocks": 400}, 128, 64),
        ({"attention_backend": "flash_attn", "kv_cache_dtype": "fp8"}, 128, 64),
        ({"attention_backend": "flash_attn", "flash_attn_version": 2}, 128, 64),
        ({"attention_backend": "triton"}, 128, 64),
        ({"attention_backend": "prefill=flash_attn,decode=triton"}, 128, 64),
    ],
)
def test_blocks_as_the_backend_likes_them(settings: dict[str, Any], head_size: int, size: int) -> None:
    model = resized(read_model_spec("demo"), head_size=head_size)
    plan = make_plan(EngineConfig(model="demo", **settings), model, known_device("h200"))
    assert plan.attention.block_size == size
    assert any(note.startswith("block_size 128: flash_attn 3") for note in plan.notes) == (size == 128)


def test_layers_of_several_softcaps_have_groups_of_their_own(tmp_path: Path) -> None:
    make_checkpoint("gemma2", tmp_path)
    model = read_model_spec(tmp_path)
    assert make_plan(EngineConfig(model="demo"), model, known_device("cpu")).attention.softcap == 2.0
    first, *others = model.layers
    changed = replace(first, mixer=replace(first.attention, softcap=7.0))
    plan = make_plan(EngineConfig(model="demo"), replace(model, layers=(changed, *others)), known_device("cpu"))
    softcaps = {
        layer: spec.softcap for group, spec in zip(plan.kv.groups, plan.kv.specs, strict=True) for layer in group.layers
    }
    assert softcaps == {0: 7.0, 1: 2.0, 2: 2.0}


def test_a_block_is_no_larger_than_kernels_can_address() -> None:
    """Kernels address what lies within a block of a layer's keys by 32 bits."""
    model = read_model_spec("demo")
    attention = model.layers[0].attention
    most = ((1 << 31) - 1) // (attention.num_kv_heads * attention.head_size) // 16 * 16
    with pytest.raises(ConfigError, match=rf"block_size={most + 16}: .*; {most} or less works"):
        make_plan(EngineConfig(model="demo", block_size=most + 16), model, known_device("h200"))


def test_memory_counts_a_head_that_differs_from_tied_embeddings(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", max_model_len=32, num_kv_blocks=4, enforce_eager=True)
    tied = start_engine(config).plan
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] + 1
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    plan = start_engine(config).plan
    assert plan.memory.weights - tied.memory.weights == head.nbytes
    assert any("lm_head.weight of the checkpoint differs" in note for note in plan.notes)


def test_overrides_reach_the_engine(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    overrides = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 100}
    config = EngineConfig(
        model=str(tmp_path), device="cpu", hf_overrides=overrides, num_kv_blocks=16, enforce_eager=True
    )
    assert start_engine(config).plan.limits.max_model_len == 200
