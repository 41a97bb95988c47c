"""Layers of encoders, and the fields of config.json that their families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phonograph.models.config_fields import COMMON, FLAG, TRAINING, Field, FieldKind
from phonograph.models.families.family import Classifier, Settings, layer_sizes
from phonograph.models.heads.pooler_spec import PoolerStage, Pooling, StageActivation
from phonograph.models.layer_spec import (
    UNLIMITED,
    Activation,
    LayerAttention,
    LayerFeedForward,
    LayerSpec,
    NormKind,
)
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.rope_parameters import RopeParameters

LAYER_NORMS_AFTER = NormKind(layer=True, bias=True, after_sum=True)
"""Norms of the stream after attention and after the feed-forward."""
_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
"""Activations by their names in config.json."""
_GATED = ("gelu", "gelu_tanh", "silu")
"""Activations that gates may have."""
_FALSE = FieldKind("false, as the model is an encoder here", lambda value: value is False or value is None)
ENCODER_FIELDS: Mapping[str, Field] = {
    **COMMON,
    "is_decoder": Field(False, _FALSE),
    "tie_word_embeddings": Field(True, FLAG),
    "num_key_value_heads": Field(None, FieldKind("null, as the model has none", lambda value: value is None)),
    "position_embedding_type": Field(
        "absolute", FieldKind("absolute, as relative positions are not supported", lambda value: value == "absolute")
    ),
}
ENCODER_IGNORED: Mapping[str, str] = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), TRAINING)


class EncoderNames(NamedTuple):
    """Names of a layer's projections in a checkpoint.

    Attributes:
        qkv: queries, keys and values, or one name of all.
        output: output of attention.
        inner: first projection of the feed-forward; gate and up, or one name of both, if it is gated.
        down: last projection of the feed-forward.
    """

    qkv: tuple[str, ...]
    output: str
    inner: tuple[str, ...]
    down: str


def encoder_layer(
    settings: Settings,
    names: EncoderNames,
    *,
    attention_norms: tuple[str | None, str | None],
    feed_forward_norms: tuple[str | None, str | None],
    biases: tuple[bool, bool] = (True, True),
    gated: bool = False,
    window: tuple[int, int] = UNLIMITED,
) -> LayerSpec:
    """Return a layer without rope.

    Args:
        settings: fields of the model.
        names: of its projections.
        attention_norms: norms before and after attention, or None; those after it are of `NormKind.after_sum`.
        feed_forward_norms: likewise.
        biases: projections of attention, and of the feed-forward, have biases.
        gated: the feed-forward has gates.
        window: see `LayerAttention`.

    Raises:
        ModelError: the numbers do not go together.
        UnsupportedModelError: the activation is not known.
    """
    known = tuple(name for name, one in _ACTIVATIONS.items() if not gated or one in _GATED)
    hidden_size, inner_size, num_heads, num_kv_heads, head_size = layer_sizes(settings, known)
    size, activation = num_heads * head_size, _ACTIVATIONS[settings["hidden_act"]]
    return LayerSpec(
        LayerAttention(
            num_query_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            qkv=_matrix("qkv", names.qkv, 3 * size, hidden_size, biases[0]),
            output=_matrix("output", (names.output,), hidden_size, size, biases[0]),
            window=window,
            scale=head_size**-0.5,
            softcap=0.0,
            sinks=False,
            rope=None,
            head_norms=False,
            joint_norms=False,
            value_norms=False,
            keys_are_values=False,
            kv_layer=None,
            input_norm=attention_norms[0],
            output_norm=attention_norms[1],
        ),
        LayerFeedForward(
            # Products have no GELU by erf, which another kernel applies.
            gate_up=_matrix(
                "gate and up", names.inner, 2 * inner_size, hidden_size, biases[1], gated=activation == "silu"
            )
            if gated
            else _matrix("up", names.inner, inner_size, hidden_size, biases[1]),
            down=_matrix("down", (names.down,), hidden_size, inner_size, biases[1]),
            activation=activation,
            input_norm=feed_forward_norms[0],
            output_norm=feed_forward_norms[1],
        ),
    )


def _matrix(
    name: str, projections: tuple[str, ...], num_outputs: int, num_inputs: int, bias: bool, *, gated: bool = False
) -> LayerMatrix:
    """Return a matrix of equal projections."""
    module = projections[0].rpartition(".")[0]
    parts = tuple(MatrixPart(one.rpartition(".")[2], num_outputs // len(projections)) for one in projections)
    return LayerMatrix(name, module, parts, num_inputs, bias=bias, gated=gated, quantizable=False)


def no_ropes(settings: Settings) -> Sequence[RopeParameters | None]:
    """Return no rope for each layer."""
    return (None,) * settings["num_hidden_layers"]


def dense_classifier(activation: StageActivation, dense: str, classes: str, of_tokens: str | None = None) -> Classifier:
    """Return the head of classifiers that begins with the first token: a dense layer, then the classes.

    Args:
        activation: of the dense layer.
        dense: name of its module.
        classes: name of the module of the classes.
        of_tokens: that of classifiers of tokens, which have no dense layer; None for the same.
    """

    def classifier(settings: Settings, name: str, num_labels: int) -> tuple[Pooling, tuple[PoolerStage, ...]]:
        size = settings["hidden_size"]
        if name.endswith("ForTokenClassification"):
            return "all", (PoolerStage(of_tokens or classes, size, num_labels),)
        first = PoolerStage(dense, size, size, activation=activation)
        return "first", (first, PoolerStage(classes, size, num_labels))

    return classifier
