"""Quantized checkpoints: what a model computes is what the weights mean, for every format and odd size."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, load_model, make_checkpoint
from dense import DenseSequences
from quantized_checkpoints import FORMATS, Format, quantize_checkpoint, words
from safetensors.torch import load_file, save_file

from phonograph.config.engine_config import EngineConfig
from phonograph.engine.startup.configured_model import read_configured_model
from phonograph.errors import ConfigError, ModelError, PhonographError, UnsupportedModelError, WeightError
from phonograph.kernels.torch import grouped
from phonograph.kernels.torch.grouped import Grouped, add_product, dequantize, product
from phonograph.models.layers.linear import WeightAllocator
from phonograph.models.quantization import awq, compressed_tensors, float8, gptq
from phonograph.models.quantization.float8 import Fp8
from phonograph.models.quantization.gptq import Gptq
from phonograph.models.quantization.grouped_weight import GroupedWeight, slices, unpack
from phonograph.models.quantization.quantization_config import read_quantization
from phonograph.models.quantization.scheme import Quantization
from phonograph.models.spec import read_model_spec
from phonograph.models.weights.loading import begin_loading

CPU = torch.device("cpu")
GPTQ = FORMATS["gptq"]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load eight outputs at once, so that matrices have several slices, as large ones do."""
    for module in (awq, compressed_tensors, float8, gptq):
        monkeypatch.setattr(module, "slices", lambda count, width: slices(count, 1 << 22))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["llama3", "qwen2"])
def test_logits_are_those_of_the_weights_that_the_file_means(family: str, name: str, tmp_path: Path) -> None:
    reference = make_checkpoint(family, tmp_path, seed=len(name), intermediate_size=112)
    meant = quantize_checkpoint(tmp_path, FORMATS[name])
    reference.load_state_dict(meant)
    spec = read_model_spec(tmp_path)
    sequences = DenseSequences(load_model(spec, tmp_path, dtype=torch.float32, device=CPU))
    tokens = torch.randint(0, VOCAB_SIZE, (23,)).tolist()
    sequences.add()
    got = torch.cat([*sequences.step([(0, tokens[:9])]), *sequences.step([(0, tokens[9:10])])])
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens[:10]])).logits[0]
    assert (got - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("tokens", "inputs", "outputs", "group"), [(1, 8, 3, 8), (5, 100, 37, 32), (70, 33, 4100, 16)])
def test_products(tokens: int, inputs: int, outputs: int, group: int, zeros: bool, bits: int) -> None:
    """Against float64, with several tiles and a last group that is not whole."""
    rng = np.random.default_rng()
    groups = -(-inputs // group)
    values = rng.integers(0, 1 << bits, (outputs, groups * group))
    scales = torch.from_numpy(rng.uniform(-1, 1, (outputs, groups))).float()
    zeros_OG = torch.from_numpy(rng.integers(0, 1 << bits, (outputs, groups))).to(torch.uint8) if zeros else None
    weight = Grouped(torch.from_numpy(words(values, bits, 1)), scales, zeros_OG, bits, group)
    middle = (torch.full_like(scales, 1 << (bits - 1)) if zeros_OG is None else zeros_OG).double()
    matrix = (torch.from_numpy(values).double().view(outputs, groups, group) - middle[..., None]) * scales[..., None]
    matrix = matrix.flatten(1)
    assert torch.equal(dequantize(weight), matrix.float())
    x, bias, hidden = torch.randn(tokens, inputs), torch.randn(outputs), torch.randn(tokens, outputs)
    wanted = x.double() @ matrix[:, :inputs].t() + bias
    assert (product(x, weight, bias) - wanted).norm() <= 1e-6 * wanted.norm()
    wanted += hidden
    add_product(x, weight, bias, hidden)
    assert (hidden - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_offsets(bits: int) -> None:
    """Against float64, with several tiles."""
    rng = np.random.default_rng()
    outputs, groups, group = 2100, 20, 16
    values = rng.integers(0, 1 << bits, (outputs, groups * group))
    scales, offsets = torch.from_numpy(rng.uniform(-1, 1, (2, outputs, groups))).float()
    weight = Grouped(torch.from_numpy(words(values, bits, 1)), scales, None, bits, group, offsets_OG=offsets)
    centred = torch.from_numpy(values - (1 << (bits - 1))).double().view(outputs, groups, group)
    matrix = (centred * scales[..., None] + offsets[..., None]).flatten(1)
    assert (dequantize(weight) - matrix).norm() <= 1e-6 * matrix.norm()
    x, hidden = torch.randn(5, groups * group), torch.randn(5, outputs)
    wanted = x.double() @ matrix.t() + hidden
    add_product(x, weight, None, hidden)
    assert (hidden - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize(
    ("inputs", "outputs", "group"), [(33, 5, 33), (100, 37, 100), (90, 41, 32), (1000, 1200, 24), (7, 9, 14)]
)
def test_products_of_few_rows(inputs: int, outputs: int, group: int, kind: str) -> None:
    """Against the weights in float64: each set of zeros, offsets and order, tiles and groups that are not whole."""
    groups, bits = -(-inputs // group), 4 if kind == "int4" else 8
    scales, offsets = torch.rand(2, outputs, groups) - 0.5
    order = torch.randperm(inputs)
    if kind == "fp8":
        drawn = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        weights = [Grouped(drawn, scales, None, 8, group), Grouped(drawn, scales, None, 8, group, order)]
    else:
        packed = torch.from_numpy(
            words(np.random.default_rng().integers(0, 1 << bits, (outputs, groups * group)), bits, 1)
        )
        zeros = torch.randint(0, 1 << bits, (outputs, groups), dtype=torch.uint8)
        weights = [
            Grouped(packed, scales, None, bits, group),
            Grouped(packed, scales, None, bits, group, offsets_OG=offsets),
            Grouped(packed, scales, zeros, bits, group, order),
            Grouped(packed, scales, zeros, bits, group, order, offsets),
        ]
    for weight in weights:
        offsets_OG = None if weight.offsets_OG is None else weight.offsets_OG.double()
        exact = dequantize(weight._replace(scales_OG=weight.scales_OG.double(), offsets_OG=offsets_OG))[:, :inputs]
        for rows in (1, 3):
            x, bias, hidden = torch.randn(rows, inputs), torch.randn(outputs), torch.randn(rows, outputs)
            ordered = x if weight.order_I is None else x[:, weight.order_I]
            wanted = ordered.double() @ exact.t() + bias
            assert (product(x, weight, bias) - wanted).norm() <= 3e-6 * wanted.norm()
            half = product(x.bfloat16(), weight, bias.bfloat16())
            assert half.dtype == torch.bfloat16 and (half - wanted).norm() <= 0.04 * wanted.norm()
            wanted += hidden
            add_product(x, weight, bias, hidden)
            assert (hidden - wanted).norm() <= 3e-6 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_number_of_fp8(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[numbers & 127 != 127].view(torch.float8_e4m3fn)[None]
    weight = Grouped(numbers, torch.ones(1, 1, dtype=dtype), None, 8, 254)
    assert torch.equal(dequantize(weight), numbers.to(dtype))


@pytest.mark.parametrize("dim", [0, 1])
def test_unpacking_is_the_inverse_of_packing(dim: int) -> None:
    for bits in (4, 8):
        values = np.random.default_rng().integers(0, 1 << bits, (16, 24))
        assert np.array_equal(unpack(torch.from_numpy(words(values, bits, dim)), bits, dim).numpy(), values)


@pytest.mark.parametrize("name", FORMATS)
def test_dummy_weights_and_bytes(name: str, tmp_path: Path) -> None:
    """Random weights need no file, spread as others do, and take the bytes that the plan of memory counts."""
    make_checkpoint("qwen2", tmp_path, intermediate_size=112)
    quantize_checkpoint(tmp_path, FORMATS[name])
    (tmp_path / "model.safetensors").unlink()
    spec = read_model_spec(tmp_path)
    with begin_loading(spec, tmp_path, dtype=torch.float32, device=CPU, load_format="dummy") as loading:
        loading.finish()
    model = loading.model
    weights: list[Any] = model.quantized
    assert len(weights) == 4 * spec.num_layers
    matrix = dequantize(weights[-1].values)
    assert 0.01 < float(matrix.std()) < 0.04 and bool(matrix.isfinite().all())
    tensors = [
        tensor for weight in weights for tensor in (*weight.values[:3], weight.values.order_I) if tensor is not None
    ]
    orders = sum(weight.values.order_I.nbytes for weight in weights if weight.values.order_I is not None)
    taken = sum(tensor.nbytes for tensor in tensors) + sum(parameter.nbytes for parameter in model.parameters)
    # The order of a fused matrix is counted once for each of its parts.
    assert 0 <= spec.weight_bytes("float32") - taken <= 2 * orders
    assert spec.num_parameters == read_model_spec(tmp_path, hf_overrides={"quantization_config": None}).num_parameters


def broken(folder: Path, end: str, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.1.self_attn.k_proj.{end}"
    tensors[name] = change(tensors[name])
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)


def halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: len(tensor) // 2]


def first_set(value: float) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("kind", "end", "change", "words_of_error"),
    [
        (GPTQ, "qweight", halved, "group_size"),
        (GPTQ, "qzeros", halved, "group_size"),
        (GPTQ, "qweight", torch.Tensor.float, "expected int32"),
        (GPTQ, "scales", first_set(float("nan")), "not a number"),
        (GPTQ, "g_idx", first_set(1), "g_idx does not put 32 inputs"),
        (FORMATS["gptq order"], "g_idx", first_set(77), "g_idx"),
        (FORMATS["gptq order"], "g_idx", lambda tensor: tensor.flip(0).roll(1), "unlike the projections"),
        (FORMATS["packed"], "weight_shape", first_set(9), "weight_shape"),
        (FORMATS["awq"], "scales", first_set(float("inf")), "infinite"),
        (FORMATS["fp8 blocks"], "weight_scale_inv", halved, "bits and group_size|group_size"),
        (FORMATS["float channel"], "weight", first_set(float("nan")), "not a number"),
        (FORMATS["int8 channel"], "weight_zero_point", first_set(1), "symmetric=true"),
        (FORMATS["int8 tensor"], "weight", torch.Tensor.short, "expected int8"),
        (FORMATS["int8 zeros"], "weight", halved, "group_size"),
        (FORMATS["float tensor"], "weight", torch.Tensor.half, "expected float8_e4m3fn"),
    ],
)
def test_damaged_files(kind: Format, end: str, change: Any, words_of_error: str, tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path, intermediate_size=96)
    quantize_checkpoint(tmp_path, kind)
    broken(tmp_path, end, change)
    spec = read_model_spec(tmp_path)
    with pytest.raises(WeightError, match=rf"k_proj.*{words_of_error}"):
        load_model(spec, tmp_path, dtype=torch.float32, device=CPU)


def test_biases_that_tools_add(tmp_path: Path) -> None:
    """Zeros are left out; other numbers are not."""
    make_checkpoint("llama3", tmp_path)
    quantize_checkpoint(tmp_path, GPTQ)
    path = tmp_path / "model.safetensors"
    bias = {"model.layers.0.mlp.up_proj.bias": torch.zeros(88)}
    save_file({**load_file(path), **bias}, path)
    load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU)
    bias["model.layers.0.mlp.up_proj.bias"][3] = 0.5
    save_file({**load_file(path), **bias}, path)
    with pytest.raises(WeightError, match="up_proj.bias"):
        load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("config", "error", "words_of_error"),
    [
        ([], ModelError, "must be an object"),
        ({"quant_method": "exl2"}, UnsupportedModelError, "'exl2'.*supported are gptq, awq, compressed-tensors, fp8"),
        (GPTQ.config | {"bits": 3}, UnsupportedModelError, "bits=3.*4, 8"),
        (GPTQ.config | {"group_size": 0}, ModelError, "group_size=0"),
        (GPTQ.config | {"group_size": "64"}, ModelError, "group_size='64'"),
        (GPTQ.config | {"desc_act": None}, ModelError, "desc_act"),
        (GPTQ.config | {"lm_head": True}, UnsupportedModelError, "lm_head=True"),
        (GPTQ.config | {"dynamic": {"a": 1}}, ModelError, "dynamic has a=1; it must be an object"),
        (GPTQ.config | {"dynamic": {"a": {"bits": 2}}}, UnsupportedModelError, "dynamic.a has bits=2"),
        (GPTQ.config | {"dynamic": {"a": {"turbo": 2}}}, UnsupportedModelError, "dynamic.a has turbo=2"),
        (FORMATS["awq"].config | {"version": "gemv"}, UnsupportedModelError, "'gemv'"),
        (FORMATS["awq"].config | {"zero_point": 0}, ModelError, "zero_point=0"),
        (FORMATS["packed"].config | {"format": "marlin-24"}, UnsupportedModelError, "marlin-24"),
        (
            FORMATS["int8 channel"].config | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            UnsupportedModelError,
            "dense",
        ),
        (FORMATS["fp8 blocks"].config | {"weight_block_size": [128]}, UnsupportedModelError, r"\[128\]"),
        (FORMATS["packed"].config | {"config_groups": {}}, UnsupportedModelError, "no config_groups"),
        (GPTQ.config | {"format": "gptq_v2"}, ModelError, "checkpoint_format='gptq' and format='gptq_v2'"),
        (GPTQ.config | {"format": "marlin"}, UnsupportedModelError, "format='marlin'"),
        (GPTQ.config | {"pack_dtype": "int16"}, UnsupportedModelError, "pack_dtype='int16'"),
        (GPTQ.config | {"rotation": "hadamard"}, UnsupportedModelError, "rotation='hadamard'"),
        (GPTQ.config | {"adapter": {"name": "lora"}}, UnsupportedModelError, "adapter="),
        (GPTQ.config | {"dynamic": {"-:*": {}}}, ModelError, r"'re:\*' in dynamic, which is not a regular expression"),
        (FORMATS["awq"].config | {"desc_act": True}, UnsupportedModelError, "desc_act=True"),
        (FORMATS["awq"].config | {"format": "gemv_fast"}, UnsupportedModelError, "format='gemv_fast'"),
        (FORMATS["fp8"].config | {"scale_fmt": "ue8m0"}, UnsupportedModelError, "scale_fmt='ue8m0'"),
        (FORMATS["fp8"].config | {"dequantize": True}, UnsupportedModelError, "dequantize=True"),
        (FORMATS["fp8"].config | {"format": "float8_e4m3fn"}, UnsupportedModelError, "format='float8_e4m3fn'"),
        (FORMATS["packed"].config | {"ignore": ["re:(mlp"]}, ModelError, r"'re:\(mlp' in ignore.*not a regular"),
        (FORMATS["packed"].config | {"ignore": [3]}, ModelError, "has 3 in ignore; it must be the name of a module"),
        (FORMATS["packed"].config | {"ignore": [""]}, ModelError, "has '' in ignore"),
        (
            FORMATS["packed"].config | {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
            UnsupportedModelError,
            "kv_cache_scheme has type='int'",
        ),
        (
            FORMATS["packed"].config | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "channel"}},
            UnsupportedModelError,
            "kv_cache_scheme has strategy='channel'",
        ),
    ],
)
def test_settings(config: Any, error: type[PhonographError], words_of_error: str) -> None:
    with pytest.raises(error, match=words_of_error):
        read_quantization(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_that_is_made_at_load(dtype: torch.dtype, tmp_path: Path) -> None:
    """Rounding to three bits of mantissa is at most 1/16 of a number, and 2.6% of uniform ones on average."""
    reference = make_checkpoint("qwen2", tmp_path, intermediate_size=104)
    config = EngineConfig(model=str(tmp_path), quantization="fp8")
    spec = read_configured_model(config, config_only=False)
    model = load_model(spec, tmp_path, dtype=dtype, device=CPU)
    weights: list[Any] = model.quantized
    down = weights[-1].values
    wanted = reference.model.layers[-1].mlp.down_proj.weight.detach()
    got = dequantize(down).float()
    assert (got - wanted).norm() <= 0.035 * wanted.norm()
    assert spec.weight_bytes("float32") < 0.5 * read_model_spec(tmp_path).weight_bytes("float32")


@pytest.mark.parametrize(
    ("name", "asked", "words_of_error"),
    [("awq", "gptq", "in awq; leave it out"), ("gptq", "fp8", "in gptq"), (None, "awq", "no quantization_config")],
)
def test_a_format_that_the_checkpoint_does_not_have(
    name: str | None, asked: Any, words_of_error: str, tmp_path: Path
) -> None:
    make_checkpoint("qwen2", tmp_path, intermediate_size=96)
    if name is not None:
        quantize_checkpoint(tmp_path, FORMATS[name])
        assert read_configured_model(EngineConfig(model=str(tmp_path), quantization=name), config_only=False)
    with pytest.raises(ConfigError, match=f"quantization='{asked}'.*{words_of_error}"):
        read_configured_model(EngineConfig(model=str(tmp_path), quantization=asked), config_only=False)


def test_projections_that_are_left_out(tmp_path: Path) -> None:
    """A whole matrix may stay in 16 bits. Part of a fused one may not."""
    reference = make_checkpoint("llama3", tmp_path)
    dense = load_file(tmp_path / "model.safetensors")
    meant = quantize_checkpoint(tmp_path, FORMATS["packed"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*layers.1.self_attn.o_proj", "model.layers.0.mlp"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in dense:
        if "layers.1.self_attn.o_proj" in name or "layers.0.mlp" in name:
            module = name.removesuffix(".weight")
            tensors = {key: value for key, value in tensors.items() if not key.startswith(f"{module}.")}
            tensors[name] = meant[name] = dense[name]
    save_file(tensors, tmp_path / "model.safetensors")
    reference.load_state_dict(meant)
    sequences = DenseSequences(load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU))
    sequences.add()
    (got,) = sequences.step([(0, [5, 6, 7])])
    with torch.inference_mode():
        wanted = reference(torch.tensor([[5, 6, 7]])).logits[0]
    assert (got - wanted).norm() <= 1e-4 * wanted.norm()
    config["quantization_config"]["ignore"] = ["k_proj"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"parts of model.layers.0.self_attn.*k_proj is in 16 bits"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("bits", "group", "interleaved"), [(4, 128, True), (4, 256, True), (4, 64, False), (8, 128, False)]
)
def test_only_whole_groups_of_128_in_4_bits_are_interleaved(bits: int, group: int, interleaved: bool) -> None:
    scheme = Gptq(bits=bits, group_size=group, ordered=False, version=1)
    assert scheme.weight_format(512, "bfloat16").interleaved == interleaved


def test_a_tile_has_whole_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = Grouped(torch.zeros(37, 8, dtype=torch.int32), torch.zeros(37, 2), None, 4, 32)
    for size, wanted in ((63, [8, 16, 24, 32, 37]), (64 * 15, [8, 16, 24, 32, 37]), (64 * 17, [16, 32, 37])):
        monkeypatch.setattr(grouped, "TILE", size)
        assert [last for _, last in weight.tiles()] == wanted


def test_words_in_the_order_of_a_gpu() -> None:
    """Reordered inputs of whole groups are interleaved like others; the words hold what they hold on a CPU."""
    outputs, inputs = 16, 256
    scheme = Gptq(bits=4, group_size=128, ordered=True, version=1)
    there = scheme.allocate(outputs, inputs, WeightAllocator(torch.float16, torch.device("meta")).empty)
    assert there.values.interleaved
    here = scheme.allocate(outputs, inputs, WeightAllocator(torch.float32, CPU).empty)
    packed = torch.zeros_like(here.values.packed_OW)
    words_of_gpu = GroupedWeight(here.values._replace(packed_OW=packed, interleaved=True), inputs)
    tensors = {
        "qweight": torch.randint(-(2**31), 2**31, (inputs // 8, outputs), dtype=torch.int32),
        "scales": torch.rand(2, outputs) + 1,
        "g_idx": torch.randperm(inputs, dtype=torch.int32) // 128,
    }
    for weight in (here, words_of_gpu):
        scheme.load("down_proj", tensors, weight, 0)
    assert not torch.equal(packed, here.values.packed_OW)
    assert torch.equal(dequantize(words_of_gpu.values), dequantize(here.values))


@pytest.mark.parametrize("group", [-1, 32])
def test_groups_lie_side_by_side_on_a_gpu(group: int) -> None:
    """Scales, zeros and offsets alike, as kernels take them; on a CPU the groups of an output do."""
    schemes = [
        Gptq(bits=4, group_size=group, zeros=True, version=1),
        Fp8(origin="FP8", scales="block", block=(16, 48)),
        Fp8(origin="FP8", scales="channel"),
        replace(Gptq(bits=4, group_size=group, version=1), offsets=True),
    ]
    for device in ("meta", "cpu"):
        for scheme in schemes:
            weight = scheme.allocate(64, 96, WeightAllocator(torch.float16, torch.device(device)).empty)
            assert isinstance(weight, GroupedWeight) and weight.values.has_equal_strides()
            outputs_stride, groups_stride = weight.values.scales_OG.stride()
            assert (outputs_stride if device == "meta" else groups_stride) == 1


FLOAT8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gptq", {"pack_dtype": "int32", "method": "gptq", "format": "gptq", "act_group_aware": True, "dynamic": {}}),
        ("gptq", {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["self_attn.v_proj"]]}),
        ("gptq", {"data_type": "int", "iters": 200, "low_gpu_mem_usage": True, "provider": "auto-round"}),
        ("awq", {"desc_act": False, "sym": True, "format": "gemm", "zero_point": False}),
        ("fp8", {"dequantize": False, "scale_fmt": "float", "modules_to_convert": None}),
        ("fp8 blocks", {"weight_block_size": (16, 24), "scale_fmt": None}),
        ("packed", {"kv_cache_scheme": FLOAT8_CACHE, "transform_config": {}}),
    ],
)
def test_settings_without_effect(name: str, settings: dict[str, Any]) -> None:
    before = read_quantization(FORMATS[name].config)
    after = read_quantization(FORMATS[name].config | settings)
    assert (
        replace(before.scheme, zeros_required=False) == after.scheme if name == "awq" else before.scheme == after.scheme
    )  # type: ignore[arg-type]
    assert after.fp8_kv_cache == ("kv_cache_scheme" in settings)


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
EVERY_OBJECT: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (GPTQ.config | {"dynamic": {"mlp": {"bits": 8}}}, ("dynamic", "mlp")),
    (GPTQ.config | {"dynamic": {"-:mlp": {}}}, ("dynamic", "-:mlp")),
    (AUTO_ROUND | {"extra_config": {"mlp": {"bits": 8, "group_size": 64}}}, ("extra_config", "mlp")),
    (AUTO_ROUND | {"extra_config": {"mlp": {"bits": 16, "data_type": "fp", "sym": None}}}, ("extra_config", "mlp")),
    (FORMATS["packed"].config, ("config_groups", "group_0")),
    (FORMATS["packed"].config, ("config_groups", "group_0", "weights")),
    (FORMATS["packed"].config | {"kv_cache_scheme": FLOAT8_CACHE}, ("kv_cache_scheme",)),
    (FORMATS["packed"].config | {"sparsity_config": {"format": "dense", "targets": []}}, ("sparsity_config",)),
]
"""Configurations with an object among their settings, and the keys that lead to the object."""


@pytest.mark.parametrize(("config", "path"), EVERY_OBJECT)
def test_no_setting_of_an_object_is_dropped(config: dict[str, Any], path: tuple[str, ...]) -> None:
    assert read_quantization(config)
    config = copy.deepcopy(config)
    place = config
    for key in path:
        place = place[key]
    place["turbo"] = "yes"
    with pytest.raises(UnsupportedModelError, match=f"{re.escape('.'.join(path[-2:]))} has turbo='yes'"):
        read_quantization(config)


def test_an_exception_of_auto_round_has_the_bits_and_groups_of_its_object() -> None:
    exceptions = {"a": {"bits": 8}, "b": {"group_size": 64}, "c": {"bits": 16, "group_size": 32}}
    quantization = read_quantization(AUTO_ROUND | {"extra_config": exceptions})
    schemes: list[Any] = [scheme for _, scheme in quantization.rules]
    assert [(one.bits, one.group_size) for one in schemes[:2]] == [(8, 32), (4, 64)] and schemes[2] is None
    with pytest.raises(UnsupportedModelError, match="extra_config.a has bits=3.*supported is 4, 8"):
        read_quantization(AUTO_ROUND | {"extra_config": {"a": {"bits": 3}}})


def test_null_takes_out_a_setting_at_any_depth(tmp_path: Path) -> None:
    """The command that the message names works, and leaves the other settings as they are."""
    make_checkpoint("llama3", tmp_path)
    quantize_checkpoint(tmp_path, FORMATS["packed"])
    config = json.loads((tmp_path / "config.json").read_text())
    expected = read_model_spec(tmp_path).quantization
    for place in (
        config["quantization_config"],
        config["quantization_config"]["config_groups"]["group_0"],
        config["quantization_config"]["config_groups"]["group_0"]["weights"],
    ):
        place["turbo"] = "yes"
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedModelError, match="turbo='yes'.*--hf-overrides '(.*)'") as raised:
            read_model_spec(tmp_path)
        overrides = json.loads(str(raised.value).partition("--hf-overrides '")[2].partition("'")[0])
        assert read_model_spec(tmp_path, hf_overrides=overrides).quantization == expected
        del place["turbo"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(tmp_path, hf_overrides={"quantization_config": {"ignore": ["mlp"]}})
    assert spec.quantization is not None and spec.quantization.rules == (("mlp", None),)
    assert read_model_spec(tmp_path, hf_overrides={"quantization_config": None}).quantization is None


def same_logits(
    reference: Any, meant: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype = torch.float32
) -> None:
    reference.load_state_dict(meant)
    sequences = DenseSequences(load_model(read_model_spec(folder), folder, dtype=dtype, device=CPU))
    sequences.add()
    tokens = torch.randint(0, VOCAB_SIZE, (9,)).tolist()
    (got,) = sequences.step([(0, tokens)])
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    assert (got - wanted).norm() <= 1e-4 * wanted.norm()


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors of a checkpoint in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def configure(folder: Path, **settings: Any) -> None:
    """Change settings of quantization_config."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_zeros_that_borrow(bits: int, version: int, tmp_path: Path) -> None:
    """Version 1 is written as tools do: one subtraction from a whole word, which a zero of 0 makes borrow."""
    reference = make_checkpoint("qwen2", tmp_path, intermediate_size=96)
    meant = quantize_checkpoint(tmp_path, Format(method="gptq", bits=bits, symmetric=False, version=2))
    ones = 0x11111111 if bits == 4 else 0x01010101

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("qzeros")]:
            module = name.removesuffix(".qzeros")
            zeros = unpack(tensors[name], bits, 1).numpy().copy()
            scales = tensors[f"{module}.scales"]
            weight = meant[f"{module}.weight"]
            zeros_before = zeros.copy()
            zeros[np.random.default_rng().random(zeros.shape) < 0.5] = 0
            # The middle of the range would hide that a file is read as symmetric.
            moved = torch.from_numpy(zeros_before.astype(np.int64) - zeros.astype(np.int64)) * scales.double()
            weight += moved.t().repeat_interleave(32, 1)[:, : weight.shape[1]]
            stored = words(zeros, bits, 1)
            tensors[name] = torch.from_numpy(stored) - (ones if version == 1 else 0)

    rewrite(tmp_path, change)
    configure(tmp_path, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    same_logits(reference, meant, tmp_path)


@pytest.mark.parametrize("name", ["gptq zeros", "gptq v2", "gptq 8 bits"])
@pytest.mark.parametrize("stated", [True, None])
def test_zeros_that_the_configuration_denies(name: str, stated: bool | None, tmp_path: Path) -> None:
    reference = make_checkpoint("qwen2", tmp_path, intermediate_size=96)
    meant = quantize_checkpoint(tmp_path, FORMATS[name])
    configure(tmp_path, sym=True)
    if stated is None:
        config = json.loads((tmp_path / "config.json").read_text())
        del config["quantization_config"]["sym"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    same_logits(reference, meant, tmp_path)
    with begin_loading(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU) as loading:
        loading.finish()
    assert any("sym=true" in note for note in loading.notes)


@pytest.mark.parametrize("middle", [7, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_symmetric_weights_need_no_zeros(middle: int, version: int, tmp_path: Path) -> None:
    """Tools write the middle of the range as 7 or as 8 in both versions. One other zero, and zeros are read."""
    reference = make_checkpoint("qwen2", tmp_path, intermediate_size=96)
    meant = quantize_checkpoint(tmp_path, Format(method="gptq", version=version))
    word = middle * 0x11111111 - (1 << 32 if middle == 8 else 0)

    def fill(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("qzeros"):
                tensor.fill_(word)

    rewrite(tmp_path, fill)
    same_logits(reference, meant, tmp_path)
    model = load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU)
    assert all(weight.operand.zeros_OG is None for weight in model.quantized)  # type: ignore[union-attr]


def test_an_order_that_the_configuration_denies(tmp_path: Path) -> None:
    reference = make_checkpoint("qwen2", tmp_path, intermediate_size=96)
    meant = quantize_checkpoint(tmp_path, FORMATS["gptq order"])
    configure(tmp_path, desc_act=False)
    same_logits(reference, meant, tmp_path)


@pytest.mark.parametrize("has_zeros", [True, False])
def test_awq_that_denies_its_zeros(has_zeros: bool, tmp_path: Path) -> None:
    """A file without zeros has the middle of the range; zeros of a file are read whatever `zero_point` says."""
    reference = make_checkpoint("qwen2", tmp_path, intermediate_size=96)
    meant = quantize_checkpoint(tmp_path, Format(method="awq", symmetric=not has_zeros))
    configure(tmp_path, zero_point=False)
    if not has_zeros:
        rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("qzeros")])
    same_logits(reference, meant, tmp_path)
    configure(tmp_path, zero_point=True)
    if not has_zeros:
        with pytest.raises(WeightError, match="qzeros"):
            load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("end", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_of_fp8_under_both_names(end: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    reference = make_checkpoint("qwen2", tmp_path, intermediate_size=96)
    meant = quantize_checkpoint(tmp_path, FORMATS["fp8"])

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            module = name.removesuffix(".weight_scale")
            tensors[f"{module}.{end}"] = tensors.pop(name).reshape(shape)
            tensors[f"{module}.activation_scale"] = torch.tensor(0.1)

    rewrite(tmp_path, change)
    same_logits(reference, meant, tmp_path)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    rewrite(tmp_path, lambda tensors: [tensors.pop(key, None) for key in (name, f"{name}_inv")])
    with pytest.raises(WeightError, match="up_proj has no scale; expected weight_scale or weight_scale_inv"):
        load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", ["gptq", "awq", "packed zeros", "int8 channel", "float channel", "fp8 blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_groups_whose_scale_is_zero(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Tools write scales of 0 for tiny weights: the group is 0. A scale that only float16 makes 0 is refused."""
    reference = make_checkpoint("qwen2", tmp_path, intermediate_size=96)
    meant = quantize_checkpoint(tmp_path, FORMATS[name])
    end = {"gptq": "scales", "awq": "scales", "fp8 blocks": "weight_scale_inv"}.get(name, "weight_scale")
    key = f"model.layers.1.mlp.up_proj.{end}"
    scale = load_file(tmp_path / "model.safetensors")[key]
    outputs_first = name not in ("gptq", "awq")

    def set_first(value: float) -> Any:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors[key] = tensors[key].float()
            tensors[key].view(-1)[0] = value

        return change

    rows = 16 if name == "fp8 blocks" else 1
    width = {"int8 channel": 64, "float channel": 64, "fp8 blocks": 24}.get(name, 32)
    meant["model.layers.1.mlp.up_proj.weight"][:rows, :width] = 0
    assert outputs_first or scale.shape[0] == 2
    rewrite(tmp_path, set_first(0.0))
    if dtype == torch.float32:
        same_logits(reference, meant, tmp_path)
    else:
        load_model(read_model_spec(tmp_path), tmp_path, dtype=dtype, device=CPU)
    rewrite(tmp_path, set_first(1e-12))
    if dtype == torch.float16 and name != "float channel":
        with pytest.raises(WeightError, match=r"up_proj has scales that are 0 in float16 \(.*1e-12\); dtype float32"):
            load_model(read_model_spec(tmp_path), tmp_path, dtype=dtype, device=CPU)
    else:
        load_model(read_model_spec(tmp_path), tmp_path, dtype=dtype, device=CPU)
    rewrite(tmp_path, set_first(float("inf")))
    with pytest.raises(WeightError, match="infinite or not a number in the file; download it again"):
        load_model(read_model_spec(tmp_path), tmp_path, dtype=dtype, device=CPU)


@pytest.mark.parametrize("method", ["fp8", "awq"])
def test_names_with_a_star_are_patterns(method: str) -> None:
    """transformers takes entries of modules_to_not_convert for patterns of the beginning of a name."""
    for entry, matches in (("model.layers.*.mlp", True), ("layers.*.mlp", False), ("re:.*.mlp", True)):
        ignoring = read_quantization(FORMATS[method].config | {"modules_to_not_convert": [entry]})
        assert (ignoring.scheme_of("model.layers.1.mlp.up_proj") is None) == matches


@pytest.mark.parametrize(
    ("entry", "module", "matches"),
    [
        ("self_attn", "model.layers.1.self_attn.q_proj", True),
        ("mlp", "model.layers.10.mlp.up_proj", True),
        ("layers.1", "model.layers.1.mlp.up_proj", True),
        ("layers.1", "model.layers.11.mlp.up_proj", False),
        ("model.layers.1.", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1.", "model.layers.12.mlp.up_proj", False),
        ("up_proj", "model.layers.1.mlp.up_proj", True),
        ("proj", "model.layers.1.mlp.up_proj", False),
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj", True),
        ("re:.*layers\\.1\\.", "model.layers.1.mlp.up_proj", True),
        ("re:up_proj", "model.layers.1.mlp.up_proj", False),
    ],
)
def test_names_of_modules(entry: str, module: str, matches: bool) -> None:
    """Whole components anywhere in the name; a pattern from its beginning."""
    fp8 = FORMATS["fp8"].config
    ignoring = read_quantization(fp8 | {"modules_to_not_convert": [entry]})
    assert (ignoring.scheme_of(module) is None) == matches
    only = read_quantization(GPTQ.config | {"modules_in_block_to_quantize": [["o_proj"], [entry]]})
    assert (only.scheme_of(module) is not None) == matches


@pytest.mark.parametrize(("parts", "named"), [("abc", ["a", "b", "c"]), ("abcd", ["a", "b"])])
def test_each_of_three_parts_is_named_and_of_more_each_format(parts: str, named: list[str]) -> None:
    quantization = Quantization("fp8", Fp8(origin="FP8", scales="channel"), rules=(("a", None),))
    quantization.check_parts("m", "bcd")
    with pytest.raises(UnsupportedModelError, match="the parts of m several formats: a is in 16 bits, b is") as refusal:
        quantization.check_parts("m", parts)
    assert re.findall(r"\b(\w) is ", str(refusal.value)) == named


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("awq", {"modules_to_not_convert": ["mlp"]}),
        ("fp8", {"modules_to_not_convert": ["layers.0"]}),
        ("gptq", {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]]}),
        ("gptq", {"dynamic": {"-:.*layers\\.0\\..*": {}}}),
        ("packed", {"ignore": ["lm_head", "re:.*down_proj"]}),
    ],
)
def test_files_beside_their_list(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """A part stays in 16 bits by the list. Where the file has it otherwise, the error names the list."""
    reference = make_checkpoint("qwen2", tmp_path, intermediate_size=96)
    dense = load_file(tmp_path / "model.safetensors")
    meant = quantize_checkpoint(tmp_path, FORMATS[name])
    whole = load_file(tmp_path / "model.safetensors")
    configure(tmp_path, **settings)
    (setting,) = settings
    with pytest.raises(WeightError, match=rf"by quantization_config with .*{setting}.* is not quantized"):
        load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU)
    quantization = read_model_spec(tmp_path).quantization
    assert quantization is not None

    def undo(tensors: dict[str, torch.Tensor]) -> None:
        for key in dense:
            module = key.removesuffix(".weight")
            if f"{key}" in whole and whole[key].dtype == dense[key].dtype:
                continue
            if quantization.scheme_of(module) is None:
                for other in [other for other in tensors if other.startswith(f"{module}.") and "bias" not in other]:
                    del tensors[other]
                tensors[key] = meant[key] = dense[key]

    rewrite(tmp_path, undo)
    same_logits(reference, meant, tmp_path)
    configure(tmp_path, **{setting: None})
    with pytest.raises(WeightError, match=r"by quantization_config with .* is quantized"):
        load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU)


def test_scales_of_a_cache_without_quantized_weights(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        **{"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []},
        "kv_cache_scheme": FLOAT8_CACHE,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_configured_model(EngineConfig(model=str(tmp_path)), config_only=False)
    assert spec.quantization is None and any("kv_cache_dtype=fp8" in note for note in spec.notes)
    spec = read_configured_model(EngineConfig(model=str(tmp_path), kv_cache_dtype="fp8"), config_only=False)
    assert not any("kv_cache_dtype=fp8" in note for note in spec.notes)
