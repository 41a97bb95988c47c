"""`phonograph explain` of a model whose layers have several kinds of attention: each KV group with its reasons."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run
from public_family_configs import FAMILY_CONFIGS

from phonograph.cli.app import main
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.engine import plan
from phonograph.graphs.modes import GraphMode
from phonograph.models.spec import ModelSpec, read_model_spec

# Sizes of Gemma 3 12B; every sixth layer attends to all keys.
TWELVE_B = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    "max_position_embeddings": 131072,
    "vocab_size": 262144,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}
SIZES = ["--device-name", "h200", "--max-model-len", "32768", "--max-num-seqs", "64"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TWELVE_B))
    return str(tmp_path)


def test_sliding_layers_take_a_window_a_chunk_and_two_blocks_of_each_request(folder: str, run_json: Any) -> None:
    (facts,) = run_json("explain", folder, *SIZES)
    groups, chunk = facts["kv_groups"], facts["limits"]["max_num_batched_tokens"]
    assert [(len(group["layers"]), group["window"]) for group in groups] == [(8, 1024)] * 5 + [(8, None)]
    assert all((group["block_size"], group["backend"]) == (64, "triton") and group["reasons"] for group in groups)
    assert {group["blocks_per_request"] for group in groups[:5]} == {(1024 + chunk) // 64 + 1}
    assert groups[5]["blocks_per_request"] == 32768 // 64
    memory = facts["memory"]
    assert memory["kv_block"] == 8 * 64 * 2 * 8 * 256 * 2
    per_request = sum(group["blocks_per_request"] for group in groups)
    assert memory["num_kv_blocks"] // per_request * 32768 <= memory["num_kv_tokens"]
    # One group would hold fewer tokens in the same memory.
    assert memory["num_kv_tokens"] > 1.5 * memory["kv_cache"] // (48 * 2 * 8 * 256 * 2)


def test_memory_counts_the_buffers_of_each_plan_and_the_tables_of_each_group(folder: str) -> None:
    device, config = known_device("h200"), EngineConfig(model=folder, max_model_len=32768, max_num_seqs=64)
    one = plan.make_plan(config, read_model_spec(folder), device)
    tables = 5 * (8 * 64 * 32768 // 64 + 8 * one.limits.max_num_batched_tokens)
    capabilities, specs = one.selection.capabilities, list(one.kv.members)
    buffers = [capabilities.buffer_bytes(spec, device, one.limits, ()) for spec in specs]
    assert len(specs) == 2 and one.memory.attention == sum(buffers) + tables
    infer = plan.make_plan(config.model_copy(update={"attention_backend": "flashinfer"}), one.model, device)
    capabilities, graphs = infer.selection.capabilities, infer.captures.largest_first()
    windowed, full = (capabilities.buffer_bytes(spec, device, infer.limits, graphs) for spec in specs)
    assert infer.memory.attention == 5 * windowed + full + tables


def test_a_group_of_wide_heads_has_its_own_backend_and_decides_on_the_mode(folder: str) -> None:
    """Heads of 640, which no GPU kernel here takes. Those of 512 run in our kernels; a block has half the tokens of
    other blocks."""
    config = EngineConfig(model=folder, max_model_len=4096, max_num_seqs=8)
    model = read_model_spec(folder)

    def with_heads(size: int) -> ModelSpec:
        layers = tuple(
            replace(layer, mixer=replace(layer.attention, head_size=size)) if layer.attention.window[0] < 0 else layer
            for layer in model.layers
        )
        return replace(model, layers=layers)

    wide = plan.make_plan(config, with_heads(512), known_device("h200"))
    assert wide.backends == "triton" and wide.kv.block_sizes == (128,) * 5 + (64,)
    assert wide.resolution.mode is GraphMode.FULL
    one = plan.make_plan(config, with_heads(640), known_device("h200"))
    assert [selection.capabilities.label for selection in one.selections] == ["triton"] * 5 + ["reference"]
    assert one.backends == "triton, reference" and one.kv.block_sizes == (160,) * 5 + (64,)
    assert one.resolution.mode is GraphMode.PIECEWISE
    assert "KV group 5 (8 layers, full attention): on cuda its operators copy" in one.resolution.support.reason


def test_text_names_the_groups(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(run(capsys, "explain", folder, *SIZES).split())
    assert "KV groups 0: 8 layers (0-4, 6-8), window 1024, blocks of 64 tokens, at most 145 a request, triton" in text
    assert "5: 8 layers (5-47 by 6), full attention, blocks of 64 tokens, at most 512 a request, triton" in text
    assert "attention KV groups 0, 1, 2, 3, 4 (8 layers, window 1024): triton - none was asked for" in text
    assert "KV group 5 (8 layers, full attention): triton - none was asked for" in text
    one = " ".join(run(capsys, "explain", "demo", "--device-name", "h200").split())
    assert "KV groups" not in one


def test_prefixes_that_windows_share(folder: str, run_json: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A window of 1,024 has all of 900 tokens in common, the tiles of 32 from key 288 on, or none."""
    batches = [word for keys in (950, 1300, 2000) for word in ("--batch", f"32x1@{keys}/900")]
    text = " ".join(run(capsys, "explain", folder, *SIZES, *batches).split())
    windows, full = "KV groups 0, 1, 2, 3, 4 (8 layers, window 1024): ", "KV group 5 (8 layers, full attention): "
    runs = [0, 288, None]
    for begin, after in zip(runs, text.split("32 x 1@")[-3:], strict=True):
        assert f"{full}sequences 0 to 31 attend keys 0 to 896 once" in after
        assert (f"{windows}sequences 0 to 31 attend keys {begin} to 896 once" in after) == (begin is not None), after
        assert (windows in after) == (begin is not None)
    assert "share 256 keys or more in equal blocks and in the windows of all attend them once" in text
    (facts,) = run_json("explain", folder, *SIZES, *batches)
    assert [[run["begin"] for run in one["shared_prefixes"]] for one in facts["batches"]] == [[0], [288], []]


def test_the_matrix_of_each_attention(folder: str, run_json: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (facts,) = run_json("explain", folder, *SIZES, "--matrix")
    names = ["KV groups 0, 1, 2, 3, 4 (8 layers, window 1024)", "KV group 5 (8 layers, full attention)"]
    assert list(facts["kv_groups"]) == names
    text = run(capsys, "explain", folder, *SIZES, "--matrix")
    assert all(name in text for name in names)


def test_a_plan_of_one_window_serves_each_group(folder: str, run_json: Any) -> None:
    """FlashInfer's plans hold one window, and FlashAttention 3 plans ahead with one only."""
    (infer,) = run_json("explain", folder, *SIZES, "--attention-backend", "flashinfer")
    assert {group["backend"] for group in infer["kv_groups"]} == {"flashinfer"}
    (flash,) = run_json("explain", folder, *SIZES, "--attention-backend", "flash_attn", "--flash-attn-version", "3")
    assert "ahead-of-time schedule is made inside the graph" in flash["support"]["reason"]


def test_backends_without_sinks_refuse_with_the_group_and_the_reason(
    tmp_path: Path, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """gpt-oss-20b: every head has a sink, 64 of them, which FlashAttention 3 takes."""
    config, _ = FAMILY_CONFIGS["openai/gpt-oss-20b"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (facts,) = run_json("explain", str(tmp_path), *SIZES)
    groups = facts["kv_groups"]
    assert [(group["window"], group["backend"]) for group in groups] == [(128, "triton"), (None, "triton")]
    assert facts["mode"]["resolved"] == "FULL"
    assert "attention sinks" in run(capsys, "explain", str(tmp_path), *SIZES)
    (flash,) = run_json("explain", str(tmp_path), *SIZES, "--attention-backend", "flash_attn")
    assert {group["backend"] for group in flash["kv_groups"]} == {"flash_attn 3"}
    for flags, reason in (
        (["--attention-backend", "flashinfer"], "attention sinks; its kernels have none"),
        (["--attention-backend", "flash_attn", "--flash-attn-version", "2"], "attention sinks; its kernels have none"),
    ):
        assert main(["explain", str(tmp_path), *SIZES, *flags]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert reason in error and "KV group 0 (12 layers, window 128)" in error, error


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            ["--attention-backend", "reference", "--batch-invariant"],
            "KV group 0 .8 layers, window 1024.: attention_bac",
        ),
    ],
)
def test_refusals_name_the_group(
    folder: str, flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", folder, *SIZES, *flags]) == 2
    error = " ".join(capsys.readouterr().err.split())

    assert re.search(problem, error), error
