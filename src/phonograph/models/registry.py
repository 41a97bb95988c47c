"""Supported architectures by their names in config.json."""

from __future__ import annotations

from phonograph.errors import UnsupportedModelError
from phonograph.models.families.family import Family
from phonograph.models.families.llama import LLAMA, MISTRAL
from phonograph.models.families.qwen import QWEN2, QWEN3

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
}


def find_architecture(name: str) -> Family:
    """Return the family of an architecture by its name in config.json.

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


def known_fields() -> set[str]:
    """Return the fields of config.json that some family uses."""
    return {name for family in ARCHITECTURES.values() for name in family.fields}
