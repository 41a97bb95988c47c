"""The architectures that the decoder implements, as the few facts in which they differ.

A model that is the same decoder with other switches is one more row here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phonograph.errors import UnsupportedModelError

WindowRule = Literal["none", "every_layer", "layer_types"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """qkv_bias, o_bias, mlp_bias: fixed by the architecture, or the name of the setting in config.json that decides
    qk_norm: an RMS norm over each query and key head before the rotary embedding
    window:  which layers `sliding_window` is for; "layer_types" lists them in the configuration
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: WindowRule = "none"


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Architecture(window="every_layer"),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, window="layer_types"),
    "Qwen3ForCausalLM": Architecture(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, window="layer_types"
    ),
}


def find_architecture(name: str) -> Architecture:
    """The row of an architecture by the name that config.json gives it.

    Raises:
        UnsupportedModelError: it is not implemented; the message lists what is.
    """
    found = ARCHITECTURES.get(name)
    if found is None:
        raise UnsupportedModelError(
            f"architecture {name!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    return found
