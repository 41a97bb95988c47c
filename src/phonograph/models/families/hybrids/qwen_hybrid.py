"""Qwen3-Next, Qwen3.5 and Qwen3.6, dense and with experts: most layers are gated delta nets, the others attention.

Norms have weights 1 + w, except the norm inside a gated delta net. Attention has gates on its output, and rotates a
part of each head. The text of a prompt has one position for all sections of the rotary embedding (M-RoPE), so that its
sections have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from phonograph.errors import ModelError
from phonograph.kernels.torch.state.gated_delta import DeltaSizes
from phonograph.models.config_fields import (
    COMMON,
    FLAG,
    FULL,
    INTS,
    POSITIVE_INT,
    TAPS,
    TEXTS,
    UNREAD,
    Field,
    FieldKind,
)
from phonograph.models.families.family import EXPERT_LOSS, Family, Settings, layer_sizes, softmax_routing
from phonograph.models.families.hybrids.layer_kinds import check_kinds
from phonograph.models.families.qwens.qwen_moe import has_experts
from phonograph.models.layer_spec import LayerFeedForward, LayerSpec, NormKind, decoder_layer
from phonograph.models.layers.expert_spec import with_experts
from phonograph.models.layers.states.gated_delta_net import gated_delta_net
from phonograph.models.rope_parameters import PARTIAL, RopeParameters, read_rope

_LINEAR = "linear_attention"
"""Layers with a gated delta net, in layer_types."""
TILED = "linear_value_heads_tiled"
"""Field that stands for the order of heads in GGUF files, and is in no config.json; see `DeltaSizes.tiled`."""
_MULTI = "mrope_section", "mrope_interleaved"
"""Keys of rope_parameters for positions of images."""
_MAMBA_DTYPE = FieldKind("'float32', the type of states", lambda value: value == "float32")
_GATED = FieldKind("true, as attention of this family has gates", lambda value: value is True)
_SWISH = FieldKind("'swish', the gate of this family", lambda value: value == "swish")


def _types(settings: Settings) -> list[str]:
    """Return the kind of each layer.

    Raises:
        UnsupportedModelError: there are other kinds, or no attention.
    """
    count, types = settings["num_hidden_layers"], cast("list[str] | None", settings["layer_types"])
    if types is None:
        every = settings["full_attention_interval"] or 4
        types = [_LINEAR if (layer + 1) % every else FULL for layer in range(count)]
    check_kinds(types, _LINEAR, count)
    return types


def _ropes(settings: Settings) -> Sequence[RopeParameters | None]:
    raw = cast("Mapping[str, Any]", settings["rope_parameters"] or {})
    read = {
        "rope_parameters": {name: raw[name] for name in raw if name not in _MULTI},
        "partial_rotary_factor": settings["partial_rotary_factor"] or 0.25,
    }
    rope = read_rope({**settings, **read})
    return [rope if kind == FULL else None for kind in _types(settings)]


def _delta_sizes(settings: Settings, *, by_head: bool) -> DeltaSizes:
    keys, values = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
    if values % keys:
        raise ModelError(f"linear_num_value_heads={values} must be a multiple of linear_num_key_heads={keys}")
    sizes = settings["linear_key_head_dim"], settings["linear_value_head_dim"]
    return DeltaSizes(keys, values, *sizes, by_head, bool(settings.get(TILED)))


def _hybrid(settings: Settings, *, by_head: bool = False) -> list[LayerSpec]:
    """Return the layers with dense feed-forwards."""
    bias = settings["attention_bias"]
    attention = decoder_layer(layer_sizes(settings), qkv_bias=bias, o_bias=bias, gated=True, head_norms=True)
    mixer = gated_delta_net(
        _delta_sizes(settings, by_head=by_head),
        hidden_size=settings["hidden_size"],
        taps=settings["linear_conv_kernel_dim"],
    )
    state = replace(attention, mixer=mixer)
    return [state if kind == _LINEAR else attention for kind in _types(settings)]


def _sparse(settings: Settings, dense: LayerSpec, *, renormalised: bool) -> LayerSpec:
    """Return a layer with experts and a shared expert with a gate."""
    sizes = layer_sizes({**settings, "intermediate_size": settings["shared_expert_intermediate_size"]})
    shared = decoder_layer(sizes).feed_forward
    assert isinstance(shared, LayerFeedForward)
    routing = softmax_routing(settings, "num_experts", renormalised=renormalised)
    return with_experts(dense, routing, settings["moe_intermediate_size"], shared=shared, shared_gate=True)


def _qwen3_next(settings: Settings) -> tuple[LayerSpec, ...]:
    layers, renormalised = _hybrid(settings, by_head=True), settings["norm_topk_prob"]
    return tuple(
        _sparse(settings, layer, renormalised=renormalised) if sparse else layer
        for layer, sparse in zip(layers, has_experts(settings), strict=True)
    )


def _qwen3_5_moe(settings: Settings) -> tuple[LayerSpec, ...]:
    # Every layer has experts; the size of a dense feed-forward is that of no matrix.
    layers = _hybrid({**settings, "intermediate_size": settings["shared_expert_intermediate_size"]})
    return tuple(_sparse(settings, layer, renormalised=True) for layer in layers)


_DELTA_FIELDS = {
    **{name: field for name, field in COMMON.items() if name != "partial_rotary_factor"},
    "num_key_value_heads": Field(2, POSITIVE_INT),
    "head_dim": Field(256, POSITIVE_INT),
    "max_position_embeddings": Field(32768, POSITIVE_INT),
    "partial_rotary_factor": PARTIAL,
    "attention_bias": Field(False, FLAG),
    "layer_types": Field(None, TEXTS.or_null()),
    "full_attention_interval": Field(None, POSITIVE_INT.or_null()),
    "linear_conv_kernel_dim": Field(4, TAPS),
    "linear_key_head_dim": Field(128, POSITIVE_INT),
    "linear_value_head_dim": Field(128, POSITIVE_INT),
    "linear_num_key_heads": Field(16, POSITIVE_INT),
    "linear_num_value_heads": Field(32, POSITIVE_INT),
}
_EXPERT_FIELDS = {
    "moe_intermediate_size": Field(512, POSITIVE_INT),
    "shared_expert_intermediate_size": Field(512, POSITIVE_INT),
}
_QWEN3_5_FIELDS = {
    **_DELTA_FIELDS,
    TILED: Field(None, FLAG.or_null()),
    "vocab_size": Field(248320, POSITIVE_INT),
    "attn_output_gate": Field(None, _GATED.or_null()),
    "output_gate_type": Field(None, _SWISH.or_null()),
    "mamba_ssm_dtype": Field(None, _MAMBA_DTYPE.or_null()),
}
_DRAFTS = "of layers that make drafts (mtp), which do not run"
_MTP = {"mtp_num_hidden_layers": _DRAFTS, "mtp_use_dedicated_embeddings": _DRAFTS}
_NORMS = NormKind(wide=True, offset=1.0)


def _skipped(_: Settings) -> tuple[str, ...]:
    return ("mtp.",)


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    fields={
        **_DELTA_FIELDS,
        **_EXPERT_FIELDS,
        "vocab_size": Field(151936, POSITIVE_INT),
        "hidden_size": Field(2048, POSITIVE_INT),
        "intermediate_size": Field(5632, POSITIVE_INT),
        "num_hidden_layers": Field(48, COMMON["num_hidden_layers"].kind),
        "num_attention_heads": Field(16, POSITIVE_INT),
        "decoder_sparse_step": Field(1, POSITIVE_INT),
        "mlp_only_layers": Field(None, INTS.or_null()),
        "norm_topk_prob": Field(True, FLAG),
        "num_experts": Field(512, POSITIVE_INT),
        "num_experts_per_tok": Field(10, POSITIVE_INT),
    },
    ignored={**EXPERT_LOSS, **_MTP},
    layers=_qwen3_next,
    ropes=_ropes,
    norms=_NORMS,
    skipped=_skipped,
)
QWEN3_5 = Family(
    model_type="qwen3_5_text",
    fields={
        **_QWEN3_5_FIELDS,
        "intermediate_size": Field(12288, POSITIVE_INT),
        "num_hidden_layers": Field(32, COMMON["num_hidden_layers"].kind),
        "num_attention_heads": Field(16, POSITIVE_INT),
        "num_key_value_heads": Field(4, POSITIVE_INT),
    },
    ignored={**_MTP, "mlp_only_layers": UNREAD},
    layers=lambda settings: tuple(_hybrid(settings)),
    ropes=_ropes,
    norms=_NORMS,
    skipped=_skipped,
)
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    fields={
        **{name: field for name, field in _QWEN3_5_FIELDS.items() if name != "intermediate_size"},
        **_EXPERT_FIELDS,
        "hidden_size": Field(2048, POSITIVE_INT),
        "num_hidden_layers": Field(40, COMMON["num_hidden_layers"].kind),
        "num_attention_heads": Field(16, POSITIVE_INT),
        "num_experts": Field(256, POSITIVE_INT),
        "num_experts_per_tok": Field(8, POSITIVE_INT),
    },
    ignored={**EXPERT_LOSS, **_MTP, "mlp_only_layers": UNREAD, "intermediate_size": UNREAD},
    layers=_qwen3_5_moe,
    ropes=_ropes,
    norms=_NORMS,
    skipped=_skipped,
)
