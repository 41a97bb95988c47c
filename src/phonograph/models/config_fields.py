"""Allow-list of config.json: fields that all families use, and fields that may be ignored, with the reason.

A family adds its own (`families/`). `hf_config.py` rejects every other field, so that no checkpoint runs without a
feature that its file requires. Defaults are those of transformers' configuration classes, and tests compare them.
Importing these classes would take as long as the rest of a start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast


@dataclass(frozen=True, slots=True)
class FieldKind:
    """Valid values of a field; `works` describes them in words that follow "must be"."""

    works: str
    accepts: Callable[[object], bool]

    def or_null(self) -> FieldKind:
        return FieldKind(f"{self.works} or null", lambda value: value is None or self.accepts(value))


def is_number(value: object) -> bool:
    """Return True for a finite int or float; booleans are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive_int(value: object) -> bool:
    return type(value) is int and value > 0


def _is_layer_count(value: object) -> bool:
    return type(value) is int and 0 < value <= MOST_LAYERS


def _are_positive_numbers(value: object) -> bool:
    return isinstance(value, list) and all(
        is_number(item) and cast("float", item) > 0 for item in cast("list[object]", value)
    )


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[object]", value))


MOST_LAYERS = 10_000
"""Most layers of a model. A damaged file may have billions, and plans are made layer by layer."""
POSITIVE_INT = FieldKind("a positive integer", _is_positive_int)
LAYERS = FieldKind(f"a positive integer of at most {MOST_LAYERS}", _is_layer_count)
POSITIVE_NUMBER = FieldKind("a positive number", lambda value: is_number(value) and cast("float", value) > 0)
POSITIVE_NUMBERS = FieldKind("a list of positive numbers", _are_positive_numbers)
NUMBER = FieldKind("a finite number", is_number)
EPSILON = FieldKind(
    "a float of 0 or more, with a point or an exponent such as 0.0 or 1e-06",
    lambda value: type(value) is float and math.isfinite(value) and value >= 0,
)
FLAG = FieldKind("true or false", lambda value: isinstance(value, bool))
TEXT = FieldKind("text", lambda value: isinstance(value, str))
TEXTS = FieldKind("a list of texts", _is_list_of_texts)
NULL = FieldKind("null", lambda value: value is None)
OBJECT = FieldKind("an object", lambda value: isinstance(value, dict))
INTS = FieldKind(
    "a list of integers",
    lambda value: isinstance(value, list) and all(type(item) is int for item in cast("list[object]", value)),
)
INT = FieldKind("an integer", lambda value: type(value) is int)
COUNT = FieldKind("an integer of 0 or more", lambda value: type(value) is int and value >= 0)
TAPS = FieldKind("an integer of 2 or more", lambda value: type(value) is int and value > 1)
ANY = FieldKind("any value", lambda value: True)


@dataclass(frozen=True, slots=True)
class Field:
    """A field that defines the model, with the value it has if the file omits it."""

    default: object
    kind: FieldKind


FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of attention in layer_types."""

LENGTH_FIELDS = (
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "model_max_length",
    "n_positions",
    "seq_length",
    "seq_len",
)
"""Fields apart from max_position_embeddings that limit the context, as in vLLM; transformers ignores them."""

COMMON: Mapping[str, Field] = {
    "model_type": Field(None, TEXT),
    "architectures": Field(None, TEXTS),
    "vocab_size": Field(32000, POSITIVE_INT),
    "hidden_size": Field(4096, POSITIVE_INT),
    "intermediate_size": Field(11008, POSITIVE_INT),
    "num_hidden_layers": Field(32, LAYERS),
    "num_attention_heads": Field(32, POSITIVE_INT),
    "num_key_value_heads": Field(None, POSITIVE_INT.or_null()),
    "head_dim": Field(None, POSITIVE_INT.or_null()),
    "hidden_act": Field("silu", TEXT),
    "max_position_embeddings": Field(2048, POSITIVE_INT),
    "rms_norm_eps": Field(1e-6, EPSILON),
    "tie_word_embeddings": Field(False, FLAG),
    "rope_parameters": Field(None, OBJECT.or_null()),
    "rope_scaling": Field(None, OBJECT.or_null()),
    "rope_theta": Field(10000.0, POSITIVE_NUMBER.or_null()),
    "original_max_position_embeddings": Field(None, POSITIVE_INT.or_null()),
    "dtype": Field(None, TEXT.or_null()),
    "torch_dtype": Field(None, TEXT.or_null()),
    # transformers reads no list here, and without its configuration the tokenizer cannot be loaded.
    **{name: Field(None, INT.or_null()) for name in ("bos_token_id", "pad_token_id")},
    "eos_token_id": Field(None, ANY),
    "quantization_config": Field(None, ANY),
    **{name: Field(None, POSITIVE_NUMBER.or_null()) for name in LENGTH_FIELDS},
}
FIXED: Mapping[str, tuple[object, ...]] = {
    # null is not True: transformers then attends in both directions.
    "is_causal": (True,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "use_bidirectional_attention": (False, None),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "per_layer_config": ({}, None),
    "output_router_logits": (False, None),
}
"""Fields of features that are not implemented, with the values that disable the feature; the first is the default."""

_BOOKKEEPING = "bookkeeping of the tools that wrote the file"
TRAINING = "has an effect in training only"
_HEADS = "describes a head of classes, which a causal language model does not have (`heads/find_pooler.py`)"
_OUTPUTS = "chooses what a call of transformers returns"
_GENERATION = "a default of generation, which generation_config.json sets"
KERNELS = "chooses among kernels that compute the same"
UNREAD = "not read by these architectures in transformers"
TENSORS = "fixed by the architecture; the tensors of the file must agree with it"
_GROUPS: tuple[tuple[str, str], ...] = (
    (
        _BOOKKEEPING,
        "name_or_path transformers_version transformers.js_config auto_map is_llama_config unsloth_fixed "
        "unsloth_version tokenizer_class torchscript tensor_parallel_size bos_token eos_token pad_token unk_token",
    ),
    (
        TRAINING,
        "attention_dropout attn_pdrop classifier_dropout dropout embd_pdrop hidden_dropout resid_pdrop "
        "initializer_range initializer_factor pretraining_tp gradient_checkpointing neftune_noise_alpha "
        "use_bfloat16 tf_legacy_loss label_smoothing",
    ),
    (
        _HEADS,
        "id2label label2id num_labels problem_type task_specific_params finetuning_task sentence_transformers "
        "sbert_ce_default_activation_function classifier_from_token is_original_qwen3_reranker method",
    ),
    (_OUTPUTS, "output_attentions output_hidden_states return_dict use_return_dict use_cache"),
    (
        _GENERATION,
        "max_length min_length max_new_tokens do_sample early_stopping num_beams temperature top_k top_p typical_p "
        "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
        "num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
        "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens epsilon_cutoff "
        "eta_cutoff encoder_repetition_penalty num_assistant_tokens num_assistant_tokens_schedule "
        "assistant_confidence_threshold assistant_lookbehind target_lookbehind num_beam_groups diversity_penalty "
        "sep_token_id unk_token_id mask_token_id cls_token_id decoder_start_token_id prefix",
    ),
    (
        KERNELS,
        "attn_implementation cache_implementation experts_implementation use_flash_attn use_flash_attention "
        "use_flash_attention_2",
    ),
    (UNREAD, "chunk_size_feed_forward is_decoder cross_attention_hidden_size pruned_heads"),
)
IGNORED: Mapping[str, str] = {name: reason for reason, names in _GROUPS for name in names.split()}
"""Fields without effect on any supported model, each with the reason. So are those that begin with an underscore, which
transformers and tools keep for themselves.
"""
