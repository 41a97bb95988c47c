"""Families with state layers against transformers: logits of prompts of many lengths, cut anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import STATE_FAMILIES, VOCAB_SIZE, load_model, make_checkpoint
from dense import DenseSequences
from safetensors.torch import load_file, save_file

from phonograph.errors import ModelError, UnsupportedModelError
from phonograph.models.spec import read_model_spec
from phonograph.models.weights.loading import begin_loading

CPU = torch.device("cpu")
LENGTHS = 1, 2, 3, 63, 127, 300, 64, 65
TOLERANCE = 1e-3


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_logits(family: str, tmp_path: Path) -> None:
    """All prompts in one step, then again in steps of random parts, each with parts of several prompts."""
    reference = make_checkpoint(family, tmp_path)
    spec = read_model_spec(tmp_path)
    saved = reference.state_dict().keys()
    biases = sum(buffer.numel() for name, buffer in reference.named_buffers() if name in saved)
    assert reference.num_parameters() + biases == spec.num_parameters
    attentions = [0, 1, 2] if family == "falcon_h1" else [3]
    assert [*spec.states] == [0, 1, 2] and [*spec.attentions] == attentions
    model = load_model(spec, tmp_path, dtype=torch.float32, device=CPU)
    prompts = prompts_of(*LENGTHS)
    with torch.no_grad():
        wanted = [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]
    sequences = DenseSequences(model, num_slots=len(prompts))
    for got, logits in zip(sequences.step([(sequences.add(), one) for one in prompts]), wanted, strict=True):
        torch.testing.assert_close(got, logits, rtol=0, atol=TOLERANCE)
    sequences = DenseSequences(model, num_slots=len(prompts))
    found: dict[int, list[torch.Tensor]] = {sequences.add(): [] for _ in prompts}
    generator = torch.Generator().manual_seed(1)
    while left := [index for index, prompt in enumerate(prompts) if sequences.lengths[index] < len(prompt)]:
        cuts = [int(torch.randint(1, (3, 20, 200)[index % 3], (), generator=generator)) for index in left]
        parts = [
            (index, prompts[index][sequences.lengths[index] :][:cut]) for index, cut in zip(left, cuts, strict=True)
        ]
        for index, got in zip(left, sequences.step(parts), strict=True):
            found[index].append(got)
    for index, logits in enumerate(wanted):
        torch.testing.assert_close(torch.cat(found[index]), logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [
        {"mamba_rms_norm": False},
        {"mamba_norm_before_gate": False, "mamba_d_ssm": None},
        {"mlp_multipliers": None, "ssm_multipliers": None, "projectors_bias": False, "mamba_proj_bias": False},
    ],
    ids=["no norm", "gates first", "fewer factors"],
)
def test_other_falcons(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = make_checkpoint("falcon_h1", tmp_path, **changes)
    prompts = prompts_of(70, 5)
    sequences = DenseSequences(load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU))
    for got, prompt in zip(sequences.step([(sequences.add(), one) for one in prompts]), prompts, strict=True):
        with torch.no_grad():
            wanted = reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE)


def test_published_files_have_experts_in_one_tensor(tmp_path: Path) -> None:
    """The classes of transformers write a tensor for each expert, and published files have one for all of a layer."""
    make_checkpoint("qwen3_5_moe", tmp_path)
    ids, file = prompts_of(20)[0], tmp_path / "model.safetensors"
    found: list[torch.Tensor] = []
    for stacked in (False, True):
        if stacked:
            tensors = load_file(file)
            for index in range(4):
                prefix = f"model.layers.{index}.mlp.experts"
                parts = {
                    name: [tensors.pop(f"{prefix}.{expert}.{name}.weight") for expert in range(6)]
                    for name in ("gate_proj", "up_proj", "down_proj")
                }
                halves = torch.stack(parts["gate_proj"]), torch.stack(parts["up_proj"])
                tensors[f"{prefix}.gate_up_proj"] = torch.cat(halves, 1)
                tensors[f"{prefix}.down_proj"] = torch.stack(parts["down_proj"])
            save_file(tensors, file, {"format": "pt"})
        model = load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU)
        sequences = DenseSequences(model)
        found += sequences.step([(sequences.add(), ids)])
    assert torch.equal(*found)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_layers_that_make_drafts_are_skipped_with_a_note(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.ones(4, 4)}, file, {"format": "pt"})
    with begin_loading(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU) as loading:
        assert any("mtp 1" in note for note in loading.notes)


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        ("qwen3_5", {"layer_types": ["linear_attention"] * 4}, UnsupportedModelError, "full_attention for one or more"),
        (
            "qwen3_5",
            {"layer_types": ["mamba"] * 3 + ["full_attention"]},
            UnsupportedModelError,
            "must name linear_attention or",
        ),
        ("qwen3_5", {"linear_num_value_heads": 5}, ModelError, "linear_num_value_heads=5 must be a multiple of"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, ModelError, "an integer of 2 or more"),
        ("qwen3_5", {"mamba_ssm_dtype": "bfloat16"}, ModelError, "'float32', the type of states"),
        ("qwen3_5", {"attn_output_gate": False}, ModelError, "attention of this family has gates"),
        ("qwen3_5", {"output_gate_type": "sigmoid"}, ModelError, "'swish'"),
        ("lfm2", {"layer_types": ["conv"] * 4}, UnsupportedModelError, "must name conv or full_attention for each"),
        ("lfm2", {"conv_L_cache": 1}, ModelError, "an integer of 2 or more"),
        ("bamba", {"attn_layer_indices": [9]}, UnsupportedModelError, "must name one layer or more"),
        ("bamba", {"mamba_d_head": 12}, ModelError, "mamba_n_heads=8 heads of mamba_d_head=12 must have .* = 64"),
        ("bamba", {"mamba_n_groups": 3}, ModelError, "must be a multiple of mamba_n_groups=3"),
        (
            "falcon_h1",
            {"mamba_n_heads": 5},
            ModelError,
            "mamba_n_heads=5 heads of mamba_d_head=12 must have mamba_d_ssm",
        ),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, ModelError, "null or a list of 5 numbers"),
        (
            "falcon_h1",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            UnsupportedModelError,
            "multipliers are folded into the weights",
        ),
        ("granite4_h", {"time_step_limit": [0.0, 1.0]}, ModelError, "null or 0 and infinity"),
        (
            "nemotron_h",
            {"layers_block_type": ["mamba", "mlp"]},
            UnsupportedModelError,
            "full_attention for one or more",
        ),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX*"}, UnsupportedModelError, "'MX\\*'"),
        ("nemotron_h", {"mamba_num_heads": 9}, ModelError, "mamba_num_heads=9 must be a multiple of n_groups=2"),
        ("nemotron_h", {"moe_latent_size": 16}, ModelError, "must be null"),
        ("lfm2_moe", {"num_experts_per_tok": 9}, ModelError, "must be at most num_experts=6"),
    ],
)
def test_bad_fields(family: str, changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(error, match=message):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("family", "modules", "matrix_names"),
    [
        ("lfm2", ["feed_forward.w1", "feed_forward.w3", "self_attn.out_proj"], ["output", "gate and up"]),
        ("bamba", ["feed_forward.down_proj"], ["down"]),
    ],
)
def test_modules_in_16_bits_have_the_names_of_the_file(
    family: str, modules: list[str], matrix_names: list[str], tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path)
    kept = [f"model.layers.3.{name}" for name in modules]
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": kept}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    matrices = read_model_spec(tmp_path).layers[3].matrices
    assert [matrix.name for matrix in matrices if matrix.scheme is None] == matrix_names


@pytest.mark.parametrize(
    ("family", "gates"), [("qwen3_5", ("in_proj_b", "in_proj_a")), ("qwen3_next", ("in_proj_ba",))]
)
def test_rates_and_times_in_another_format_have_a_product_of_their_own(
    family: str, gates: tuple[str, ...], tmp_path: Path
) -> None:
    """Other products of a gated delta net with the same input are one."""
    make_checkpoint(family, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())

    def products(layer: int) -> list[tuple[str, int]]:
        mixer = read_model_spec(tmp_path).layers[layer].mixer
        assert mixer is not None
        return [(matrix.name, matrix.num_outputs) for matrix in mixer.matrices]

    (_, width), output = products(0)
    assert products(1) == [("q, k, v, gate, rates and times", width), output]
    kept = [f"model.layers.0.linear_attn.{name}" for name in gates]
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": kept}
    path.write_text(json.dumps({**config, "quantization_config": quantization}))
    num_gates = 2 * config["linear_num_value_heads"]
    assert products(0) == [("q, k, v and gate", width - num_gates), ("rates and times", num_gates), output]
    assert products(1) == [("q, k, v, gate, rates and times", width), output]


def test_older_files_name_layers_in_their_way(tmp_path: Path) -> None:
    make_checkpoint("nemotron_h", tmp_path)
    path, layers = tmp_path / "config.json", read_model_spec(tmp_path).layers
    named = json.loads(path.read_text())
    for field, value in (
        ("hybrid_override_pattern", "MMM*-E"),
        ("layers_block_type", ["mamba", "mamba", "mamba", "attention", "mlp", "moe"]),
    ):
        path.write_text(json.dumps({**named, "layers_block_type": None, field: value}))
        assert read_model_spec(tmp_path).layers == layers


@pytest.mark.parametrize("name", ["MambaForCausalLM", "RwkvForCausalLM", "KimiLinearForCausalLM", "xLSTMForCausalLM"])
def test_other_mixers_are_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(UnsupportedModelError, match=r"\((layers of|Kimi delta)"):
        read_model_spec(tmp_path)
