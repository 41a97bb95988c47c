"""Supported architectures by their names in config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from phonograph.errors import UnsupportedModelError
from phonograph.models.families.encoders.bart import BART
from phonograph.models.families.encoders.bert import BERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from phonograph.models.families.encoders.modernbert import MODERNBERT, NOMIC_BERT
from phonograph.models.families.encoders.whisper import WHISPER
from phonograph.models.families.family import Family
from phonograph.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from phonograph.models.families.gemma4 import GEMMA4
from phonograph.models.families.glm_moe import GLM4_MOE
from phonograph.models.families.gpt_oss import GPT_OSS
from phonograph.models.families.hybrids.bamba import BAMBA
from phonograph.models.families.hybrids.falcon_h1 import FALCON_H1
from phonograph.models.families.hybrids.granite import GRANITE, GRANITE_MOE, GRANITE_MOE_HYBRID, GRANITE_MOE_SHARED
from phonograph.models.families.hybrids.lfm import LFM2, LFM2_MOE
from phonograph.models.families.hybrids.nemotron_h import NEMOTRON_H
from phonograph.models.families.hybrids.qwen_hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from phonograph.models.families.llama import LLAMA, MISTRAL
from phonograph.models.families.ministral import MINISTRAL3
from phonograph.models.families.mixtral import MIXTRAL
from phonograph.models.families.olmo import OLMO2, OLMO3, OLMOE
from phonograph.models.families.phi import PHI3
from phonograph.models.families.qwens.qwen import QWEN2, QWEN3
from phonograph.models.families.qwens.qwen_moe import QWEN2_MOE, QWEN3_MOE
from phonograph.models.families.smollm import SMOLLM3
from phonograph.models.weights.wrapper import WRAPPERS

ARCHITECTURES: dict[str, Family] = {
    "BambaForCausalLM": BAMBA,
    "FalconH1ForCausalLM": FALCON_H1,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma4ForCausalLM": GEMMA4,
    "GemmaForCausalLM": GEMMA,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "GptOssForCausalLM": GPT_OSS,
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeHybridForCausalLM": GRANITE_MOE_HYBRID,
    "GraniteMoeSharedForCausalLM": GRANITE_MOE_SHARED,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2_MOE,
    "LlamaForCausalLM": LLAMA,
    "Ministral3ForCausalLM": MINISTRAL3,
    "MistralForCausalLM": MISTRAL,
    "NemotronHForCausalLM": NEMOTRON_H,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "OlmoeForCausalLM": OLMOE,
    "Phi3ForCausalLM": PHI3,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "SmolLM3ForCausalLM": SMOLLM3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
}
ENCODERS: dict[str, Family] = {
    "Bert": BERT,
    "DistilBert": DISTILBERT,
    "ModernBert": MODERNBERT,
    "NomicBert": NOMIC_BERT,
    "Roberta": ROBERTA,
    "XLMRoberta": XLM_ROBERTA,
}
"""Encoders by the beginning of the names of their architectures; `Model` and the ends of `_HEADS` follow."""
PAIRS: dict[str, Family] = {"BartForConditionalGeneration": BART, "WhisperForConditionalGeneration": WHISPER}
"""Encoders of text or audio with a decoder."""
_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
_HEADLESS = re.compile("(Text)?Model$|ForSequenceClassification$|ForTokenClassification$")
"""Ends of the names of architectures that have another head, or none, than the logits of `ForCausalLM`."""
_LATENT = "multi-head latent attention"
_REFUSED = {
    "DeepseekV32": "sparse attention over latent keys",
    "Deepseek": _LATENT,
    "FalconMamba": "layers of Mamba 1",
    "Jamba": "layers of Mamba 1",
    "KimiLinear": "Kimi delta attention",
    "Mamba": "layers of Mamba",
    "MiniMax": "Lightning attention",
    "Rwkv": "layers of RWKV",
    "xLSTM": "layers of xLSTM",
    "GlmMoeDsa": "sparse attention over latent keys",
    "Mistral4": _LATENT,
    "Glm4MoeLite": _LATENT,
    "Llama4": "chunked attention",
    "Gemma3n": "AltUp and Laurel blocks",
    **dict.fromkeys(("T5", "MT5", "MPNet", "Deberta"), "relative position bias in attention"),
}
"""Features of architectures, by the beginning of their names, that are not implemented.

Transformers' modules have latent attention, with keys and values of each head.
"""


def architecture_name(raw: Mapping[str, Any]) -> str:
    """Return the architecture that config.json names."""
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "(none named in config.json)"


def module_reason(name: str, model_impl: str) -> str | None:
    """Return the reason why transformers' module runs an architecture; None if a family here does, or nothing.

    Args:
        name: architecture in config.json.
        model_impl: the setting.
    """
    if model_impl != "auto":
        return "model_impl=transformers" if model_impl == "transformers" else None
    if _family_of(name) is not None or _refused_feature(name) not in (None, _LATENT):
        return None
    # Imported for unknown names only, because it takes as long as the rest of a start.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return f"no family here is {name}" if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else None


def _family_of(name: str) -> Family | None:
    found = ARCHITECTURES.get(name) or PAIRS.get(name) or ARCHITECTURES.get(_HEADLESS.sub("ForCausalLM", name))
    return found or next(
        (ENCODERS[name.removesuffix(head)] for head in _HEADS if name.removesuffix(head) in ENCODERS), None
    )


def _refused_feature(name: str) -> str | None:
    return next((feature for start, feature in _REFUSED.items() if name.startswith(start)), None)


def find_architecture(name: str) -> Family:
    """Return the family of an architecture by its name in config.json.

    Raises:
        UnsupportedModelError: it is not implemented; the message lists the supported ones.
    """
    found = _family_of(name)
    if found is None:
        feature = _refused_feature(name)
        if feature is None and "moe" in name.lower():
            feature = "a mixture of experts of this family"
        reason = "" if feature is None else f" ({feature}, which is not implemented)"
        raise UnsupportedModelError(
            f"architecture {name!r} is not supported{reason}; supported are "
            f"{', '.join(sorted({*ARCHITECTURES, *WRAPPERS}))}; for embeddings and classes also "
            f"{', '.join(ENCODERS)}; with an encoder {', '.join(PAIRS)}"
        )
    return found


def known_fields() -> set[str]:
    """Return the fields of config.json that some family uses."""
    families = (*ARCHITECTURES.values(), *ENCODERS.values(), *PAIRS.values())
    return {name for family in families for name in (*family.fields, *family.aliases)}
