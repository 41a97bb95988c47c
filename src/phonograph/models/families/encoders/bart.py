"""BART: an encoder of text, and a decoder whose layers attend to its states.

Attention, cross attention and feed-forward each end in a layer norm of the stream. Both sides have the same embeddings,
which are the logits' too, and learned positions that begin behind two unused rows.
"""

from __future__ import annotations

from dataclasses import replace

from phonograph.models.config_fields import ANY, INT, LAYERS, POSITIVE_INT, TRAINING, UNREAD, Field
from phonograph.models.families.encoders.encoder_layer import LAYER_NORMS_AFTER, EncoderNames, encoder_layer
from phonograph.models.families.encoders.whisper import ENCODER_DECODER_FIELDS, ENCODER_DECODER_NAMES
from phonograph.models.families.family import Family, Settings
from phonograph.models.heads.encoder_specs import TextEncoder
from phonograph.models.heads.pooler_spec import InputEmbedding
from phonograph.models.layer_spec import LayerAttention, LayerSpec

_FIRST = 2
"""Row of the first token's position."""


def _layer(settings: Settings, module: str = "self_attn") -> LayerSpec:
    projections = tuple(f"{module}.{name}_proj" for name in "qkv")
    return encoder_layer(
        settings,
        EncoderNames(qkv=projections, output=f"{module}.out_proj", inner=("fc1",), down="fc2"),
        attention_norms=(None, f"{module}_layer_norm"),
        feed_forward_norms=(None, "final_layer_norm"),
    )


def _cross(settings: Settings) -> LayerAttention:
    attention = _layer(settings, "encoder_attn").attention
    query, *others = attention.qkv.parts
    memory = replace(attention.qkv, name="memory", parts=tuple(others))
    return replace(attention, qkv=replace(attention.qkv, parts=(query,)), memory=memory)


def _decoder(settings: Settings) -> tuple[LayerSpec, ...]:
    return (replace(_layer(settings), cross=_cross(settings)),) * settings["decoder_layers"]


def _input(settings: Settings) -> InputEmbedding:
    return InputEmbedding(settings["max_position_embeddings"] + _FIRST, first_position=_FIRST)


def _encoder(settings: Settings) -> TextEncoder:
    heads, size = settings["encoder_attention_heads"], settings["encoder_ffn_dim"]
    own = {**settings, "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": size}
    return TextEncoder(
        num_positions=settings["max_position_embeddings"],
        hidden_size=settings["hidden_size"],
        layers=(_layer(own),) * settings["encoder_layers"],
        input=_input(settings),
        start=(settings["decoder_start_token_id"],),
    )


_UNREAD = (
    *("add_bias_logits", "add_final_layer_norm", "classif_dropout", "extra_pos_embeddings", "gradient_checkpointing"),
    *("force_bos_token_to_be_generated", "normalize_before", "normalize_embedding", "output_past"),
    "static_position_embeddings",
)
BART = Family(
    model_type="bart",
    fields={
        **ENCODER_DECODER_FIELDS,
        "vocab_size": Field(50265, POSITIVE_INT),
        "hidden_size": Field(1024, POSITIVE_INT),
        "intermediate_size": Field(4096, POSITIVE_INT),
        "num_attention_heads": Field(16, POSITIVE_INT),
        "decoder_layers": Field(12, LAYERS),
        "encoder_layers": Field(12, LAYERS),
        "encoder_attention_heads": Field(16, POSITIVE_INT),
        "encoder_ffn_dim": Field(4096, POSITIVE_INT),
        "max_position_embeddings": Field(1024, POSITIVE_INT),
        "decoder_start_token_id": Field(2, INT),
        "eos_token_id": Field(2, ANY),
    },
    ignored={
        **dict.fromkeys(("activation_dropout", "init_std", "encoder_layerdrop", "decoder_layerdrop"), TRAINING),
        **dict.fromkeys(_UNREAD, UNREAD),
        "num_hidden_layers": "the number of the encoder's layers once more",
    },
    layers=_decoder,
    ropes=lambda settings: (None,) * settings["decoder_layers"],
    norms=LAYER_NORMS_AFTER,
    final_norm=False,
    input=_input,
    encoder=_encoder,
    skipped=lambda _: ("model.encoder.embed_tokens.", "model.decoder.embed_tokens."),
    aliases=ENCODER_DECODER_NAMES,
    renames=(
        (r"^model\.shared\.", "model.embed_tokens."),
        (r"^model\.decoder\.layers\.", "model.layers."),
        (r"^model\.decoder\.embed_positions\.", "model.positions."),
        (r"^model\.decoder\.layernorm_embedding\.", "model.embed_norm."),
    ),
)
