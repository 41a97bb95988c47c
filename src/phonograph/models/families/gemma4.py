"""Gemma 4: full layers have heads of their own, of which a part rotates, and their values may be their keys.

Norms have weights w in float32, and one without weights is over values. The stream is multiplied by a number after each
layer. In the small models the last layers read the keys and values of earlier ones, and each layer has an embedding of
the token. In another, experts run beside the dense feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.kernels.routing import Routing
from phonograph.models.config_fields import (
    ANY,
    COMMON,
    FLAG,
    FULL,
    INT,
    OBJECT,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    SLIDING,
    TEXT,
    TEXTS,
    Field,
    FieldKind,
)
from phonograph.models.families.family import GELU_TANH, Family, Settings, full_every, layer_sizes, windows
from phonograph.models.layer_spec import Factors, LayerFeedForward, LayerSpec, NormKind, decoder_layer
from phonograph.models.layers.expert_spec import LayerExperts
from phonograph.models.layers.layer_embedding import LayerEmbeddings
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.rope_parameters import RopeParameters, read_ropes_by_type
from phonograph.models.weights.expert_tensors import ExpertTensors

_EXPERT_FIELDS = ("num_experts", "top_k_experts", "moe_intermediate_size")
"""Fields that a model with experts has."""


class _Heads(NamedTuple):
    """Heads of a layer, with the names of their fields in messages."""

    head_size: int
    num_kv_heads: int
    size_field: str = "head_dim"
    count_field: str = "num_key_value_heads"


def _layers(settings: Settings) -> tuple[LayerSpec, ...]:
    bias, types = settings["attention_bias"], settings["layer_types"]
    if types[-1] != FULL:
        raise UnsupportedModelError(
            f"layer_types={shortened(repr(types))} ends with {types[-1]}, which other readers of this family replace; "
            f"{FULL} works"
        )
    sizes = layer_sizes(settings, GELU_TANH, "hidden_activation")
    wide = 2 * sizes.intermediate_size if settings["use_double_wide_mlp"] else sizes.intermediate_size
    made: dict[object, LayerSpec] = {}
    layers: list[LayerSpec] = []
    of_layers = zip(types, windows(settings), _heads(settings), _sources(settings), strict=True)
    for kind, window, heads, source in of_layers:
        key = kind, heads, source
        if key not in made:
            made[key] = decoder_layer(
                sizes._replace(
                    intermediate_size=sizes.intermediate_size if source is None else wide,
                    num_kv_heads=heads.num_kv_heads,
                    head_size=heads.head_size,
                ),
                qkv_bias=bias,
                o_bias=bias,
                head_norms=True,
                value_norms=source is None,
                keys_are_values=settings["attention_k_eq_v"] and kind == FULL and source is None,
                kv_layer=source,
                window=window,
                scale=1.0,
                activation="gelu_tanh",
                attention_norms=("input_layernorm", "post_attention_layernorm"),
                feed_forward_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
                embedding_size=settings["hidden_size_per_layer_input"],
                scalar="layer_scalar",
            )
            if settings["enable_moe_block"]:
                made[key] = _with_experts(made[key], settings)
        layers.append(made[key])
    return tuple(layers)


def _with_experts(layer: LayerSpec, settings: Settings) -> LayerSpec:
    """Return the layer with experts, whose sum is added to its feed-forward's before the last norm.

    Raises:
        ModelError: a number is missing, or a token has more experts than there are.
    """
    for field in _EXPERT_FIELDS:
        if settings[field] is None:
            raise ModelError(f"{field}=None must be a positive integer, as enable_moe_block=True")
    num_experts, top_k, size = (settings[field] for field in _EXPERT_FIELDS)
    if top_k > num_experts:
        raise ModelError(f"top_k_experts={top_k} must be at most num_experts={num_experts}")
    dense = layer.feed_forward
    assert isinstance(dense, LayerFeedForward)
    hidden_size = dense.gate_up.num_inputs

    def experts(name: str, part: str, outputs: int, inputs: int, *, gated: bool = False) -> LayerMatrix:
        parts = (MatrixPart(part, outputs),)
        fused = ExpertTensors(num_experts, bare=True)
        return LayerMatrix(
            name, "experts", parts, inputs, gated=gated, num_experts=num_experts, fused=fused, quantizable=False
        )

    return replace(
        layer,
        feed_forward=LayerExperts(
            routing=Routing(num_experts, top_k, logit_factor=hidden_size**-0.5),
            router=LayerMatrix("router", "router", (MatrixPart("proj", num_experts),), hidden_size, quantizable=False),
            choice_bias=None,
            gate_up=experts("experts' gate and up", "gate_up_proj", 2 * size, hidden_size, gated=True),
            down=experts("experts' down", "down_proj", hidden_size, size),
            shared=replace(dense, output_norm="post_feedforward_layernorm_1"),
            input_norm="pre_feedforward_layernorm_2",
            output_norm=dense.output_norm,
            activation="gelu_tanh",
            router_norm="router.scale",
            expert_scale="router.per_expert_scale",
            sum_norm="post_feedforward_layernorm_2",
        ),
    )


def _sources(settings: Settings) -> list[int | None]:
    """Return for each layer the one whose keys and values it reads: the last of its type before those that share.

    Raises:
        ModelError: no layer is left that has keys.
        UnsupportedModelError: a type has no layer before those that share.
    """
    types, shared = cast("list[str]", settings["layer_types"]), settings["num_kv_shared_layers"]
    first = len(types) - shared
    if first <= 0:
        raise ModelError(f"num_kv_shared_layers={shared} must be below num_hidden_layers={len(types)}")
    last = {kind: index for index, kind in enumerate(types[:first])}
    for index, kind in enumerate(types[first:], first):
        if kind not in last:
            raise UnsupportedModelError(
                f"num_kv_shared_layers={shared}: layer {index} has {kind}, and none of the {first} layers before those "
                "that share keys and values has it"
            )
    return [None if index < first else last[kind] for index, kind in enumerate(types)]


def _unused_tensors(settings: Settings) -> tuple[str, ...]:
    """Return beginnings of tensors that published files have for layers that read another's keys and values."""
    shared = [index for index, source in enumerate(_sources(settings)) if source is not None]
    return tuple(
        f"model.layers.{index}.self_attn.{name}."
        for index in shared
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )


def _layer_embeddings(settings: Settings) -> LayerEmbeddings | None:
    size, vocab_size = settings["hidden_size_per_layer_input"], settings["vocab_size_per_layer_input"]
    if not size:
        return None
    if vocab_size < settings["vocab_size"]:
        raise ModelError(
            f"vocab_size_per_layer_input={vocab_size} must be at least vocab_size={settings['vocab_size']}, as each "
            "token has an embedding in each layer"
        )
    return LayerEmbeddings(vocab_size, size)


def _heads(settings: Settings) -> list[_Heads]:
    """Return the heads of each layer, from per_layer_config if the file has it, else from the fields of full layers.

    Raises:
        ModelError: the numbers do not go together.
        UnsupportedModelError: layers of one type differ, or other fields are set by layer.
    """
    num_query_heads, types = settings["num_attention_heads"], cast("list[str]", settings["layer_types"])
    own = _Heads(settings["head_dim"], settings["num_key_value_heads"])
    by_layer = settings["per_layer_config"]
    if by_layer is None:
        full = _Heads(settings["global_head_dim"], own.num_kv_heads, "global_head_dim")
        if settings["attention_k_eq_v"] and settings["num_global_key_value_heads"] is not None:
            count = settings["num_global_key_value_heads"]
            full = full._replace(num_kv_heads=count, count_field="num_global_key_value_heads")
        found = [full if kind == FULL else own for kind in types]
    else:
        found = _overridden(own, by_layer, len(types))
    for kind in (FULL, SLIDING):
        kinds = {heads[:2]: index for index, heads in enumerate(found) if types[index] == kind}
        if len(kinds) > 1:
            raise UnsupportedModelError(
                f"per_layer_config={shortened(repr(by_layer))} gives layers with {kind} several sizes of heads, in "
                f"layers {' and '.join(map(str, sorted(kinds.values())[:2]))}; equal ones work"
            )
    for heads in found:
        if heads.head_size % 2:
            raise ModelError(f"{heads.size_field}={heads.head_size} must be even, for the rotary embedding")
        if num_query_heads % heads.num_kv_heads:
            raise ModelError(
                f"num_attention_heads={num_query_heads} must be a multiple of {heads.count_field}={heads.num_kv_heads}"
            )
    return found


def _overridden(own: _Heads, by_layer: Mapping[str, Any], num_layers: int) -> list[_Heads]:
    """Return the heads of each layer by per_layer_config, whose keys are numbers of layers."""
    found = [own] * num_layers
    for key, values in by_layer.items():
        where = f"per_layer_config[{key!r}]"
        if not (key.isdecimal() and int(key) < num_layers):
            raise ModelError(f"{where} names no layer; numbers from 0 to {num_layers - 1} work")
        if not isinstance(values, dict):
            raise ModelError(f"{where}={shortened(repr(values))} must be an object")
        fields = cast("dict[str, Any]", values)
        for name, value in fields.items():
            if name not in (own.size_field, own.count_field):
                raise UnsupportedModelError(
                    f"{name}={shortened(repr(value))} in {where} is not supported; supported are {own.size_field} and "
                    f"{own.count_field}"
                )
            if not POSITIVE_INT.accepts(value):
                raise ModelError(f"{name}={shortened(repr(value))} in {where} must be {POSITIVE_INT.works}")
        found[int(key)] = _Heads(
            fields.get(own.size_field, own.head_size),
            fields.get(own.count_field, own.num_kv_heads),
            f"{where}.{own.size_field}",
            f"{where}.{own.count_field}",
        )
    return found


_DEFAULT_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}


def _ropes(settings: Settings) -> Sequence[RopeParameters]:
    types = settings["layer_types"]
    given = cast("dict[str, Any]", settings["rope_parameters"] or _DEFAULT_ROPES)
    for kind in dict.fromkeys(types):
        rope = given.get(kind)
        if not isinstance(rope, dict) or "rope_theta" not in rope:
            raise ModelError(
                f"rope_parameters={shortened(repr(given))} has no {kind} with a rope_theta, which layers of this type "
                "need"
            )
    thetas = {kind: cast("float", values["rope_theta"]) for kind, values in _DEFAULT_ROPES.items()}
    found = read_ropes_by_type({**settings, "rope_parameters": given}, thetas, ("default", "proportional"))
    return [found[kind] for kind in types]


def _default_types(settings: Settings) -> list[str]:
    """Return types of which each sixth has full attention, and the last."""
    return [*full_every(settings, 6)[:-1], FULL]


_TEXT_IS_CAUSAL = FieldKind("null or 'vision', with which text is causal", lambda value: value in (None, "vision"))
_NULL_SCALING = FieldKind("null; rope_parameters has the ropes of this family", lambda value: value is None)
_COUNT = FieldKind("an integer of 0 or more", lambda value: type(value) is int and value >= 0)

GEMMA4 = Family(
    model_type="gemma4_text",
    fields={
        **{name: field for name, field in COMMON.items() if name != "hidden_act"},
        "vocab_size": Field(262144, POSITIVE_INT),
        "hidden_size": Field(2304, POSITIVE_INT),
        "intermediate_size": Field(9216, POSITIVE_INT),
        "num_hidden_layers": Field(30, COMMON["num_hidden_layers"].kind),
        "num_attention_heads": Field(8, POSITIVE_INT),
        "num_key_value_heads": Field(4, POSITIVE_INT),
        "head_dim": Field(256, POSITIVE_INT),
        "global_head_dim": Field(512, POSITIVE_INT),
        "num_global_key_value_heads": Field(None, POSITIVE_INT.or_null()),
        "per_layer_config": Field(None, OBJECT.or_null()),
        "attention_k_eq_v": Field(False, FLAG),
        "attention_bias": Field(False, FLAG),
        "hidden_activation": Field("gelu_pytorch_tanh", TEXT),
        "max_position_embeddings": Field(131072, POSITIVE_INT),
        "tie_word_embeddings": Field(True, FLAG),
        "bos_token_id": Field(2, INT.or_null()),
        "eos_token_id": Field(1, ANY),
        "pad_token_id": Field(0, INT.or_null()),
        "rope_scaling": Field(None, _NULL_SCALING),
        "sliding_window": Field(512, POSITIVE_INT),
        "layer_types": Field(None, TEXTS.or_null()),
        "final_logit_softcapping": Field(None, POSITIVE_NUMBER.or_null()),
        "use_bidirectional_attention": Field(None, _TEXT_IS_CAUSAL),
        "num_kv_shared_layers": Field(0, _COUNT),
        "use_double_wide_mlp": Field(False, FLAG),
        "hidden_size_per_layer_input": Field(256, _COUNT),
        "vocab_size_per_layer_input": Field(262144, _COUNT),
        "enable_moe_block": Field(False, FLAG),
        **{name: Field(None, POSITIVE_INT.or_null()) for name in _EXPERT_FIELDS},
    },
    ignored={
        "hidden_act": "hidden_activation says it",
    },
    layers=_layers,
    ropes=_ropes,
    layer_types=_default_types,
    norms=NormKind(wide=True),
    factors=lambda settings: Factors(
        embedding=settings["hidden_size"] ** 0.5,
        softcap=settings["final_logit_softcapping"] or 0.0,
        rounds_embedding=True,
    ),
    layer_embeddings=_layer_embeddings,
    skipped=_unused_tensors,
)
