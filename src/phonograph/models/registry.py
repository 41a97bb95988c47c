"""Supported architectures by their names in config.json."""

from __future__ import annotations

from phonograph.errors import UnsupportedModelError
from phonograph.models.families.family import Family
from phonograph.models.families.llama import LLAMA, MISTRAL
from phonograph.models.families.mixtral import MIXTRAL
from phonograph.models.families.qwen import QWEN2, QWEN3
from phonograph.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
}


def find_architecture(name: str) -> Family:
    """Return the family of an architecture by its name in config.json.

    Raises:
        UnsupportedModelError: it is not implemented; the message lists the supported ones.
    """
    found = ARCHITECTURES.get(name)
    if found is None:
        reason = " (a mixture of experts of this family is not implemented)" if "moe" in name.lower() else ""
        raise UnsupportedModelError(
            f"architecture {name!r} is not supported{reason}; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    return found


def known_fields() -> set[str]:
    """Return the fields of config.json that some family uses."""
    return {name for family in ARCHITECTURES.values() for name in family.fields}
