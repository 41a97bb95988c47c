"""EAGLE-3 heads: a decoder layer or few that predict from hidden states of a target what it says next.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025). Entry p
of a head has the features of token p and the embedding of token p + 1. Files are those of the authors and of SpecForge;
a field that changes the result and is not known is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phonograph.errors import UnsupportedModelError, shortened
from phonograph.files.model_files import read_json
from phonograph.models.families.llama import LLAMA
from phonograph.models.hf_config import read_settings
from phonograph.models.layers.feature_input import FeatureInput
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.spec import ModelSpec, make_spec

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_OWN = {"draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_config", "fc_bias"}
_IN_EAGLE_CONFIG = {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"}
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """A draft head, or a draft model, as plain values.

    Attributes:
        model: its layers; a head has the input `ModelSpec.features`, and its vocabulary is that of its drafts.
        taps: hidden states of the target that a head reads: state j is the stream that enters layer j. Empty for a
            model.
        notes: decisions while reading.
    """

    model: ModelSpec
    taps: tuple[int, ...]
    notes: tuple[str, ...]


def is_eagle(raw: Mapping[str, Any]) -> bool:
    """Return True if config.json is that of a head."""
    names = raw.get("architectures")
    return isinstance(names, list) and bool(names) and names[0] in ARCHITECTURES


def read_eagle(folder: Path, target: ModelSpec, *, owns_embedding: bool) -> DraftSpec:
    """Return the head in a folder.

    Args:
        folder: has config.json.
        target: the model whose states it reads.
        owns_embedding: the head's file has an embedding; otherwise it uses the target's.

    Raises:
        UnsupportedModelError: a field asks for what is not implemented, or does not fit the target.
    """
    path = folder / "config.json"
    raw = read_json(path)

    def refused(name: str, problem: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{path}: {name}={shortened(repr(raw.get(name)))} {problem}")

    own = raw.get("eagle_config") or {}
    if not isinstance(own, dict) or not _IN_EAGLE_CONFIG.issuperset(own):
        raise refused("eagle_config", f"has fields that are not known; known are {', '.join(sorted(_IN_EAGLE_CONFIG))}")
    if own.get("use_aux_hidden_state", True) is not True:
        raise refused("eagle_config", "leaves the states of several layers out, which is not supported yet")
    count = target.num_layers
    taps, notes = own.get(_LAYER_IDS, raw.get(_LAYER_IDS)), []
    if taps is None:
        taps = [2, count // 2, count - 3]
        notes.append(f"the head reads the states that enter layers {taps}, the default: its config.json names none")
    if sorted(set(taps)) != taps or not taps or not 0 <= taps[0] <= taps[-1] <= count:
        raise refused(_LAYER_IDS, f"must be ascending numbers from 0 to {count}, the number of the target's layers")
    size = raw.get("target_hidden_size", target.hidden_size)
    if size != target.hidden_size:
        raise refused("target_hidden_size", f"is not the target's hidden_size of {target.hidden_size}")
    if raw.get("vocab_size") != target.vocab_size:
        raise refused("vocab_size", f"is not the target's of {target.vocab_size}")
    settings = read_settings(
        {**{name: value for name, value in raw.items() if name not in {*_OWN, _LAYER_IDS}}, "model_type": "llama"},
        raw["architectures"][0],
        LLAMA,
    )
    drafts = raw.get("draft_vocab_size") or target.vocab_size
    model = make_spec(
        {**settings, "vocab_size": drafts, "tie_word_embeddings": False}, raw["architectures"][0], LLAMA, ()
    )
    first, *others = model.layers
    hidden = model.hidden_size
    attention = replace(first.attention, qkv=replace(first.attention.qkv, num_inputs=2 * hidden), input_norm=None)
    join = LayerMatrix("features", "", (MatrixPart("fc", hidden),), len(taps) * size, bias=bool(raw.get("fc_bias")))
    features = FeatureInput(
        vocab_size=target.vocab_size,
        owns_embedding=owns_embedding,
        join=join,
        embedding_norm="input_layernorm",
        feature_norm="hidden_norm",
        normed_stream=bool(raw.get("norm_before_residual")),
    )
    model = replace(model, layers=(replace(first, attention=attention), *others), features=features)
    return DraftSpec(model=model, taps=tuple(taps), notes=(*notes, *model.notes))
