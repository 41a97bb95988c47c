"""Prompts with a gap, for models that were trained to fill it: tokens of the vocabulary mark the parts."""

from __future__ import annotations

from dataclasses import dataclass

from phonograph.text.tokenizer import Tokenizer

FORMS: tuple[tuple[str, ...], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("[PREFIX]", "[SUFFIX]"),  # Codestral
)
"""Tokens before the prefix, before the suffix, and after it. Without the third one the suffix comes first."""
ENDS = ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|endoftext|>", "<file_sep>", "▁<EOT>")
"""Tokens with which models end the text of a gap, beside those of the forms."""


@dataclass(frozen=True, slots=True)
class Infill:
    """Form of prompts with a gap.

    markers: ids of the tokens of one of `FORMS`
    ends:    ids of the tokens that end the text of the gap
    """

    markers: tuple[int, ...]
    ends: tuple[int, ...]

    def prompt(self, prefix: list[int], suffix: list[int]) -> list[int]:
        """Return the prompt of which the answer is the text between prefix and suffix."""
        begin, after, *middle = self.markers
        if middle:
            return [begin, *prefix, after, *suffix, *middle]
        return [after, *suffix, begin, *prefix]


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    """Return the form whose tokens a vocabulary has, or None."""
    for form in FORMS:
        markers = tuple(token_id for piece in form if (token_id := tokenizer.token_id(piece)) is not None)
        if len(markers) == len(form):
            ends = {token_id for piece in ENDS if (token_id := tokenizer.token_id(piece)) is not None}
            return Infill(markers, tuple(sorted({*markers, *ends})))
    return None
