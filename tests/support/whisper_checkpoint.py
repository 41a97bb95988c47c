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


MULTILINGUAL = {"startoftranscript": 50258, "en": 50259, "de": 50260, "translate": 50358, "transcribe": 50359}
MULTILINGUAL |= {"startofprev": 50361, "notimestamps": 50363, "endoftext": 50257}


def make_multilingual(folder: Path) -> WhisperForConditionalGeneration:
    """Write a checkpoint with the vocabulary of several languages and a tokenizer of words w0, w1, ..."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    size, special = 51865, {number: f"<|l{number}|>" for number in range(50259, 50358)}
    special |= {number: f"<|{name}|>" for name, number in MULTILINGUAL.items()}
    ends = {"eos_token_id": 50257, "decoder_start_token_id": 50258, "pad_token_id": 50257, "bos_token_id": 50257}
    model = make_whisper(folder, vocab_size=size, max_target_positions=36, **ends)
    vocabulary = {special.get(number, f"w{number}"): number for number in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    # The class of Whisper would make a tokenizer of byte pairs of it.
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return model
