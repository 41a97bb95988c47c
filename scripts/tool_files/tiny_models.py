"""Tiny random models for quantization tools, and the reference logits of what the tools write.

This module runs in the environment of each tool. It needs torch, transformers, tokenizers and safetensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

VOCAB_SIZE = 96
TOKENS = [5, 17, 93, 41, 2, 60, 60, 11, 78, 33, 9, 84]
"""Input of the reference logits."""
FILES = ("config.json", "generation_config.json")


def make_source(folder: Path, *, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Path:
    """Write a random model of two layers and a tokenizer of words; return the folder.

    Args:
        folder: place of the checkpoint.
        family: "llama", or "qwen2", whose queries, keys and values have biases.
        dtype: type of the weights.
        sizes: settings of the configuration in place of the default sizes.
    """
    config_class = {"llama": LlamaConfig, "qwen2": Qwen2Config}[family]
    settings = {
        **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False},
    }
    torch.manual_seed(len(family) + settings["hidden_size"])
    model = AutoModelForCausalLM.from_config(config_class(**settings | sizes)).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    model.to(dtype).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w1", eos_token="w2", pad_token="w0", unk_token="w3"
    ).save_pretrained(folder)
    return folder


def random_texts(count: int, length: int) -> list[str]:
    """Return texts of words of the tokenizer."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randint(4, VOCAB_SIZE, (count, length), generator=generator).tolist()
    return [" ".join(f"w{token}" for token in row) for row in rows]


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the safetensors files of a folder."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    return tensors


def logits_of(config_folder: Path, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] of transformers' model with these weights, in float32.

    Args:
        config_folder: folder with the config.json of the model; its quantization_config is not used.
        weights: all weights by their names in the checkpoint that is not quantized.
    """
    config = AutoConfig.from_pretrained(config_folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    missing, unexpected = model.load_state_dict({name: w.detach().float() for name, w in weights.items()}, strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight" or not config.tie_word_embeddings]:
        raise ValueError(f"weights of the reference: {missing} are missing, {unexpected} are not known")
    model.tie_weights()
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


def keep_case(
    out: Path,
    written: Path,
    case: str,
    *,
    packages: list[str],
    logits: torch.Tensor | None,
    theirs: torch.Tensor | None = None,
    reference: str,
    **facts: Any,
) -> None:
    """Copy what a tool wrote into `out`/`case`, and write `made_by.json` and the reference beside it.

    Without a reference only the configuration is kept.

    Args:
        out: folder of the tool.
        written: what the tool wrote.
        case: name of the case.
        packages: packages whose versions are written down.
        logits: logits of `TOKENS`; None if there is no reference.
        theirs: logits of the tool's own program, if it computes with activations of fewer bits.
        reference: what computed the logits.
        facts: further entries of `made_by.json`.
    """
    place = out / case
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for path in sorted(written.iterdir()):
        if path.name in FILES or (path.suffix in (".safetensors", ".gguf") and logits is not None):
            shutil.copyfile(path, place / path.name)
    if logits is not None:
        expected = {"tokens": torch.tensor(TOKENS), "logits": logits.float().contiguous()}
        if theirs is not None:
            expected["theirs"] = theirs
        save_file(expected, place / "expected.safetensors")
    made_by = {"versions": {name: version(name) for name in packages}, "reference": reference, **facts}
    (place / "made_by.json").write_text(json.dumps(made_by, indent=2) + "\n")
