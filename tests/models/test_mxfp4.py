"""Checkpoints with experts in MXFP4, named as those of gpt-oss: what transformers reads in them, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_model
from dense import DenseSequences
from fp4_weights import make_file, meant, random_file
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import FP4_VALUES

from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.engine.plan import make_plan
from phonograph.errors import ModelError, PhonographError, UnsupportedModelError, WeightError
from phonograph.kernels.torch import fp4
from phonograph.kernels.torch.grouped import dequantize
from phonograph.models.quantization import mxfp4
from phonograph.models.quantization.cpu_weights import CpuProducts
from phonograph.models.quantization.grouped_weight import GroupedWeight
from phonograph.models.quantization.mxfp4 import Mxfp4Scheme
from phonograph.models.quantization.quantization_config import read_quantization
from phonograph.models.quantization.unquantized import DenseWeight
from phonograph.models.spec import read_model_spec

CPU = torch.device("cpu")
TOKENS = [5, 99, 3, 3, 42, 17, 200, 8, 1]
EXPERTS = "model.layers.1.mlp.experts"
FORMS = {
    GroupedWeight: CpuProducts(int4=True, dequantize=False, operator_rows=4, reason="a test"),
    DenseWeight: CpuProducts(int4=True, dequantize=True, operator_rows=4, reason="a test"),
}


def logits(folder: Path, **settings: Any) -> torch.Tensor:
    sequences = DenseSequences(load_model(read_model_spec(folder), folder, dtype=torch.float32, device=CPU, **settings))
    return sequences.step([(sequences.add(), TOKENS)])[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_what_transformers_reads(form: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of a GPU too, and as a CPU holds it."""
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    whole = make_file(tmp_path, 64, modules_to_not_convert=names)
    spec = read_model_spec(tmp_path)
    quantized = {matrix.name for layer in spec.layers for matrix in layer.matrices if matrix.scheme is not None}
    assert quantized == {"experts' gate and up", "experts' down"}
    assert spec.quantization is not None and spec.quantization.name == "MXFP4, groups of 32"
    found = [logits(tmp_path), logits(tmp_path, cpu_products=FORMS[form])]
    model = load_model(spec, tmp_path, dtype=torch.float32, device=CPU)
    measured = sum(tensor.nbytes for weight in model.quantized for tensor in weight.values if torch.is_tensor(tensor))
    assert measured == sum(scheme.nbytes(outputs, inputs, 4) for scheme, outputs, inputs in spec.quantized_matrices())
    converted = load_model(spec, tmp_path, dtype=torch.float32, device=CPU, cpu_products=FORMS[form])
    weight = converted.weights[1].feed_forward.gate_up.weight
    assert isinstance(weight, form)
    monkeypatch.setattr(mxfp4, "_in_order_of_gpu", lambda _: True)
    found.append(logits(tmp_path))
    monkeypatch.undo()
    save_file(whole, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    wanted = logits(tmp_path)
    for one in found:
        assert (one - wanted).norm() <= 1e-5 * wanted.norm()


def test_refused_tensors(tmp_path: Path) -> None:
    """Tensors that are missing, of another size or type, not of the model, or not numbers, each by name."""
    make_file(tmp_path)
    path = tmp_path / "model.safetensors"
    file, blocks, scales = load_file(path), f"{EXPERTS}.gate_up_proj_blocks", f"{EXPERTS}.down_proj_scales"

    def refused(message: str, missing: str = "", **changes: torch.Tensor) -> None:
        names = {
            "blocks": blocks,
            "scales": scales,
            "more": f"{EXPERTS}.up_proj_blocks",
            "dense": f"{EXPERTS}.gate_up_proj",
        }
        kept = {name: tensor for name, tensor in file.items() if name != missing}
        save_file(kept | {names[key]: tensor for key, tensor in changes.items()}, path)
        with pytest.raises(WeightError, match=message):
            logits(tmp_path)

    for name in (blocks, scales):
        refused(rf"tensor {name} \[6, 64, .* is in none of", name)
    refused(
        rf"tensor {blocks} .* has shape \[6, 64, 1, 16\].* ask for \[6, 64, 2, 16\]",
        blocks=file[blocks][:, :, :1].contiguous(),
    )
    refused(rf"tensor {scales} .* has shape \[5, 64, 1\].* ask for \[6, 64, 1\]", scales=file[scales][:5])
    refused(f"tensor {blocks} .* is int8; expected uint8", blocks=file[blocks].view(torch.int8))
    refused(f"{EXPERTS}.up_proj_blocks .* is not part of this", more=file[blocks].clone())
    refused(f"{EXPERTS}.gate_up_proj .* is not part of this", dense=torch.zeros(6, 64, 64))
    changed = file[scales].clone()
    changed[3, 7] = 255
    refused(rf"{EXPERTS}.down_proj has scales that are not a number \(255\)", scales=changed)


@pytest.mark.parametrize(
    ("exponent", "finite", "infinite"),
    [(254, 1.5, 2.0), (253, 3.0, 4.0), (252, 6.0, None), (0, 0.5, None), (1, 0.5, None)],
)
def test_weights_at_both_ends(exponent: int, finite: float, infinite: float | None) -> None:
    """Weights from 2^-128 on, which is below the exponents of bfloat16, up to the last that is finite."""
    weight = Mxfp4Scheme().allocate(2, 64, torch.empty)
    file = {"blocks": torch.zeros(1, 2, 2, 16, dtype=torch.uint8), "scales": torch.zeros(1, 2, 2, dtype=torch.uint8)}
    file["scales"][0, 1, 1] = exponent

    def load(code: float) -> torch.Tensor:
        file["blocks"][0, 1, 1, 3] = FP4_VALUES.index(code) << 4 | FP4_VALUES.index(-code)
        Mxfp4Scheme().load("a module", {end: tensor[0] for end, tensor in file.items()}, weight, 0)
        return dequantize(weight.values)

    assert load(finite)[1, 38:40].tolist() == [-finite * 2.0 ** (exponent - 127), finite * 2.0 ** (exponent - 127)]
    assert torch.equal(load(finite).double(), meant(file, torch.bfloat16)[0])
    if infinite is not None:
        with pytest.raises(WeightError, match="a module has weights that are infinite"):
            load(infinite)
        assert meant(file, torch.bfloat16).isinf().any()


def test_codes_are_those_of_transformers() -> None:
    assert list(fp4.CODES) == FP4_VALUES


def test_scales_that_only_a_cpu_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mxfp4, "_in_order_of_gpu", lambda _: True)
    weight = Mxfp4Scheme().allocate(8, 64, torch.empty)
    for exponent in (160, 161):
        file = random_file(8, 64, exponents=(exponent, exponent + 1))
        if exponent == 160:
            Mxfp4Scheme().load("a module", file, weight, 0)
            assert torch.equal(dequantize(weight.values).double(), meant({k: v[None] for k, v in file.items()})[0])
        else:
            with pytest.raises(
                WeightError, match=r"scales up to 2\^34; a GPU multiplies scales up to 2\^33, and device"
            ):
                Mxfp4Scheme().load("a module", file, weight, 0)


@pytest.mark.parametrize(("outputs", "inputs"), [(12, 64), (8, 96)])
def test_sizes_that_only_a_cpu_multiplies(outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU reads whole blocks."""
    Mxfp4Scheme().allocate(outputs, inputs, torch.empty)
    monkeypatch.setattr(mxfp4, "_in_order_of_gpu", lambda _: True)
    with pytest.raises(UnsupportedModelError, match=f"not {outputs} and {inputs}; use device cpu"):
        Mxfp4Scheme().allocate(outputs, inputs, torch.empty)


REFUSED: list[tuple[dict[str, Any], type[PhonographError], str]] = [
    (
        {"intermediate_size": 48},
        UnsupportedModelError,
        "a scale for each 32 inputs, and 48 is not a multiple of 32",
    ),
    ({"hidden_size": 80}, UnsupportedModelError, "a scale for each 32 inputs, and 80 is not a multiple of 32"),
    (
        {"quantization_config": {"quant_method": "mxfp4", "bits": 4}},
        UnsupportedModelError,
        "quantization_config has bits=4, whose effect is not known",
    ),
    (
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["*.x"]}},
        ModelError,
        r"has '(re:)?\*.x' in modules_to_not_convert, which is not a regular expression",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refused_configurations(
    changes: dict[str, Any], error: type[PhonographError], message: str, tmp_path: Path
) -> None:
    make_file(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(error, match=message):
        read_model_spec(tmp_path)


def test_modules_that_are_not_converted() -> None:
    """transformers takes an entry for a pattern of the beginning of a module's name, and for its end."""

    def quantized(*entries: str) -> list[bool]:
        quantization = read_quantization({"quant_method": "mxfp4", "modules_to_not_convert": list(entries)})
        modules = "mlp.experts.gate_up_proj", "mlp.experts.3.up_proj", "mlp.shared_expert.up_proj", "self_attn.q_proj"
        return [quantization.scheme_of(f"model.layers.1.{module}") is not None for module in modules]

    assert quantized() == quantized("model.layers.*.self_attn", "lm_head") == [True, True, False, False]
    for entry in ("model.layers.*.mlp.experts", "model.layers.1.mlp.experts", "mlp.experts", "model.layers.*"):
        assert quantized(entry) == [False] * 4
    assert quantized("model.layers.2.mlp.experts") == [True, True, False, False]


def test_plan_and_dummy_weights(tmp_path: Path) -> None:
    """Bytes are those of codes and exponents; random weights have about the deviation that is asked for."""
    make_file(tmp_path)
    spec = read_model_spec(tmp_path)
    plain = spec.with_quantization(None)
    weights = 3 * 6 * 32 * 64 * 3
    exponents = 3 * 6 * 64 * 4 * 2
    assert plain.weight_bytes("bfloat16") - spec.weight_bytes("bfloat16") == weights * 2 - weights // 2 - exponents
    for dtype, message in (("bfloat16", None), ("float32", "quantized experts in bfloat16 and float16 only")):
        config = EngineConfig(model=str(tmp_path), dtype=dtype)
        if message is None:
            assert make_plan(config, spec, known_device("h200")).model.quantization == spec.quantization
        else:
            with pytest.raises(UnsupportedModelError, match=message):
                make_plan(config, spec, known_device("h200"))
    model = load_model(spec, tmp_path, dtype=torch.float32, device=CPU, load_format="dummy")
    for weight in model.quantized:
        drawn = dequantize(weight.values).float()
        assert 0.012 < drawn.std() < 0.034 and drawn.mean().abs() < 0.002
        assert len(drawn.unique()) == 15
