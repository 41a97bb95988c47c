"""Protocol of a family of models: the fields of its config.json, and its layers as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phonograph.errors import ModelError, UnsupportedModelError
from phonograph.kernels.routing import Routing
from phonograph.models.config_fields import FULL, SLIDING, TRAINING, Field
from phonograph.models.heads.encoder_specs import AudioEncoder, TextEncoder
from phonograph.models.heads.pooler_spec import InputEmbedding, PoolerStage, Pooling
from phonograph.models.layer_spec import NO_FACTORS, PLAIN_NORMS, UNLIMITED, Factors, LayerSizes, LayerSpec, NormKind
from phonograph.models.layers.layer_embedding import LayerEmbeddings
from phonograph.models.rope_parameters import RopeParameters, read_rope

_MOST_HEAD_SIZE = 1 << 16
"""Largest head size; larger numbers are of damaged files, and a rotary embedding has a frequency for each pair."""

SILU, GELU_TANH = ("silu", "swish"), ("gelu_pytorch_tanh",)
"""Names of activations in config.json."""

EXPERT_LOSS = {"router_aux_loss_coef": TRAINING, "router_jitter_noise": TRAINING}
"""Fields of experts without effect."""

Settings = Mapping[str, Any]
"""Fields of config.json with their defaults."""
TensorFactors = tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
"""Names of tensors in a layer, each with numbers of its rows, from the first, and the factor of these."""


def _windows_above(settings: Settings) -> list[str]:
    """Return types with the window on every layer, or, as in Qwen, from max_window_layers on."""
    window, num_layers = settings["sliding_window"], settings["num_hidden_layers"]
    first = num_layers if window is None else settings.get("max_window_layers", 0)
    return [SLIDING if layer >= first else FULL for layer in range(num_layers)]


def full_every(settings: Settings, count: int) -> list[str]:
    """Return types of which the last of each `count` layers has full attention, and the others a window."""
    return [SLIDING if (layer + 1) % count else FULL for layer in range(settings["num_hidden_layers"])]


def _one_rope(settings: Settings) -> Sequence[RopeParameters | None]:
    """Return the same rope for each layer."""
    return (read_rope(settings),) * settings["num_hidden_layers"]


Classifier = Callable[[Settings, str, int], tuple[Pooling, tuple[PoolerStage, ...]]]


def _score(settings: Settings, name: str, num_labels: int) -> tuple[Pooling, tuple[PoolerStage, ...]]:
    """Return the head of a decoder: scores of the last token, or of all."""
    bias = name.endswith("ForTokenClassification")
    return "last", (PoolerStage("score", settings["hidden_size"], num_labels, bias=bias),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models: everything that a new one says.

    Attributes:
        model_type: model type in config.json.
        fields: fields of config.json that define a model, with their defaults.
        ignored: fields without effect on this family, each with the reason.
        layers: function that returns the layers of a configuration, without weight formats and ropes.
        ropes: function that returns the rope of each layer, None for none; equal ones are one object.
        layer_types: function that returns the kind of each layer if the file names none; for families with windows.
        norms: arithmetic of the norms.
        factors: function that returns the factors of a configuration.
        layer_embeddings: function that returns the embeddings of a token in all layers, or None.
        skipped: function that returns the beginnings of names of tensors that are not of the model.
        encodes: the family looks ahead and has no logits.
        final_norm: the stream is normed after the last layer.
        input: function that returns the embeddings beside those of tokens, or None.
        encoder: function that returns the encoder of audio or text, or None.
        classifier: function of the settings, the architecture and the number of classes that returns a classifier's
            pooling and stages.
        aliases: fields of config.json by names that this family has for those of others.
        renames: patterns of names of tensors, each with what replaces it.
        tensor_factors: function that returns factors that weights are multiplied by when they are loaded: the name of
            a tensor in its layer, and each number of rows with its factor.
        unused: beginnings of names of tensors that embeddings do not use, such as those of another head.
    """

    model_type: str
    fields: Mapping[str, Field]
    ignored: Mapping[str, str] = field(default_factory=dict[str, str])
    layers: Callable[[Settings], tuple[LayerSpec, ...]]
    ropes: Callable[[Settings], Sequence[RopeParameters | None]] = _one_rope
    layer_types: Callable[[Settings], list[str]] = _windows_above
    norms: NormKind = PLAIN_NORMS
    factors: Callable[[Settings], Factors] = lambda _: NO_FACTORS
    layer_embeddings: Callable[[Settings], LayerEmbeddings | None] = lambda _: None
    skipped: Callable[[Settings], tuple[str, ...]] = lambda _: ()
    encodes: bool = False
    final_norm: bool = True
    input: Callable[[Settings], InputEmbedding | None] = lambda _: None
    encoder: Callable[[Settings], AudioEncoder | TextEncoder | None] = lambda _: None
    classifier: Classifier = _score
    unused: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    renames: tuple[tuple[str, str], ...] = ()
    tensor_factors: Callable[[Settings], TensorFactors] = lambda _: ()

    def is_causal(self, settings: Settings) -> bool:
        """Return True if a token attends to no later one."""
        looks_ahead = self.encodes or settings.get("use_bidirectional_attention") is True
        return not looks_ahead and settings.get("is_causal", True) is True


def layer_sizes(settings: Settings, activations: tuple[str, ...] = SILU, field: str = "hidden_act") -> LayerSizes:
    """Return the sizes of a layer.

    Args:
        settings: of the model.
        activations: activations of the family, by their names in the file.
        field: field with the activation.

    Raises:
        ModelError: the numbers do not go together.
        UnsupportedModelError: the activation is another one.
    """
    if settings[field] not in activations:
        raise UnsupportedModelError(f"{field}={settings[field]!r} is not supported; supported is {activations[0]}")
    num_query_heads, num_kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    head_size = settings["head_dim"] or settings["hidden_size"] // num_query_heads
    if num_query_heads % num_kv_heads:
        raise ModelError(
            f"num_attention_heads={num_query_heads} must be a multiple of num_key_value_heads={num_kv_heads}"
        )
    if not 0 < head_size <= _MOST_HEAD_SIZE or head_size % 2:
        raise ModelError(
            f"head_dim={head_size} must be positive and even, for the rotary embedding, and at most {_MOST_HEAD_SIZE}"
        )
    return LayerSizes(settings["hidden_size"], settings["intermediate_size"], num_query_heads, num_kv_heads, head_size)


def windows(settings: Settings) -> list[tuple[int, int]]:
    """Return the window of each layer."""
    types = settings.get("layer_types", [FULL] * settings["num_hidden_layers"])
    return [UNLIMITED if kind == FULL else (settings["sliding_window"] - 1, 0) for kind in types]


def softmax_routing(settings: Settings, field: str, alias: str | None = None, *, renormalised: bool) -> Routing:
    """Return a softmax over all experts, whose number `field` has, or `alias` if the file has that.

    Raises:
        ModelError: a token has more experts than there are.
    """
    name = field if alias is None or settings[alias] is None else alias
    num_experts, top_k = settings[name], settings["num_experts_per_tok"]
    if top_k > num_experts:
        raise ModelError(f"num_experts_per_tok={top_k} must be at most {name}={num_experts}")
    return Routing(num_experts, top_k, renormalised=renormalised)
