"""A small tokenizer of the kind that Llama 2 and Mistral have."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from phonograph.text.tokenizer import Tokenizer

END = "</s>"


def sentencepiece_like() -> Tokenizer:
    """Spaces are written as ▁, and bytes that have no token as <0x..>; a decoder takes the first space away."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "▁a", "T", "o", "m", "▁T", "▁To", "."]
    merges = [("▁", "a"), ("▁", "T"), ("▁T", "o")]
    backend = Backend(models.BPE({piece: place for place, piece in enumerate(pieces)}, merges, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(END, special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
