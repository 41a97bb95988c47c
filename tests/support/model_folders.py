"""Writes a folder with the config.json of each public model that the comparisons run with random weights.

    python tests/support/model_folders.py DIR

The configurations are those of the tests (`public_*_configs.py`) and defaults of transformers' classes,
which are those of published models. Gemma 4 is written as its text model alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gemma4_configs
from public_encoder_configs import ENCODER_CONFIGS
from public_family_configs import FAMILY_CONFIGS
from transformers import Qwen3_5Config, Qwen3_5MoeConfig, WhisperConfig

LARGE_WHISPER = {
    **{"vocab_size": 51866, "num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32},
    **{"encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120},
}

QWEN_TEXT = {"mamba_ssm_dtype": "float32", "max_position_embeddings": 262144}
"""Fields of published models. Without the type, vLLM keeps states in bfloat16."""


def of_class(kind: type[Any], architecture: str, **fields: Any) -> dict[str, Any]:
    return {**kind(**fields).to_dict(), "architectures": [architecture], "dtype": "bfloat16"}


def configs() -> dict[str, dict[str, Any]]:
    """Return fields of config.json by the name of the folder."""
    found = {
        "qwen3.6-35b-a3b": of_class(Qwen3_5MoeConfig, "Qwen3_5MoeForConditionalGeneration", text_config=QWEN_TEXT),
        "qwen3.5-9b": of_class(Qwen3_5Config, "Qwen3_5ForConditionalGeneration", text_config=QWEN_TEXT),
        "whisper-large-v3": of_class(WhisperConfig, "WhisperForConditionalGeneration", **LARGE_WHISPER),
        "falcon-h1-0.5b": FAMILY_CONFIGS["tiiuae/Falcon-H1-0.5B-Base"][0],
        "nemotron-3-nano": FAMILY_CONFIGS["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"][0],
    }
    of_gemma_4 = {"26b-a4b": gemma4_configs.EXPERTS, "31b": gemma4_configs.DENSE, "e2b": gemma4_configs.SMALL}
    for name, config in of_gemma_4.items():
        found[f"gemma-4-{name}"] = {**config["text_config"], "architectures": ["Gemma4ForCausalLM"]}
    return found | {name.lower(): config for name, (config, *_) in ENCODER_CONFIGS.items()}


def main() -> None:
    (folder,) = map(Path, sys.argv[1:])
    for name, config in configs().items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        print(folder / name)


if __name__ == "__main__":
    main()
