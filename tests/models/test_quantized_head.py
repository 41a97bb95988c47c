"""The language model's head in FP8, made at load: its weights, its logits, what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import load_model, make_checkpoint

from phonograph import LLM, SamplingParams
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.engine.plan import EnginePlan, make_plan
from phonograph.engine.startup.configured_model import read_configured_model
from phonograph.errors import ConfigError
from phonograph.kernels.torch.grouped import Grouped, dequantize
from phonograph.models.quantization.float8 import Fp8Head
from phonograph.models.spec import read_model_spec
from phonograph.models.transformer import Transformer


def load(folder: Path, scheme: Fp8Head | None = None) -> Transformer:
    spec = read_model_spec(folder)
    spec = spec if scheme is None else spec.with_head_scheme(scheme)
    return load_model(spec, folder, dtype=torch.float32, device=torch.device("cpu"))


def plan_of(device: str, **settings: object) -> EnginePlan:
    config = EngineConfig(model="demo", quantize_lm_head="fp8", **settings)  # pyright: ignore[reportArgumentType]
    return make_plan(config, read_configured_model(config, config_only=True), known_device(device))


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_rounded_and_the_embedding_is_not(
    tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint("qwen3" if tied else "llama3", tmp_path)
    exact = load(tmp_path)
    assert exact.spec.tie_word_embeddings == tied
    caplog.set_level(logging.INFO)
    model = load(tmp_path, Fp8Head(origin="FP8", scales="channel"))
    assert torch.equal(model.embedding_VE, exact.embedding_VE)
    head_VE, rounded = exact.lm_head.matrix.t(), model.lm_head.weight.operand
    assert isinstance(rounded, Grouped)
    # Three bits behind the point, and an exact largest number of each output.
    error = (dequantize(rounded) - head_VE).norm() / head_VE.norm()
    assert 0.01 < error < 0.04
    torch.testing.assert_close(dequantize(rounded).abs().amax(1), head_VE.abs().amax(1), rtol=1e-5, atol=0)
    assert f"lm_head is in FP8; relative error of its weights {error:.4f}" in caplog.text
    hidden = torch.randn(3, exact.spec.hidden_size)
    found, wanted = model.prompt_logits(hidden), exact.prompt_logits(hidden)
    assert 1e-3 < (found - wanted).norm() / wanted.norm() < 0.04
    assert model.spec.num_parameters == exact.spec.num_parameters
    vocabulary, width = exact.spec.vocab_size, exact.spec.hidden_size
    # A tied head becomes a second matrix.
    change = vocabulary * (width + 4) - (0 if tied else 4 * vocabulary * width)
    assert model.spec.weight_bytes("float32") == exact.spec.weight_bytes("float32") + change


def test_graphs_answer_as_eager_steps_do() -> None:
    def answers(mode: str) -> list[tuple[int, ...]]:
        llm = LLM(
            model="demo", quantize_lm_head="fp8", cudagraph_mode=mode, device="cpu", max_num_seqs=2, max_model_len=64
        )
        found = llm.generate(["3 + 9 =", "12 + 30 ="], SamplingParams(max_tokens=4, temperature=0.0))
        return [tuple(one.outputs[0].token_ids) for one in found]

    assert answers("FULL") == answers("NONE")


def test_what_has_no_head_in_fp8(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantize_lm_head='fp8'.*a100-80gb has no product of FP8 in bfloat16"):
        plan_of("a100-80gb")
    with pytest.raises(ConfigError, match="no product of FP8 in float32.*dtype bfloat16"):
        plan_of("h200", dtype="float32")
    with pytest.raises(ConfigError, match="batch_invariant has no such product"):
        plan_of("h200", batch_invariant=True)
    model = replace(read_model_spec("demo"), vocab_size=2050)
    with pytest.raises(ConfigError, match="multiples of 16; the head is 2050 by 256"):
        make_plan(EngineConfig(model="demo", quantize_lm_head="fp8"), model, known_device("h200"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="model.gguf is a GGUF file"):
        read_configured_model(EngineConfig(model=str(file), quantize_lm_head="fp8"), config_only=False)


def test_the_memory_plan_has_room_for_rows_in_fp8() -> None:
    plan = plan_of("h200", max_num_batched_tokens=512)
    without = make_plan(
        EngineConfig(model="demo", max_num_batched_tokens=512), read_model_spec("demo"), known_device("h200")
    )
    assert plan.memory.weights - without.memory.weights == 2048 * (256 + 4)
    assert plan.memory.graphs - without.memory.graphs == 512 * (256 + 4)
    assert any("FP8 activations" in note for note in plan.notes)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Each answer is as likely by the demo model itself as a head in FP8 allows, with few and with many sequences."""
    prompts = [f"{number} + {3 * number} =" for number in range(40)]
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=1)

    def answers(count: int, **settings: object) -> list[tuple[int, ...]]:
        llm = LLM(
            model="demo",
            device="cuda",
            dtype="bfloat16",
            max_num_seqs=64,
            max_model_len=64,
            num_kv_blocks=400,
            **settings,  # pyright: ignore[reportArgumentType]
        )
        return [tuple(one.outputs[0].token_ids) for one in llm.generate(prompts[:count], params)]

    for count in (3, 40):
        full = answers(count, quantize_lm_head="fp8")
        assert full == answers(count, quantize_lm_head="fp8", cudagraph_mode="NONE")
        same = sum(one == other for one, other in zip(full, answers(count), strict=True))
        assert same >= 0.9 * count
