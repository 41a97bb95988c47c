"""BERT (also MiniLM, BGE, E5, GTE) and its relatives: RoBERTa, XLM-RoBERTa and DistilBERT.

Learned positions and types of tokens are added to the embeddings; attention and the feed-forward with GELU each end in
a layer norm of the stream.
"""

from __future__ import annotations

from dataclasses import replace

from phonograph.errors import UnsupportedModelError
from phonograph.models.config_fields import FLAG, INT, POSITIVE_INT, TRAINING, UNREAD, Field
from phonograph.models.families.encoders.encoder_layer import (
    ENCODER_FIELDS,
    ENCODER_IGNORED,
    LAYER_NORMS_AFTER,
    EncoderNames,
    dense_classifier,
    encoder_layer,
    no_ropes,
)
from phonograph.models.families.family import Family, Settings
from phonograph.models.heads.pooler_spec import InputEmbedding
from phonograph.models.layer_spec import LayerSpec

_BERT_NAMES = EncoderNames(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    output="attention.output.dense",
    inner=("intermediate.dense",),
    down="output.dense",
)
_DISTILBERT_NAMES = EncoderNames(
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    output="attention.out_lin",
    inner=("ffn.lin1",),
    down="ffn.lin2",
)
EMBEDDING_RENAMES = (
    (r"^embeddings\.word_embeddings\.", "model.embed_tokens."),
    (r"^embeddings\.position_embeddings\.", "model.positions."),
    (r"^embeddings\.token_type_embeddings\.", "model.token_types."),
    (r"^embeddings\.LayerNorm\.", "model.embed_norm."),
)
_OLD_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
_UNUSED = ("cls.", "lm_head.", "pooler.", "embeddings.position_ids")
"""Beginnings of names of tensors that embeddings do not use."""


def _bert(settings: Settings) -> tuple[LayerSpec, ...]:
    layer = encoder_layer(
        settings,
        _BERT_NAMES,
        attention_norms=(None, "attention.output.LayerNorm"),
        feed_forward_norms=(None, "output.LayerNorm"),
    )
    return (layer,) * settings["num_hidden_layers"]


def _distilbert(settings: Settings) -> tuple[LayerSpec, ...]:
    layer = encoder_layer(
        settings,
        _DISTILBERT_NAMES,
        attention_norms=(None, "sa_layer_norm"),
        feed_forward_norms=(None, "output_layer_norm"),
    )
    return (layer,) * settings["num_hidden_layers"]


def _bert_input(settings: Settings) -> InputEmbedding:
    return InputEmbedding(settings["max_position_embeddings"], token_types=settings["type_vocab_size"])


def _distilbert_input(settings: Settings) -> InputEmbedding:
    return InputEmbedding(settings["max_position_embeddings"])


def _roberta_input(settings: Settings) -> InputEmbedding:
    if settings["pad_token_id"] is None:
        raise UnsupportedModelError("pad_token_id=None is not supported: positions begin behind it")
    return _bert_input(settings)._replace(first_position=settings["pad_token_id"] + 1)


_BERT_FIELDS = {
    **ENCODER_FIELDS,
    "vocab_size": Field(30522, POSITIVE_INT),
    "hidden_size": Field(768, POSITIVE_INT),
    "intermediate_size": Field(3072, POSITIVE_INT),
    "num_hidden_layers": Field(12, ENCODER_FIELDS["num_hidden_layers"].kind),
    "num_attention_heads": Field(12, POSITIVE_INT),
    "hidden_act": Field("gelu", ENCODER_FIELDS["hidden_act"].kind),
    "max_position_embeddings": Field(512, POSITIVE_INT),
    "type_vocab_size": Field(2, POSITIVE_INT),
    "rms_norm_eps": Field(1e-12, ENCODER_FIELDS["rms_norm_eps"].kind),
    "pad_token_id": Field(0, INT.or_null()),
}
BERT = Family(
    model_type="bert",
    fields=_BERT_FIELDS,
    ignored={
        **ENCODER_IGNORED,
        "directionality": UNREAD,
        **dict.fromkeys(
            ("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"), UNREAD
        ),
        "pooler_type": UNREAD,
    },
    layers=_bert,
    ropes=no_ropes,
    norms=LAYER_NORMS_AFTER,
    encodes=True,
    final_norm=False,
    input=_bert_input,
    classifier=dense_classifier("tanh", "pooler.dense", "classifier"),
    aliases={"layer_norm_eps": "rms_norm_eps"},
    renames=((r"^bert\.", ""), (r"^encoder\.layer\.", "model.layers."), *EMBEDDING_RENAMES, *_OLD_NORMS),
    unused=_UNUSED,
)
ROBERTA = replace(
    BERT,
    model_type="roberta",
    fields={**_BERT_FIELDS, "vocab_size": Field(50265, POSITIVE_INT), "pad_token_id": Field(1, INT.or_null())},
    ignored={**ENCODER_IGNORED, "output_past": UNREAD},
    input=_roberta_input,
    classifier=dense_classifier("tanh", "classifier.dense", "classifier.out_proj", of_tokens="classifier"),
    renames=((r"^roberta\.", ""), *BERT.renames),
)
XLM_ROBERTA = replace(
    ROBERTA,
    model_type="xlm-roberta",
    fields={**ROBERTA.fields, "vocab_size": Field(30522, POSITIVE_INT)},
)
DISTILBERT = replace(
    BERT,
    model_type="distilbert",
    fields={
        **{name: field for name, field in _BERT_FIELDS.items() if name != "type_vocab_size"},
        "num_hidden_layers": Field(6, ENCODER_FIELDS["num_hidden_layers"].kind),
        "sinusoidal_pos_embds": Field(False, FLAG),
    },
    ignored=dict.fromkeys(("qa_dropout", "seq_classif_dropout"), TRAINING)
    | {"tie_weights_": UNREAD, "output_past": UNREAD},
    layers=_distilbert,
    input=_distilbert_input,
    classifier=dense_classifier("relu", "pre_classifier", "classifier"),
    aliases={
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "activation": "hidden_act",
    },
    renames=((r"^distilbert\.", ""), (r"^transformer\.layer\.", "model.layers."), *EMBEDDING_RENAMES, *_OLD_NORMS),
    unused=(*_UNUSED, "vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
)
