"""The architectures that the decoder implements, as the few facts in which they differ.

A model that is the same decoder with other switches is one more row here.
"""

from __future__ import annotations

from dataclasses import dataclass

from phonograph.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """model_type: of config.json, which says how its fields are read
    qkv_bias, o_bias, mlp_bias: fixed by the architecture, or the name of the setting in config.json that decides
    qk_norm: an RMS norm over each query and key head before the rotary embedding
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
    """The row of an architecture by the name that config.json gives it.

    Raises:
        UnsupportedModelError: it is not implemented; the message lists what is.
    """
    found = ARCHITECTURES.get(name)
    if found is None:
        experts = "moe" in name.lower() or "mixtral" in name.lower()
        reason = " (a mixture of experts, which is not implemented)" if experts else ""
        raise UnsupportedModelError(
            f"architecture {name!r} is not supported{reason}; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    return found
