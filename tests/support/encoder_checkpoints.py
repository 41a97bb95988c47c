"""Tiny random checkpoints of encoders, each with the model of transformers that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    ModernBertModel,
    NomicBertConfig,
    NomicBertForSequenceClassification,
    NomicBertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

VOCAB_SIZE = 101
POSITIONS = 70
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": POSITIONS,
}
_DISTIL = {"vocab_size": VOCAB_SIZE, "dim": 48, "hidden_dim": 72, "n_layers": 2, "n_heads": 3}
_DISTIL |= {"max_position_embeddings": POSITIONS}
_MODERN = {**SIZES, "num_hidden_layers": 4, "local_attention": 10, "pad_token_id": 0, "bos_token_id": 1}
_MODERN |= {"eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
_GEMMA = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 10, "use_bidirectional_attention": True}
ENCODERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "bert": (BertConfig, BertModel, SIZES),
    "bert_classes": (BertConfig, BertForSequenceClassification, {**SIZES, "num_labels": 3}),
    "bert_token_classes": (BertConfig, BertForTokenClassification, {**SIZES, "num_labels": 4}),
    "roberta": (RobertaConfig, RobertaModel, SIZES),
    "roberta_classes": (RobertaConfig, RobertaForSequenceClassification, {**SIZES, "num_labels": 2}),
    "roberta_token_classes": (RobertaConfig, RobertaForTokenClassification, SIZES),
    "xlm_roberta": (XLMRobertaConfig, XLMRobertaModel, {**SIZES, "type_vocab_size": 1}),
    "xlm_roberta_score": (
        XLMRobertaConfig,
        XLMRobertaForSequenceClassification,
        {**SIZES, "type_vocab_size": 1, "num_labels": 1},
    ),
    "distilbert": (DistilBertConfig, DistilBertModel, _DISTIL),
    "distilbert_classes": (DistilBertConfig, DistilBertForSequenceClassification, _DISTIL),
    "modernbert": (ModernBertConfig, ModernBertModel, _MODERN),
    "modernbert_classes": (
        ModernBertConfig,
        ModernBertForSequenceClassification,
        {**_MODERN, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "modernbert_token_classes": (ModernBertConfig, ModernBertForTokenClassification, _MODERN),
    "nomic": (NomicBertConfig, NomicBertModel, SIZES),
    "nomic_classes": (NomicBertConfig, NomicBertForSequenceClassification, SIZES),
    "embedding_gemma": (Gemma3TextConfig, Gemma3TextModel, {**_GEMMA, "num_hidden_layers": 6}),
}


def make_encoder(name: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint of random weights, all of which matter, and return the model that wrote it."""
    config_class, model_class, settings = ENCODERS[name]
    torch.manual_seed(sum(name.encode()))
    model = model_class(config_class(**{**settings, **changes})).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_norm = "norm" in parameter_name.lower() and parameter_name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.15)
    model.save_pretrained(folder)
    return model


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Return prompts without the padding tokens of the families."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def expected_rows(model: PreTrainedModel, prompt: list[int], **inputs: list[int]) -> torch.Tensor:
    """Return the hidden states of all tokens, or the logits, of a model of transformers."""
    with torch.inference_mode():
        made = model(torch.tensor([prompt]), **{name: torch.tensor([values]) for name, values in inputs.items()})
    rows = made.logits if hasattr(made, "logits") else made.last_hidden_state
    return rows[0]
