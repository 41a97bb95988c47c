"""Supported architectures, described by the features in which they differ."""

from __future__ import annotations

from dataclasses import dataclass

from phonograph.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Features of an architecture. A bias is a constant, or the name of the setting in config.json that enables it.

    Attributes:
        model_type: model type in config.json, which determines how its fields are read.
        qkv_bias: biases of the query, key and value projections.
        o_bias: bias of the output projection.
        mlp_bias: biases of the MLP.
        qk_norm: RMS norm of each query and key head before the rotary embedding.
    """

    model_type: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(
        model_type="llama", qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "MistralForCausalLM": Architecture(model_type="mistral"),
    "Qwen2ForCausalLM": Architecture(model_type="qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(
        model_type="qwen3", qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True
    ),
}


def find_architecture(name: str) -> Architecture:
    """Return an architecture by its name in config.json.

    Raises:
        UnsupportedModelError: it is not implemented; the message lists the supported ones.
    """
    found = ARCHITECTURES.get(name)
    if found is None:
        experts = "moe" in name.lower() or "mixtral" in name.lower()
        reason = " (a mixture of experts, which is not implemented)" if experts else ""
        raise UnsupportedModelError(
            f"architecture {name!r} is not supported{reason}; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    return found
