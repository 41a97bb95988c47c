"""A tiny random checkpoint of Whisper, with the model of transformers that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

VOCAB_SIZE = 101
START = 3
SECONDS = 1
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "d_model": 48,
    "encoder_ffn_dim": 72,
    "decoder_ffn_dim": 60,
    "max_source_positions": 50 * SECONDS,
    "max_target_positions": 70,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": START},
    "begin_suppress_tokens": None,
}


def make_whisper(folder: Path, **changes: Any) -> WhisperForConditionalGeneration:
    """Write a checkpoint of random weights, all of which matter, and return the model that wrote it."""
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm.weight" in name), 0.2)
    model.save_pretrained(folder)
    return model
