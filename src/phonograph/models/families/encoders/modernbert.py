"""ModernBERT and NomicBERT: rotary embeddings and gated feed-forwards.

ModernBERT has norms without bias before attention and feed-forward, and a window to both sides with a rope of its own
on two layers of three. NomicBERT has layer norms of the stream as BERT, and no learned positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.errors import UnsupportedModelError
from phonograph.models.config_fields import (
    FLAG,
    FULL,
    INT,
    KERNELS,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    SLIDING,
    TEXT,
    TEXTS,
    TRAINING,
    UNREAD,
    Field,
    FieldKind,
)
from phonograph.models.families.encoders.bert import EMBEDDING_RENAMES
from phonograph.models.families.encoders.encoder_layer import (
    ENCODER_FIELDS,
    ENCODER_IGNORED,
    LAYER_NORMS_AFTER,
    EncoderNames,
    dense_classifier,
    encoder_layer,
)
from phonograph.models.families.family import Family, Settings
from phonograph.models.heads.pooler_spec import InputEmbedding, PoolerStage, Pooling
from phonograph.models.layer_spec import UNLIMITED, LayerSpec, NormKind
from phonograph.models.rope_parameters import RopeParameters, read_ropes_by_type

_MODERN_NAMES = EncoderNames(qkv=("attn.Wqkv",), output="attn.Wo", inner=("mlp.Wi",), down="mlp.Wo")
_NOMIC_NAMES = EncoderNames(qkv=("attn.Wqkv",), output="attn.out_proj", inner=("mlp.fc12", "mlp.fc11"), down="mlp.fc2")
"""Names in files, which are not those of transformers' modules."""
_POOLINGS: dict[str, Pooling] = {"cls": "first", "mean": "mean"}


def _modernbert(settings: Settings) -> tuple[LayerSpec, ...]:
    side = settings["local_attention"] // 2
    return tuple(
        encoder_layer(
            settings,
            _MODERN_NAMES,
            attention_norms=("attn_norm" if number else None, None),
            feed_forward_norms=("mlp_norm", None),
            biases=(settings["attention_bias"], settings["mlp_bias"]),
            gated=True,
            window=UNLIMITED if kind == FULL else (side, side),
        )
        for number, kind in enumerate(_modern_layer_types(settings))
    )


def _modern_layer_types(settings: Settings) -> list[str]:
    """Return the kind of each layer: the first of each few has full attention."""
    count, types = settings["num_hidden_layers"], settings["layer_types"]
    if types is None:
        every = settings["global_attn_every_n_layers"]
        types = [SLIDING if number % every else FULL for number in range(count)]
    if len(types) != count or not {FULL, SLIDING} >= set(types):
        raise UnsupportedModelError(f"layer_types={types!r} must name {FULL} or {SLIDING} for each of {count} layers")
    return types


def _modern_ropes(settings: Settings) -> Sequence[RopeParameters]:
    found = read_ropes_by_type(
        settings, {FULL: settings["global_rope_theta"], SLIDING: settings["local_rope_theta"]}, ("default",)
    )
    return [found[kind] for kind in _modern_layer_types(settings)]


def _modern_classifier(settings: Settings, name: str, num_labels: int) -> tuple[Pooling, tuple[PoolerStage, ...]]:
    size = settings["hidden_size"]
    if settings["classifier_activation"] != "gelu":
        raise UnsupportedModelError(
            f"classifier_activation={settings['classifier_activation']!r} is not supported; gelu is"
        )
    dense = PoolerStage(
        "head.dense",
        size,
        size,
        bias=settings["classifier_bias"],
        activation="gelu",
        norm="head.norm",
    )
    pooling = "all" if name.endswith("ForTokenClassification") else _POOLINGS[settings["classifier_pooling"]]
    return pooling, (dense, PoolerStage("classifier", size, num_labels))


_NO_BIAS = FieldKind("false, as norms with a bias are not supported in this family", lambda value: value is False)
MODERNBERT = Family(
    model_type="modernbert",
    fields={
        **ENCODER_FIELDS,
        "vocab_size": Field(50368, POSITIVE_INT),
        "hidden_size": Field(768, POSITIVE_INT),
        "intermediate_size": Field(1152, POSITIVE_INT),
        "num_hidden_layers": Field(22, ENCODER_FIELDS["num_hidden_layers"].kind),
        "num_attention_heads": Field(12, POSITIVE_INT),
        "hidden_act": Field("gelu", TEXT),
        "max_position_embeddings": Field(8192, POSITIVE_INT),
        "rms_norm_eps": Field(1e-5, ENCODER_FIELDS["rms_norm_eps"].kind),
        "norm_bias": Field(False, _NO_BIAS),
        "pad_token_id": Field(50283, INT.or_null()),
        "layer_types": Field(None, TEXTS.or_null()),
        "global_attn_every_n_layers": Field(3, POSITIVE_INT),
        "global_rope_theta": Field(160000.0, POSITIVE_NUMBER),
        "local_rope_theta": Field(10000.0, POSITIVE_NUMBER.or_null()),
        "local_attention": Field(128, POSITIVE_INT),
        "attention_bias": Field(False, FLAG),
        "mlp_bias": Field(False, FLAG),
        "classifier_bias": Field(False, FLAG),
        "classifier_pooling": Field("cls", FieldKind("cls or mean", lambda value: value in _POOLINGS)),
        "classifier_activation": Field("gelu", TEXT),
    },
    ignored=dict.fromkeys(
        (
            *("decoder_bias", "deterministic_flash_attn", "embedding_dropout", "initializer_cutoff_factor"),
            *("mlp_dropout", "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index"),
            *("sparse_prediction", "layer_norm_eps"),
        ),
        TRAINING,
    ),
    layers=_modernbert,
    ropes=_modern_ropes,
    norms=NormKind(layer=True),
    encodes=True,
    input=lambda _: InputEmbedding(),
    classifier=_modern_classifier,
    aliases={"norm_eps": "rms_norm_eps", "hidden_activation": "hidden_act"},
    renames=(
        (r"^model\.", ""),
        (r"^layers\.", "model.layers."),
        (r"^embeddings\.tok_embeddings\.", "model.embed_tokens."),
        (r"^embeddings\.norm\.", "model.embed_norm."),
        (r"^final_norm\.", "model.norm."),
    ),
    unused=("decoder.", "head."),
)


def _nomic(settings: Settings) -> tuple[LayerSpec, ...]:
    is_old = settings["hidden_act"] == "swiglu"
    layer = encoder_layer(
        {**settings, "hidden_act": "silu"} if is_old else settings,
        _NOMIC_NAMES,
        attention_norms=(None, "norm1"),
        feed_forward_norms=(None, "norm2"),
        biases=(False, False),
        gated=True,
    )
    return (layer,) * settings["num_hidden_layers"]


_OLD_NOMIC = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
    "max_trained_positions": "max_position_embeddings",
    "rotary_emb_base": "rope_theta",
}
"""Fields of the configuration class that came with the model before transformers had one."""
_FIXED_NOMIC: dict[str, object] = {
    **dict.fromkeys(("causal", "mlp_fc1_bias", "mlp_fc2_bias", "parallel_block", "prenorm", "qkv_proj_bias"), False),
    **dict.fromkeys(("rotary_emb_interleaved", "scale_attn_by_inverse_layer_idx", "use_rms_norm"), False),
    **{"rotary_emb_fraction": 1.0, "rotary_emb_scale_base": None, "scale_attn_weights": True},
}


def _only(value: object) -> Field:
    return Field(
        value, FieldKind(f"{value}, as other models of this class are not supported", lambda one: one == value)
    )


NOMIC_BERT = Family(
    model_type="nomic_bert",
    fields={
        **ENCODER_FIELDS,
        "vocab_size": Field(30528, POSITIVE_INT),
        "hidden_size": Field(768, POSITIVE_INT),
        "intermediate_size": Field(3072, POSITIVE_INT),
        "num_hidden_layers": Field(12, ENCODER_FIELDS["num_hidden_layers"].kind),
        "num_attention_heads": Field(12, POSITIVE_INT),
        "hidden_act": Field("silu", TEXT),
        "max_position_embeddings": Field(2048, POSITIVE_INT),
        "type_vocab_size": Field(2, POSITIVE_INT),
        "rms_norm_eps": Field(1e-12, ENCODER_FIELDS["rms_norm_eps"].kind),
        "rope_theta": Field(1000.0, POSITIVE_NUMBER.or_null()),
        "pad_token_id": Field(0, INT.or_null()),
        **{name: _only(value) for name, value in _FIXED_NOMIC.items()},
        "rotary_scaling_factor": Field(None, FieldKind("null or 1, which scale nothing", lambda one: one in (None, 1))),
    },
    ignored={
        **ENCODER_IGNORED,
        **dict.fromkeys(("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "use_xentropy"), KERNELS),
        **dict.fromkeys(("pad_vocab_size_multiple", "parallel_block_tied_norm", "reorder_and_upcast_attn"), UNREAD),
        **{f"summary_{name}": UNREAD for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")},
    },
    layers=_nomic,
    norms=LAYER_NORMS_AFTER,
    encodes=True,
    final_norm=False,
    input=lambda settings: InputEmbedding(token_types=settings["type_vocab_size"]),
    classifier=dense_classifier("tanh", "pooler.dense", "classifier"),
    aliases={"layer_norm_eps": "rms_norm_eps", **_OLD_NOMIC},
    renames=(
        (r"^nomic_bert\.", ""),
        (r"^encoder\.layers\.", "model.layers."),
        (r"^emb_ln\.", "model.embed_norm."),
        *EMBEDDING_RENAMES,
    ),
    unused=("cls.", "pooler."),
)
