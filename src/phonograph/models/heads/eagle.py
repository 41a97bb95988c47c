"""EAGLE heads: a decoder layer or few that predict from hidden states of a target what it says next.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024) and "EAGLE-3: Scaling up
Inference Acceleration of Large Language Models via Training-Time Test" (2025). Entry p of a head has the features of
token p and the embedding of token p + 1.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from phonograph.errors import ModelError, UnsupportedModelError
from phonograph.files.model_files import read_json
from phonograph.models.heads.eagle_config import LAYER_IDS, HeadConfig, read_head_config, refuse
from phonograph.models.heads.feature_input import FeatureInput
from phonograph.models.layer_spec import NO_FACTORS, PLAIN_NORMS
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.spec import ModelSpec, make_spec


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


def read_eagle(folder: Path, target: ModelSpec, *, method: str, tensors: Collection[str] | None) -> DraftSpec:
    """Return the head in a folder.

    Args:
        folder: has config.json.
        target: the model whose states it reads.
        method: "eagle3", or "eagle" for EAGLE-1.
        tensors: names in the head's files, without `model.`; None if it has random weights. An embedding and a matrix
            of logits that are not there are the target's.

    Raises:
        UnsupportedModelError: a field asks for what is not implemented, or does not fit the target.
        ModelError: a value has the wrong type.
    """
    path = folder / "config.json"
    try:
        head = read_head_config(read_json(path), method)
        if head.settings["vocab_size"] != target.vocab_size:
            refuse(head.settings, "vocab_size", f"is not the target's of {target.vocab_size}")
        read = _read_first if method == "eagle" else _read_third
        return read(head, target, tensors)
    except ModelError as error:
        raise type(error)(f"{path}: {error}") from error


def _has(tensors: Collection[str], module: str) -> bool:
    return any(name.startswith(f"{module}.") for name in tensors)


def _model(
    head: HeadConfig, target: ModelSpec, vocab_size: int, features: FeatureInput, *, ties: bool = False
) -> ModelSpec:
    """Return the layers of a head; the first one reads what `features` says. `ties` makes logits of the embedding."""
    settings = {**head.settings, "vocab_size": vocab_size, "tie_word_embeddings": ties}
    model = make_spec(settings, head.architecture, head.family, ())
    first, *others = model.layers
    width = model.hidden_size if features.joins_embedding else 2 * model.hidden_size
    attention = replace(first.attention, qkv=replace(first.attention.qkv, num_inputs=width), input_norm=None)
    layers = (replace(first, mixer=attention), *others)
    return replace(model, layers=layers, features=features, head=model.head if features.owns_head else target.head)


def _join(head: HeadConfig, num_inputs: int, *, bias: bool) -> LayerMatrix:
    return LayerMatrix("features", "", (MatrixPart("fc", head.settings["hidden_size"]),), num_inputs, bias=bias)


def _read_third(head: HeadConfig, target: ModelSpec, tensors: Collection[str] | None) -> DraftSpec:
    own, size = head.own, head.own.get("target_hidden_size", target.hidden_size)
    if size != target.hidden_size:
        refuse(own, "target_hidden_size", f"is not the target's hidden_size of {target.hidden_size}")
    drafts = own.get("draft_vocab_size", target.vocab_size)
    owns_embedding = tensors is not None and _has(tensors, "embed_tokens")
    owns_head = tensors is None or _has(tensors, "lm_head") or drafts != target.vocab_size
    if head.settings["hidden_size"] != target.hidden_size and not (owns_embedding and owns_head):
        problem = "is not the target's, whose embedding or head it uses: its files have none"
        refuse(head.settings, "hidden_size", problem)
    ties = head.settings["tie_word_embeddings"] and not owns_head
    if ties and not owns_embedding:
        if not target.tie_word_embeddings:
            refuse(head.settings, "tie_word_embeddings", "makes logits of an embedding, and its files have none")
        ties = False  # The target's matrix of logits is the target's embedding.
    features = FeatureInput(
        vocab_size=target.vocab_size,
        owns_embedding=owns_embedding,
        owns_head=owns_head or ties,
        state_size=size,
        join=None,
        normed_stream=own.get("norm_before_residual", False),
        normed_output=own.get("norm_output", False),
    )
    if own.get("use_aux_hidden_state", True):
        taps, notes = _taps(head, target)
        width, state_norms = len(taps) * size, tuple[tuple[str, int], ...]()
        if own.get("norm_before_fc"):
            state_norms = (("input_norm", width),)
        elif own.get("fc_norm"):
            state_norms = tuple((f"fc_norm.{index}", size) for index in range(len(taps)))
        bias = bool(own.get("fc_bias")) or (tensors is not None and "fc.bias" in tensors)
        join = _join(head, width, bias=bias)
        features = features._replace(state_size=width, join=join, state_norms=state_norms)
    else:
        for name in ("norm_before_fc", "fc_norm", "fc_bias"):
            if own.get(name):
                refuse(own, name, "and use_aux_hidden_state=False contradict each other: there is no fc")
        _check_last_state(head, target)
        taps, notes, features = [target.num_layers], [], features._replace(of_last_state=True)
    model = _model(head, target, drafts, features, ties=ties)
    return DraftSpec(model=model, taps=tuple(taps), notes=(*notes, *model.notes))


def _taps(head: HeadConfig, target: ModelSpec) -> tuple[list[int], list[str]]:
    """Return the states that a head reads, and notes."""
    taps, count = head.own.get(LAYER_IDS), target.num_layers
    notes: list[str] = []
    if taps is None:
        taps = [2, count // 2, count - 3]
        notes.append(f"the head reads the states that enter layers {taps}, the default: its config.json names none")
    # Tools capture states in the order of layers, whatever the order of the list. SpecForge and Model Optimizer number
    # layers by their outputs.
    taps = sorted(taps)
    if head.names_outputs and taps == [1, count // 2 - 1, count - 4]:
        taps = [tap + 1 for tap in taps]
        notes.append(f"{LAYER_IDS} are outputs of layers: the head reads the states that enter layers {taps}")
    if len(set(taps)) != len(taps) or not taps or not 0 <= taps[0] <= taps[-1] <= count:
        refuse({LAYER_IDS: taps}, LAYER_IDS, f"must be different numbers from 0 to {count}, the target's layers")
    return taps, notes


def _check_last_state(head: HeadConfig, target: ModelSpec) -> None:
    """Refuse what keeps a head from reading the target's last state behind its final norm."""
    for name, value in (("hidden_size", target.hidden_size), ("rms_norm_eps", target.rms_norm_eps)):
        if head.settings[name] != value:
            refuse(head.settings, name, f"is not the target's of {value}")
    if target.norms != PLAIN_NORMS or target.factors != NO_FACTORS:
        problem = "a head that reads its last state does not work yet: its norms or logits have factors"
        raise UnsupportedModelError(f"{target.architecture}: {problem}")


def _read_first(head: HeadConfig, target: ModelSpec, tensors: Collection[str] | None) -> DraftSpec:
    _check_last_state(head, target)
    names = tensors or ()
    features = FeatureInput(
        vocab_size=target.vocab_size,
        owns_embedding=_has(names, "embed_tokens"),
        owns_head=_has(names, "lm_head"),
        state_size=target.hidden_size,
        join=_join(head, 2 * target.hidden_size, bias="fc.bias" in names),
        joins_embedding=True,
        of_last_state=True,
    )
    model = _model(head, target, target.vocab_size, features)
    return DraftSpec(model=model, taps=(target.num_layers,), notes=model.notes)
