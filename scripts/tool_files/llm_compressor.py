"""Cases of llm-compressor. The reference has the weights as compressed-tensors' own code decompresses them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from datasets import Dataset
from decompressed import decompressed
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from tiny_models import keep_case, logits_of, make_source, random_texts
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

SIZES = {"hidden_size": 128, "intermediate_size": 128}
SMALL = {"hidden_size": 64, "intermediate_size": 96}
KV_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def group(bits: int, size: int, **settings: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": "group", "group_size": size, "symmetric": True, **settings}


def by_groups(**weights_of: Any) -> dict[str, Any]:
    """Return config_groups of weights by the end of a regular expression of module names."""
    return {
        f"group_{i}": {"targets": [target], "weights": weights}
        for i, (target, weights) in enumerate(
            (f"re:.*{name}.*" if name != "Linear" else name, weights) for name, weights in weights_of.items()
        )
    }


FP8_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
CASES: dict[str, tuple[type, dict[str, Any], dict[str, int]]] = {
    "w4a16": (QuantizationModifier, {"scheme": "W4A16"}, SIZES | {"num_hidden_layers": 1}),
    "w4a16-asym": (QuantizationModifier, {"scheme": "W4A16_ASYM"}, SIZES | {"num_hidden_layers": 1}),
    "w8a16": (QuantizationModifier, {"scheme": "W8A16"}, SIZES | {"num_hidden_layers": 1}),
    "w8a8": (QuantizationModifier, {"scheme": "W8A8"}, SMALL),
    "fp8": (QuantizationModifier, {"scheme": "FP8"}, SMALL),
    "fp8-dynamic": (QuantizationModifier, {"scheme": "FP8_DYNAMIC"}, SMALL),
    "fp8-block": (QuantizationModifier, {"scheme": "FP8_BLOCK"}, SMALL | {"intermediate_size": 192}),
    "fp8-kv-cache": (QuantizationModifier, {"scheme": "FP8_DYNAMIC", "kv_cache_scheme": KV_CACHE}, SMALL),
    "kv-cache-only": (QuantizationModifier, {"kv_cache_scheme": KV_CACHE}, SMALL),
    "gptq-w4a16": (GPTQModifier, {"config_groups": by_groups(Linear=group(4, 32))}, SMALL),
    "awq-w4a16-asym": (QuantizationModifier, {"config_groups": by_groups(Linear=group(4, 32, symmetric=False))}, SMALL),
    "mixed-bits": (
        QuantizationModifier,
        {"config_groups": by_groups(self_attn=group(8, 32), mlp=group(4, 32))},
        SMALL,
    ),
    "mixed-precision": (
        QuantizationModifier,
        {"config_groups": by_groups(self_attn=FP8_CHANNEL, mlp=group(4, 32))},
        SMALL,
    ),
    "w8a8-asym-activations": (
        QuantizationModifier,
        {
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
                    "input_activations": {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False},
                }
            }
        },
        SMALL,
    ),
    "w4a8": (
        QuantizationModifier,
        {
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": group(4, 32),
                    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
                }
            }
        },
        SMALL,
    ),
    "nvfp4a16": (QuantizationModifier, {"scheme": "NVFP4A16"}, SMALL),
}


# It pins memory, which needs a GPU.
IntermediatesCache._pin_intermediate = lambda *arguments: None


def presets() -> dict[str, Any]:
    """Return the quantization_config that transformers' class makes of each preset, and of none."""
    configs: dict[str, Any] = {"none": CompressedTensorsConfig().to_dict()}
    for name in PRESET_SCHEMES:
        scheme = preset_name_to_scheme(name, ["Linear"])
        layout = infer_module_format(torch.nn.Linear, scheme).value
        groups = {"group_0": scheme.model_dump(mode="json")}
        configs[name] = CompressedTensorsConfig(groups, layout, ignore=["lm_head"]).to_dict()
    return configs


def main(out: Path, only: list[str]) -> None:
    if not only:
        out.mkdir(parents=True, exist_ok=True)
        (out / "presets.json").write_text(json.dumps(presets(), default=str, indent=1) + "\n")
    for case, (modifier, settings, sizes) in CASES.items():
        if only and case not in only:
            continue
        source = make_source(Path(mkdtemp()), family="qwen2" if "awq" in case else "llama", **sizes)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(source)
        data = Dataset.from_dict(dict(tokenizer(random_texts(16, 24))))
        targets = {"targets": ["Linear"]} if "scheme" in settings else {}
        recipe = [AWQModifier()] if case.startswith("awq") else []
        recipe.append(modifier(ignore=["lm_head"], **targets, **settings))
        oneshot(model=model, dataset=data, recipe=recipe, max_seq_length=24)
        written = Path(mkdtemp())
        model.save_pretrained(written, save_compressed=True)
        logits = None
        try:
            logits = logits_of(written, decompressed(written))
        except Exception as error:
            print("no reference", case, repr(error)[:600])
        how = (
            "weights by compressed_tensors' CompressedTensorsDequantizer with scales in float32; transformers, float32"
        )
        packages = ["llmcompressor", "compressed-tensors", "transformers", "torch"]
        keep_case(out, written, case, packages=packages, logits=logits, reference=how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
