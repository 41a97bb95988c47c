"""A tiny random checkpoint of BART, with the model of transformers that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BartConfig, BartForConditionalGeneration

VOCAB_SIZE, POSITIONS, START = 101, 70, 2
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB_SIZE, "d_model": 48, "max_position_embeddings": POSITIONS},
    **{"encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 72, "decoder_ffn_dim": 60},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 3},
}


def make_bart(folder: Path, **changes: Any) -> BartForConditionalGeneration:
    """Write a checkpoint of random weights, all of which matter, and return the model that wrote it."""
    torch.manual_seed(0)
    model = BartForConditionalGeneration(BartConfig(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name and name.endswith("weight")), 0.2)
    model.save_pretrained(folder)
    return model
