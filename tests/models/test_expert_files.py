"""Files of models with experts: quantized ones, and those that are refused, each with the name and what would work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_model, make_checkpoint
from dense import DenseSequences
from quantized_checkpoints import FORMATS, quantize_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from phonograph.cli.product_table import product_rows
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.engine.plan import make_plan
from phonograph.engine.startup.configured_model import read_configured_model
from phonograph.errors import ConfigError, ModelError, PhonographError, UnsupportedModelError, WeightError
from phonograph.kernels.torch.grouped import dequantize
from phonograph.kernels.torch.layers import rms_norm
from phonograph.models.layers.expert_spec import LayerExperts
from phonograph.models.layers.linear import WeightAllocator
from phonograph.models.quantization.cpu_weights import CpuProducts, Int4Weight
from phonograph.models.spec import read_model_spec
from phonograph.models.weights.loading import begin_loading

CPU = torch.device("cpu")
EXPERT = "model.layers.1.mlp.experts.3.up_proj"
TOKENS = [5, 99, 3, 3, 42, 17, 200, 8, 1]
PACKED = CpuProducts(int4=True, dequantize=False, operator_rows=4, reason="a test")


def logits(folder: Path, **settings: Any) -> torch.Tensor:
    sequences = DenseSequences(load_model(read_model_spec(folder), folder, dtype=torch.float32, device=CPU, **settings))
    return sequences.step([(sequences.add(), TOKENS)])[0]


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", ["gptq", "awq", "packed 8 bits", "int8 channel", "fp8", "fp8 blocks"])
def test_quantized_experts_are_those_of_the_file(
    name: str, joint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router stays as it is. On a GPU the shared expert has one memory with the others."""
    monkeypatch.setattr(WeightAllocator, "by_outputs", joint)
    make_checkpoint("qwen2_moe", tmp_path, moe_intermediate_size=40)
    plain = (tmp_path / "config.json").read_text()
    meant = quantize_checkpoint(tmp_path, FORMATS[name])
    found = logits(tmp_path)
    spec = read_model_spec(tmp_path)
    assert spec.layers[1].feed_forward.router.scheme is None and spec.layers[1].feed_forward.down.scheme is not None
    model = load_model(spec, tmp_path, dtype=torch.float32, device=CPU)
    assert (model.weights[1].feed_forward.joint is not None) == joint
    measured = sum(tensor.nbytes for weight in model.quantized for tensor in weight.values if torch.is_tensor(tensor))
    measured += sum(parameter.nbytes for parameter in model.parameters)
    assert measured == spec.weight_bytes("float32")
    save_file({key: value.float().contiguous() for key, value in meant.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(plain)
    wanted = logits(tmp_path)
    assert (found - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize(("family", "settings"), [("olmoe", {}), ("gpt_oss", {}), ("glm4_moe", {"use_qk_norm": False})])
def test_bytes_in_16_bits(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Norms of some families, sinks and biases of a choice are in float32."""
    make_checkpoint(family, tmp_path, **settings)
    spec = read_model_spec(tmp_path)
    model = load_model(spec, tmp_path, dtype=torch.bfloat16, device=CPU)
    assert sum(parameter.nbytes for parameter in model.parameters) == spec.weight_bytes("bfloat16")


@torch.inference_mode()
def test_norms_of_gpt_oss_round_once(tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.bfloat16, device=CPU)
    model.final_norm.copy_(reference.model.norm.weight)  # as in a file of 16 bits
    x = torch.randn(300, 64).bfloat16()
    found, wanted = rms_norm(x, model.final_norm, torch.tensor(model.spec.rms_norm_eps)), reference.model.norm(x)
    # Sums of squares in another order may change single bits.
    assert (found != wanted).float().mean() < 0.005


@torch.inference_mode()
def test_experts_packed_for_a_cpu(tmp_path: Path) -> None:
    """Experts that begin within a block of outputs: their products are a slice of the whole matrix's."""
    make_checkpoint("qwen2_moe", tmp_path, moe_intermediate_size=40)
    quantize_checkpoint(tmp_path, FORMATS["gptq"])
    model = load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU, cpu_products=PACKED)
    linear = model.weights[1].feed_forward.gate_up
    assert isinstance(linear.weight, Int4Weight) and linear.weight.shape == (64, 6 * 80)
    for rows in (1, 9):
        x = torch.randn(rows, 64)
        whole = linear.weight.product(x, None)
        for first in range(0, 6 * 80, 80):
            one = linear.weight.rows(first, first + 80)
            assert one.shape == (64, 80) and torch.equal(one.product(x, None), whole[:, first : first + 80])


def changed(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


GPTQ = FORMATS["gptq"].config
CONFIGS: list[tuple[str, dict[str, Any], type[PhonographError], str]] = [
    ("qwen2_moe", {"num_experts_per_tok": 7}, ModelError, "num_experts_per_tok=7 must be at most num_experts=6"),
    ("mixtral", {"num_experts_per_tok": 5}, ModelError, "num_experts_per_tok=5 must be at most num_local_experts=4"),
    ("qwen3_moe", {"num_experts_per_tok": 0}, ModelError, "num_experts_per_tok=0 must be a positive integer"),
    ("qwen2_moe", {"use_sliding_window": True}, ModelError, "use_sliding_window=True must be false"),
    ("qwen3_moe", {"mlp_only_layers": "0"}, ModelError, "mlp_only_layers='0' must be a list of integers"),
    ("olmoe", {"clip_qkv": 8.0}, ModelError, "clip_qkv=8.0 must be null"),
    ("glm4_moe", {"n_group": 5}, ModelError, "n_group=5 must divide n_routed_experts=12 into groups of two or more"),
    ("glm4_moe", {"topk_group": 4}, ModelError, "topk_group=4 must be at most n_group=3"),
    ("glm4_moe", {"num_experts_per_tok": 9}, ModelError, "num_experts_per_tok=9 must be at most the 8 experts"),
    ("gpt_oss", {"num_experts_per_tok": 7}, ModelError, "num_experts_per_tok=7 must be at most num_local_experts=6"),
    ("gpt_oss", {"swiglu_limit": 6.0}, ModelError, "swiglu_limit=6.0 must be 7.0 or null"),
    ("gpt_oss", {"sliding_window": None}, ModelError, "sliding_window=None must be a positive integer"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, UnsupportedModelError, "layer_types=.*chunked_attention"),
    ("gpt_oss", {"head_dim": None}, ModelError, "head_dim=None must be a positive integer"),
    (
        "qwen3_moe",
        {"quantization_config": GPTQ | {"dynamic": {"-:.*experts[.]3[.].*": {}}}},
        UnsupportedModelError,
        r"0.gate_proj is GPTQ, 4 bits, groups of 32, symmetric, 3.gate_proj is in 16 bits; they run as one matrix",
    ),
    (
        "granitemoe",
        {"quantization_config": GPTQ},
        UnsupportedModelError,
        "block_sparse_moe.input_linear has all experts in one tensor, which is not supported in GPTQ, 4 bits",
    ),
    ("granite4_moe", {"num_experts_per_tok": 0}, ModelError, "num_experts_per_tok=0 must be positive"),
    ("granite4_moe", {"num_experts_per_tok": 9}, ModelError, "num_experts_per_tok=9 must be at most num_local_exp.*=8"),
    (
        "granite4_moe",
        {"layer_types": ["attention"]},
        ModelError,
        r"layer_types=\['attention'\] must have a type for each",
    ),
    ("granite4_moe", {"normalization_function": "layernorm"}, ModelError, "'layernorm' must be rmsnorm or null"),
    *(
        ("granite4_moe", {"layer_types": types}, UnsupportedModelError, "layer_types=.* must name mamba or attention")
        for types in (None, ["mamba", "linear_attention"], ["conv", "full_attention"])
    ),
    (
        "qwen3_moe",
        {"quantization_config": GPTQ | {"desc_act": True}},
        UnsupportedModelError,
        "mlp.experts is in GPTQ, .* order for each expert, .* without desc_act",
    ),
]


@pytest.mark.parametrize(("family", "changes", "error", "message"), CONFIGS)
def test_refused_configurations(
    family: str, changes: dict[str, Any], error: type[PhonographError], message: str, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path)
    changed(tmp_path, **changes)
    with pytest.raises(error, match=message):
        read_model_spec(tmp_path)


def test_counts_of_zero(tmp_path: Path) -> None:
    """GLM-4 without a shared expert, and with experts from the first layer on."""
    make_checkpoint("glm4_moe", tmp_path)
    changed(tmp_path, n_shared_experts=0, first_k_dense_replace=0)
    (kind,) = read_model_spec(tmp_path).kinds
    assert isinstance(kind.feed_forward, LayerExperts) and kind.feed_forward.shared is None


def test_refused_tensors(tmp_path: Path) -> None:
    """An expert's tensor that is missing, twice, of another shape, or beyond the experts."""
    make_checkpoint("qwen3_moe", tmp_path)
    path, name = tmp_path / "model.safetensors", f"{EXPERT}.weight"
    whole = load_file(path)

    def refused(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, path)
        with pytest.raises(WeightError, match=message):
            logits(tmp_path)

    refused({key: value for key, value in whole.items() if key != name}, f"tensor {name} .* is in none of")
    refused(whole | {name: torch.zeros(3, 64)}, rf"tensor {name} .* has shape \[3, 64\].* expects \[20, 64\]")
    refused(
        whole | {name.replace(".3.", ".12."): whole[name].clone()}, "experts.12.up_proj.weight .* is not part of this"
    )
    save_file({name: whole[name]}, tmp_path / "more.safetensors")
    path.rename(tmp_path / "first.safetensors")
    save_file(whole, tmp_path / "first.safetensors")
    with pytest.raises(WeightError, match=f"tensor {name} is in both .*first.safetensors and .*more.safetensors"):
        logits(tmp_path)


def test_refused_tensors_of_all_experts(tmp_path: Path) -> None:
    """A tensor of all experts that is missing, of another shape, or next to one of a single expert; missing sinks."""
    make_checkpoint("gpt_oss", tmp_path)
    path, layer = tmp_path / "model.safetensors", "model.layers.1."
    name, whole = f"{layer}mlp.experts.gate_up_proj", load_file(path)
    cases: list[tuple[str, torch.Tensor | None, str]] = [
        (name, None, rf"tensor {name} \[6, 64, 80\] is in none of"),
        (f"{name}_bias", None, rf"tensor {name}_bias \[6, 80\] is in none of"),
        (f"{layer}mlp.router.bias", None, r"tensor .*router.bias \[6\] is in none of"),
        (f"{layer}self_attn.sinks", None, r"tensor .*self_attn.sinks \[4\] is in none of"),
        # As many numbers, in the order of other families.
        (name, torch.zeros(6, 80, 64), rf"tensor {name} .* has shape \[6, 80, 64\].* expects \[6, 64, 80\]"),
        (f"{layer}mlp.experts.0.gate_proj.weight", torch.zeros(40, 64), "experts.0.gate_proj.weight .* is not part"),
        (f"{name}_blocks", torch.zeros(6, 80, 2, 16), f"tensor {name}_blocks .* is not part of this GptOss"),
    ]
    for changed_name, tensor, message in cases:
        kept = {key: value for key, value in whole.items() if key != changed_name}
        save_file(kept | ({} if tensor is None else {changed_name: tensor}), path)
        with pytest.raises(WeightError, match=message):
            logits(tmp_path)


def test_tensors_of_all_experts(tmp_path: Path) -> None:
    """One tensor has the gates and ups of all experts: its errors have its name and its shape."""
    make_checkpoint("granitemoe", tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.block_sparse_moe.input_linear.weight"
    whole = load_file(path)
    for tensors, message in (
        ({key: value for key, value in whole.items() if key != name}, rf"tensor {name} \[6, 48, 64\] is in none of"),
        (whole | {name: torch.zeros(5, 48, 64)}, rf"tensor {name} .* shape \[5, 48, 64\].* expects \[6, 48, 64\]"),
        (whole | {name: torch.zeros(6 * 48, 64)}, rf"tensor {name} .* shape \[288, 64\].* expects \[6, 48, 64\]"),
    ):
        save_file(tensors, path)
        with pytest.raises(WeightError, match=message):
            logits(tmp_path)


def test_gpt_oss_without_rotary_parameters_has_those_of_transformers(tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path, rope_parameters=None, max_position_embeddings=131072)
    written = read_model_spec(tmp_path)
    changed(tmp_path, rope_parameters=None, swiglu_limit=7.0)
    read = read_model_spec(tmp_path)
    assert read == written and read.context_length == 131072
    changed(tmp_path, rope_parameters={})
    assert read_model_spec(tmp_path).layers[0].attention.rope != written.layers[0].attention.rope


def test_tensors_of_all_experts_become_fp8(tmp_path: Path) -> None:
    """Each output has a scale, as in a matrix of one expert; a wrong shape is refused with that of the file."""
    make_checkpoint("granitemoe", tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.0.block_sparse_moe.input_linear.weight"
    spec = read_configured_model(EngineConfig(model=str(tmp_path), quantization="fp8"), config_only=False)
    model, whole = load_model(spec, tmp_path, dtype=torch.float32, device=CPU), load_file(path)
    weights = model.weights[0].feed_forward.gate_up.weight
    assert weights.values.scales_OG.shape == (6 * 48, 1)
    found, wanted = dequantize(weights.values).unflatten(0, (6, 48)), whole[name]
    assert (found - wanted).abs().max() <= 2**-4 * wanted.abs().max() and found[5].std() > 0.05
    save_file(whole | {name: torch.zeros(6 * 48, 64)}, path)
    with pytest.raises(WeightError, match=rf"tensor {name} .* shape \[288, 64\].* ask for \[6, 48, 64\]"):
        load_model(spec, tmp_path, dtype=torch.float32, device=CPU)


def test_layers_after_the_last_are_skipped(tmp_path: Path) -> None:
    """Layers of multi-token prediction have no part here; other layers are refused."""
    make_checkpoint("glm4_moe", tmp_path)
    path = tmp_path / "model.safetensors"
    wanted = logits(tmp_path)
    save_file(load_file(path) | {"model.layers.3.eh_proj.weight": torch.zeros(4, 8)}, path)
    with begin_loading(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU) as loading:
        assert loading.notes[-1].endswith("skipped: model.layers.3 1")
    assert torch.equal(logits(tmp_path), wanted)
    save_file(load_file(path) | {"model.layers.4.eh_proj.weight": torch.zeros(4, 8)}, path)
    with pytest.raises(WeightError, match="model.layers.4.eh_proj.weight .* is not part of this"):
        logits(tmp_path)


def test_half_of_a_head_is_rotated_by_default(tmp_path: Path) -> None:
    make_checkpoint("glm4_moe", tmp_path)
    wanted = read_model_spec(tmp_path).layers[0].attention.rope
    assert wanted is not None and len(wanted.frequencies) == 4
    changed(tmp_path, rope_parameters=None, partial_rotary_factor=None)
    assert read_model_spec(tmp_path).layers[0].attention.rope == wanted


def test_refused_by_a_plan(tmp_path: Path) -> None:
    make_checkpoint(
        "qwen3_moe", tmp_path, hidden_size=48, num_attention_heads=3, num_key_value_heads=1, moe_intermediate_size=24
    )
    gpu = known_device("h200")
    with pytest.raises(ConfigError, match="batch_invariant=True: mixtures of experts .* as their tiles depend"):
        make_plan(EngineConfig(model=str(tmp_path), batch_invariant=True), read_model_spec(tmp_path), gpu)
    for config, dtype, message in (
        (GPTQ, "float32", "quantized experts in bfloat16 and float16 only"),
        (GPTQ | {"group_size": 24}, "bfloat16", "groups of 24 inputs are not a multiple of 32"),
    ):
        changed(tmp_path, quantization_config=config)
        with pytest.raises(UnsupportedModelError, match=message):
            make_plan(EngineConfig(model=str(tmp_path), dtype=dtype), read_model_spec(tmp_path), gpu)


@pytest.mark.parametrize(("size", "kernel"), [(24, "expert_products"), (40, "gemv"), (None, "expert_products")])
def test_products_of_a_shared_expert_are_named(size: int | None, kernel: str, tmp_path: Path) -> None:
    """On a GPU a shared expert of the experts' size is one of them."""
    sizes = {} if size is None else {"shared_expert_intermediate_size": size}
    make_checkpoint("glm4_moe" if size is None else "qwen2_moe", tmp_path, **sizes)
    for device, wanted in (("h200", kernel), ("cpu", "torch")):
        rows = product_rows(read_model_spec(tmp_path), "bfloat16", known_device(device))
        shared = [one for one in rows if one.layer.startswith("shared")]
        assert len(shared) == 2 and all(one.kernels[0][1] == wanted for one in shared)


def test_products_of_experts_are_named() -> None:
    """Qwen3-30B-A3B has 48 layers of 128 experts."""
    model = read_model_spec("qwen3-30b-a3b", config_only=True)
    rows = {one.layer: one for one in product_rows(model, "bfloat16", known_device("h200"))}
    gate_up, down, router = (rows[name] for name in ("experts' gate and up", "experts' down", "router"))
    assert (gate_up.count, gate_up.outputs, gate_up.inputs) == (48 * 128, 1536, 2048)
    assert (down.count, down.outputs, down.inputs, down.nbytes) == (48 * 128, 2048, 768, 48 * 128 * 2 * 2048 * 768)
    assert (router.count, router.outputs) == (48, 128)
    assert gate_up.kernels == ((None, "expert_products"),) and router.kernels == ((None, "route"),)
    assert sum(one.nbytes for one in rows.values()) == pytest.approx(model.weight_bytes("bfloat16"), rel=0.02)
    assert model.num_parameters == 30_532_122_624
