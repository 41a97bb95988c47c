"""Choice of the products of quantized weights on a CPU, and engines with each of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from quantized_checkpoints import FORMATS, quantize_checkpoint, quantized_demo

from phonograph import LLM, SamplingParams
from phonograph.cli.app import main
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.engine.plan import EnginePlan, make_plan
from phonograph.engine.startup import cpu_products
from phonograph.errors import ConfigError
from phonograph.kernels.torch import int4pack
from phonograph.models.spec import read_model_spec

FAST = cpu_products.Measured(int4=50, float32=200, operator_rows=8, tile_dtype="bfloat16")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint("qwen2", tmp_path)
    quantize_checkpoint(tmp_path, FORMATS["gptq"])
    return tmp_path


def plan(folder: Path, device: str = "cpu", **settings: Any) -> EnginePlan:
    config = EngineConfig(model=str(folder), max_model_len=64, **settings)
    return make_plan(config, read_model_spec(folder), known_device(device))


def test_auto_is_the_faster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "measure", lambda: FAST)
    packed = plan(folder)
    assert packed.cpu_products is not None and packed.cpu_products.int4
    assert packed.cpu_products.operator_rows == 8 and packed.cpu_products.tile_dtype == "bfloat16"
    (note,) = (note for note in packed.notes if note.startswith("cpu_products"))
    assert "50 us packed in 4 bits, in bfloat16" in note and "200 us in float32" in note
    monkeypatch.setattr(cpu_products, "measure", lambda: replace(FAST, int4=300))
    dense = plan(folder)
    assert dense.cpu_products is not None and not dense.cpu_products.int4 and dense.cpu_products.dequantize
    assert dense.memory.weights > packed.memory.weights
    forced = plan(folder, cpu_products="int4").cpu_products
    assert forced is not None and forced.int4
    assert plan(folder, device="h200").cpu_products is None
    assert plan(folder, cpu_products="float32").memory.weights == dense.memory.weights


def test_a_model_without_quantized_weights_has_no_choice(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path)
    assert plan(tmp_path, cpu_products="int4").cpu_products is None


def test_without_the_operator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4pack, "missing", lambda: "torch 9 has no operator x")
    chosen = plan(folder).cpu_products
    assert chosen is not None and not chosen.int4 and chosen.reason == "torch 9 has no operator x"
    with pytest.raises(ConfigError, match="cpu_products=.int4.*torch 9 has no operator x; float32 works"):
        plan(folder, cpu_products="int4")


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_formats_without_a_packed_form(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "measure", lambda: FAST)
    if kind == "mxfp4":
        make_checkpoint("gpt_oss", tmp_path, intermediate_size=32)
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
        (tmp_path / "config.json").write_text(json.dumps(config))
    else:
        make_checkpoint("qwen2", tmp_path)
        quantize_checkpoint(tmp_path, FORMATS[kind])
    chosen = plan(tmp_path).cpu_products
    assert chosen is not None and not chosen.int4 and "no packed form" in chosen.reason


def test_weights_that_fit_in_no_other_way_stay_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("qwen2", tmp_path)
    quantize_checkpoint(tmp_path, FORMATS["fp8"])

    monkeypatch.setattr(cpu_products, "available_memory", lambda: 100_000)
    chosen = cpu_products.plan_cpu_products("auto", read_model_spec(tmp_path), "float32")
    assert chosen is not None and not chosen.dequantize and "each step unpacks them" in chosen.reason
    asked = cpu_products.plan_cpu_products("float32", read_model_spec(tmp_path), "float32")
    assert asked is not None and asked.dequantize


def test_the_probe_measures_both() -> None:
    measured = cpu_products.measure()
    assert 0 < measured.int4 < 1e5 and 0 < measured.float32 < 1e5
    assert 1 <= measured.operator_rows <= 64 and measured.tile_dtype in ("float32", "bfloat16")


def test_explain(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "measure", lambda: FAST)
    for setting, words in (
        (
            "auto",
            "to 8 rows by torch._weight_int4pack_mm_for_cpu, packed in 4 bits, in bfloat16; more by torch, unpacked",
        ),
        ("float32", "all rows by torch, dequantized to float32 at load"),
    ):
        assert main(["explain", "--model", str(folder), "--max-model-len", "64", "--cpu-products", setting]) == 0
        assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["gptq", "gptq order", "awq", "gptq 8 bits"])
def test_engines(name: str, tmp_path: Path) -> None:
    """Graphs answer as eager steps; packed weights are near the exact ones in log-probabilities."""
    quantized_demo(tmp_path / "model", name)
    prompts = [*(f"{number} + {3 * number} =" for number in range(6)), "Once upon a time " * 9]
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1, ignore_eos=True)

    def answers(products: str, mode: str) -> list[tuple[list[int], list[float]]]:
        llm = LLM(
            model=str(tmp_path / "model"),
            device="cpu",
            max_num_seqs=4,
            max_model_len=256,
            num_kv_blocks=200,
            cudagraph_capture_sizes=[1, 2, 4, 64],
            cpu_products=products,
            cudagraph_mode=mode,
        )
        found: list[tuple[list[int], list[float]]] = []
        for output in llm.generate(prompts, params):
            answer = output.outputs[0]
            assert answer.logprobs is not None
            found.append((list(answer.token_ids), [one.logprobs[0] for one in answer.logprobs]))
        return found

    packed = answers("int4", "FULL")
    assert [tokens for tokens, _ in packed] == [tokens for tokens, _ in answers("int4", "NONE")]
    for (tokens, near), (exact_tokens, exact) in zip(packed, answers("float32", "FULL"), strict=True):
        same = next((i for i, (a, b) in enumerate(zip(tokens, exact_tokens, strict=True)) if a != b), len(tokens))
        apart = (torch.tensor(near[:same]) - torch.tensor(exact[:same])).abs()
        assert same > 0 and apart.max() <= 0.3 and apart.mean() <= 0.03
