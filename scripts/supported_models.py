#!/usr/bin/env python3
"""Supported models, weights and hardware, from the values that decide in an engine.

    python scripts/supported_models.py            # print the tables
    python scripts/supported_models.py --write    # write them between the markers in README.md

The site's page of models has the same tables, and a test compares README.md with them.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import get_args

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import Capabilities
from phonograph.attention.selection import BUILT_IN
from phonograph.config.values import DType
from phonograph.core.device import KNOWN_DEVICES, DeviceSpec
from phonograph.models.quantization.gguf_blocks import BLOCK_TYPES, FLOATS
from phonograph.models.quantization.quantization_config import QUANT_METHODS
from phonograph.models.registry import ARCHITECTURES, ENCODERS
from phonograph.models.weights.wrapper import WRAPPERS

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- made by scripts/supported_models.py -->"
END = "<!-- end -->"
FAMILIES = {
    "bamba": "Bamba",
    "falcon_h1": "Falcon-H1",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gemma4_text": "Gemma 4 (text)",
    "glm4_moe": "GLM-4.5, 4.6, 4.7 (without multi-token prediction)",
    "gpt_oss": "gpt-oss",
    "granite": "Granite 3",
    "granitemoe": "Granite 3 MoE, PowerMoE",
    "granitemoehybrid": "Granite 4",
    "granitemoeshared": "Granite MoE with a shared expert",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2 with experts",
    "llama": "Llama 2 and 3.x, SmolLM2, TinyLlama",
    "ministral3": "Ministral 3",
    "mistral": "Mistral",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2 and 3",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "phi3": "Phi-3, Phi-3.5, Phi-4",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5, Qwen3.6",
    "qwen3_5_moe_text": "Qwen3.5 and Qwen3.6 with experts",
    "smollm3": "SmolLM3",
    "qwen3_moe": "Qwen3-MoE",
}
"""Names of the families by the model type of an architecture."""
EMBEDDERS = {
    "bert": "BERT, MiniLM, BGE, E5, GTE",
    "distilbert": "DistilBERT",
    "modernbert": "ModernBERT",
    "nomic_bert": "NomicBERT",
    "roberta": "RoBERTa",
    "xlm-roberta": "XLM-RoBERTa, BGE-M3",
}
"""Names of the encoders by their model type."""
WRAPPED = {
    "gemma3": "Gemma 3 with images: its text model",
    "gemma4": "Gemma 4 with images or sound: its text model",
    "qwen3_5": "Qwen3.5, Qwen3.6 with images: its text model",
    "qwen3_5_moe": "Qwen3.5, Qwen3.6 with experts and images: its text model",
    "mistral3": "Mistral Small 3.1, Ministral 3 with images: their text models",
}
"""Names of the models around a text model, by their model type."""
FORMATS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "auto-round": "AutoRound",
    "mxfp4": "MXFP4 (experts)",
}
"""Names of the weight formats by `quant_method`."""
COLUMNS = 118
"""Width of lines of text."""
SPEC = AttentionSpec(
    num_query_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=64
)
"""Attention of Llama-3.1-8B."""
FP8 = replace(SPEC, kv_cache_dtype="float8_e4m3fn")


def models_table() -> str:
    """Return the table of model families."""
    rows = [(FAMILIES[one.model_type], f"`{name}`") for name, one in sorted(ARCHITECTURES.items())]
    rows += [(WRAPPED[one.model_type], f"`{name}`") for name, one in sorted(WRAPPERS.items())]
    rows += [(EMBEDDERS[one.model_type], f"`{name}Model`, `{name}For...`") for name, one in sorted(ENCODERS.items())]
    return _table(("models", "architecture in config.json"), rows)


def formats() -> str:
    """Return the sentence about weights."""
    *some, last = (FORMATS[method] for method in QUANT_METHODS)
    dense = ", ".join(one for one in get_args(DType) if one != "auto")
    *blocks, last_block = (*BLOCK_TYPES, *FLOATS)
    text = (
        f"Weights are safetensors in {dense}, or quantized in the format of {', '.join(some)} or {last}; or one GGUF "
        f"file with types {', '.join(blocks)} and {last_block}."
    )
    return textwrap.fill(text, COLUMNS, break_on_hyphens=False)


def hardware_table() -> str:
    """Return the table of attention backends by device, for the attention of Llama-3.1-8B in bfloat16."""
    groups = [list(devices) for _, devices in groupby(KNOWN_DEVICES.values(), lambda device: device.capability)]
    headings = ["attention backend", *(_heading(devices) for devices in groups)]
    rows = [
        (f"`{one.capabilities.label}`", *(_support(one.capabilities, devices[0]) for devices in groups))
        for one in BUILT_IN
    ]
    return _table(headings, rows)


def markdown() -> str:
    """Return all of it."""
    return "\n\n".join(
        [
            models_table(),
            formats(),
            hardware_table(),
            "Columns are compute capabilities of NVIDIA GPUs. FP8 means that keys and values may also be FP8.",
        ]
    )


def _heading(devices: Iterable[DeviceSpec]) -> str:
    first = next(iter(devices))
    return "CPU" if first.kind == "cpu" else ".".join(map(str, first.capability))


def _support(backend: Capabilities, device: DeviceSpec) -> str:
    if backend.why_not(SPEC, device):
        return "no"
    return "yes" if backend.why_not(FP8, device) else "yes, FP8"


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(headings)
    return "\n".join(f"| {' | '.join(row)} |" for row in [names, ["---"] * len(names), *rows])


def main() -> None:
    """Print the tables, and write them into README.md where asked."""
    made = markdown()
    if "--write" in sys.argv[1:]:
        before, _, rest = README.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
        README.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()
