"""Files that quantization tools wrote: each means what its tool says, or is refused by the name of a setting.

`scripts/tool-files` made the files and the reference logits; `tests/data/tool_files/README.md` says with what.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_model
from dense import DenseSequences
from safetensors.torch import load_file
from transformers import AutoRoundConfig, AwqConfig, FineGrainedFP8Config, GPTQConfig, Mxfp4Config
from transformers.utils import quantization_config as classes

from phonograph.errors import ModelError, UnsupportedModelError
from phonograph.models.quantization.quantization_config import QUANT_METHODS, read_quantization
from phonograph.models.spec import read_model_spec

FILES = Path(__file__).parents[1] / "data" / "tool_files"
CASES = sorted(str(path.parent.relative_to(FILES)) for path in FILES.glob("*/*/made_by.json"))
REFUSED = {
    "autoawq-0.2.9/gemv": "version='gemv'",
    "gptqmodel-7.7.0/awq-skipped": "dynamic=",
    "llmcompressor-0.14.0.1/nvfp4a16": "format='nvfp4-pack-quantized'",
    "transformers-5.17.0/blocks-ue8m0": "scale_fmt='ue8m0'",
}
"""Cases that no reader takes, with the setting that the error names."""
LIMIT = 5e-6
"""Relative error of logits in float32. The largest of these files is 2.1e-6."""
LIMIT_OF_LLAMA_CPP = 0.04
"""Relative error against llama.cpp's own logits, whose activations have 8 bits."""
PRESETS: dict[str, Any] = json.loads((FILES / "llmcompressor-0.14.0.1" / "presets.json").read_text())
REFUSED_PRESETS = {
    **{name: "format=" for name in ("none", "UNQUANTIZED")},
    **{name: f"format='{name[:5].lower()}" for name in PRESETS if name.startswith(("NVFP4", "MXFP"))},
    **{name: f"num_bits={name[1]}" for name in PRESETS if name[:2] in ("W2", "W3", "W5", "W6", "W7")},
}
"""Presets of compressed-tensors that no reader takes, with the setting that the error names."""
READ = [
    GPTQConfig(bits=4),
    GPTQConfig(bits=8, group_size=-1, desc_act=True, sym=False, true_sequential=False),
    GPTQConfig(bits=4, format="gptq_v2", meta={"quantizer": ["optimum:2.3.0", "gptqmodel:7.7.0"]}),
    AwqConfig(),
    AwqConfig(group_size=64, zero_point=False, modules_to_not_convert=["lm_head", "mlp.gate"]),
    AwqConfig(version="GEMM"),
    FineGrainedFP8Config(),
    FineGrainedFP8Config(activation_scheme="static", weight_block_size=None, modules_to_not_convert=["lm_head"]),
    AutoRoundConfig(),
    AutoRoundConfig(bits=8, group_size=32, sym=False),
    Mxfp4Config(),
    Mxfp4Config(modules_to_not_convert=["model.layers.*.self_attn", "lm_head"]),
]
"""Configurations of transformers that are read."""
ARGUMENTS: dict[str, dict[str, Any]] = {"GPTQConfig": {"bits": 4}}
"""Arguments without which transformers makes no object of a class."""


def model_path(case: str) -> Path:
    """Return the folder of a case, or its GGUF file."""
    file = FILES / case / "model.gguf"
    return file if file.is_file() else FILES / case


def error_of(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((logits - wanted).norm() / wanted.norm())


def test_each_refused_case_is_there() -> None:
    assert REFUSED.keys() < set(CASES) and REFUSED_PRESETS.keys() < PRESETS.keys()


@pytest.mark.parametrize("case", [case for case in CASES if case not in REFUSED])
def test_logits_are_those_of_the_tool(case: str) -> None:
    expected = load_file(FILES / case / "expected.safetensors")
    path = model_path(case)
    model = load_model(read_model_spec(path), path, dtype=torch.float32, device=torch.device("cpu"))
    sequences = DenseSequences(model)
    sequences.add()
    (logits,) = sequences.step([(0, expected["tokens"].tolist())])
    assert error_of(logits, expected["logits"]) <= LIMIT
    if "theirs" in expected:
        assert error_of(logits, expected["theirs"]) <= LIMIT_OF_LLAMA_CPP


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_setting(case: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[case]):
        read_model_spec(model_path(case))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_compressed_tensors(name: str) -> None:
    if name in REFUSED_PRESETS:
        with pytest.raises(ModelError, match=REFUSED_PRESETS[name]):
            read_quantization(PRESETS[name])
    else:
        assert read_quantization(PRESETS[name]).method == "compressed-tensors"


@pytest.mark.parametrize("config", READ, ids=lambda config: type(config).__name__)
def test_configurations_of_transformers(config: Any) -> None:
    written = json.loads(config.to_json_string(use_diff=False))
    assert read_quantization(written).method == written["quant_method"]


@pytest.mark.parametrize("name", sorted({method.value for method in classes.QuantizationMethod} - {*QUANT_METHODS}))
def test_other_methods_of_transformers_are_refused_by_name(name: str) -> None:
    """With no setting, and with all that transformers writes."""
    for config in [{"quant_method": name}, *(one for one in written_configs() if one["quant_method"] == name)]:
        with pytest.raises(UnsupportedModelError, match=f"quant_method='{name}', which is not supported"):
            read_quantization(config)


def test_defaults_of_each_class_of_transformers() -> None:
    """A class whose method is read here is read as it writes its defaults, and is in READ with other values."""
    configs = written_configs()
    assert len(configs) > 15
    for config in configs:
        # Without groups a configuration of compressed-tensors says nothing of the weights.
        if config["quant_method"] in QUANT_METHODS and config != {"quant_method": "compressed-tensors"}:
            assert read_quantization(config).method == config["quant_method"]
            assert sum(one.quant_method == config["quant_method"] for one in READ) > 1


def written_configs() -> list[dict[str, Any]]:
    """Return what the classes of transformers write that need no further package."""
    configs: list[dict[str, Any]] = []
    for name, found in vars(classes).items():
        if inspect.isclass(found) and issubclass(found, classes.QuantizationConfigMixin):
            try:
                configs.append(json.loads(found(**ARGUMENTS.get(name, {})).to_json_string(use_diff=False)))
            except (ImportError, TypeError):
                continue
    return [config for config in configs if "quant_method" in config]
