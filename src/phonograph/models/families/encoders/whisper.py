"""Whisper: an encoder of audio, and a decoder whose layers attend to its states.

Layer norms with bias come before attention, cross attention and feed-forward. Keys have no bias, positions are learned,
and the logits are those of the embedding. Names of the decoder's tensors become those of a model without an encoder.
"""

from __future__ import annotations

from dataclasses import replace

from phonograph.errors import UnsupportedModelError
from phonograph.models.config_fields import ANY, COMMON, FLAG, LAYERS, POSITIVE_INT, TRAINING, UNREAD, Field, FieldKind
from phonograph.models.families.encoders.encoder_layer import EncoderNames, encoder_layer
from phonograph.models.families.family import Family, Settings
from phonograph.models.heads.encoder_specs import POSITIONS_PER_SECOND, AudioEncoder
from phonograph.models.heads.pooler_spec import InputEmbedding
from phonograph.models.layer_spec import LayerAttention, LayerSpec, NormKind
from phonograph.models.layers.layer_matrix import LayerMatrix

_HAS_ENCODER = FieldKind("true, as the model has an encoder", lambda value: value is True)
_NOT_SCALED = FieldKind("false, as embeddings are not scaled here", lambda value: value is False)
_IN_TRAINING = (
    *("activation_dropout", "init_std", "encoder_layerdrop", "decoder_layerdrop", "apply_spec_augment"),
    *("mask_time_prob", "mask_time_length", "mask_time_min_masks"),
    *("mask_feature_prob", "mask_feature_length", "mask_feature_min_masks"),
)
_OF_ENCODER = ("encoder_attention_heads", "encoder_ffn_dim")


def _names(module: str) -> EncoderNames:
    projections = tuple(f"{module}.{name}_proj" for name in "qkv")
    return EncoderNames(qkv=projections, output=f"{module}.out_proj", inner=("fc1",), down="fc2")


def _layer(settings: Settings, module: str = "self_attn") -> LayerSpec:
    layer = encoder_layer(
        settings,
        _names(module),
        attention_norms=(f"{module}_layer_norm", None),
        feed_forward_norms=("final_layer_norm", None),
    )
    attention = layer.attention
    query, key, value = attention.qkv.parts
    qkv = replace(attention.qkv, parts=(query, key._replace(bias=False), value))
    return replace(layer, mixer=replace(attention, qkv=qkv))


def _cross(settings: Settings) -> LayerAttention:
    """Return attention to the encoder's states: queries are of the stream, keys and values of the states."""
    attention = _layer(settings, "encoder_attn").attention
    query, *others = attention.qkv.parts
    memory: LayerMatrix = replace(attention.qkv, name="memory", parts=tuple(others))
    return replace(attention, qkv=replace(attention.qkv, parts=(query,)), memory=memory)


def _decoder(settings: Settings) -> tuple[LayerSpec, ...]:
    return (replace(_layer(settings), cross=_cross(settings)),) * settings["decoder_layers"]


def _encoder(settings: Settings) -> AudioEncoder:
    positions = settings["max_source_positions"]
    if positions % POSITIONS_PER_SECOND:
        raise UnsupportedModelError(
            f"max_source_positions={positions} is not in whole seconds; use a multiple of {POSITIONS_PER_SECOND}"
        )
    heads, size = (settings[name] for name in _OF_ENCODER)
    own = {**settings, "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": size}
    return AudioEncoder(
        num_mel_bins=settings["num_mel_bins"],
        num_positions=positions,
        hidden_size=settings["hidden_size"],
        layers=(_layer(own),) * settings["encoder_layers"],
        median_width=settings["median_filter_width"],
    )


ENCODER_DECODER_FIELDS = {
    **{name: field for name, field in COMMON.items() if name != "num_hidden_layers"},
    "hidden_act": Field("gelu", COMMON["hidden_act"].kind),
    "rms_norm_eps": Field(1e-5, COMMON["rms_norm_eps"].kind),
    "tie_word_embeddings": Field(True, FLAG),
    "is_encoder_decoder": Field(True, _HAS_ENCODER),
    "scale_embedding": Field(False, _NOT_SCALED),
}
"""Fields of Whisper and BART, whose decoders count their layers in `decoder_layers`."""
ENCODER_DECODER_NAMES = {
    "d_model": "hidden_size",
    "decoder_attention_heads": "num_attention_heads",
    "decoder_ffn_dim": "intermediate_size",
    "activation_function": "hidden_act",
}
"""Names that both have for fields of other families."""
WHISPER = Family(
    model_type="whisper",
    fields={
        **ENCODER_DECODER_FIELDS,
        "vocab_size": Field(51865, POSITIVE_INT),
        "hidden_size": Field(384, POSITIVE_INT),
        "intermediate_size": Field(1536, POSITIVE_INT),
        "num_attention_heads": Field(6, POSITIVE_INT),
        "decoder_layers": Field(4, LAYERS),
        "encoder_layers": Field(4, LAYERS),
        "encoder_attention_heads": Field(6, POSITIVE_INT),
        "encoder_ffn_dim": Field(1536, POSITIVE_INT),
        "num_mel_bins": Field(80, POSITIVE_INT),
        "max_source_positions": Field(1500, POSITIVE_INT),
        "max_position_embeddings": Field(448, POSITIVE_INT),
        "eos_token_id": Field(50256, ANY),
        "median_filter_width": Field(
            7, FieldKind("an odd number", lambda value: type(value) is int and value % 2 == 1)
        ),
    },
    ignored={
        **dict.fromkeys(_IN_TRAINING, TRAINING),
        **dict.fromkeys(("forced_decoder_ids", "use_weighted_layer_sum", "classifier_proj_size"), UNREAD),
        "num_hidden_layers": "the number of the encoder's layers once more",
    },
    layers=_decoder,
    ropes=lambda settings: (None,) * settings["decoder_layers"],
    norms=NormKind(layer=True, bias=True),
    input=lambda settings: InputEmbedding(settings["max_position_embeddings"], norm=False),
    encoder=_encoder,
    aliases={
        **ENCODER_DECODER_NAMES,
        "max_target_positions": "max_position_embeddings",
    },
    renames=(
        (r"^model\.decoder\.layers\.", "model.layers."),
        (r"^model\.decoder\.embed_tokens\.", "model.embed_tokens."),
        (r"^model\.decoder\.embed_positions\.", "model.positions."),
        (r"^model\.decoder\.layer_norm\.", "model.norm."),
        (r"^proj_out\.", "lm_head."),
    ),
)
