"""Checkpoints whose configuration ties the embeddings to the head, held against the tensors that the files have.

Merged LoRAs often keep `tie_word_embeddings: true` beside a head of their own. As in transformers, a head that differs
from the embeddings is used, an equal one is a copy, and one without embeddings beside it is both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open

from phonograph.models.spec import ModelSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def match_tied_embeddings(spec: ModelSpec, files: Iterable[Path]) -> tuple[ModelSpec, dict[str, str]]:
    """Return the model as the files have it, and the tensors that count by another name than their own.

    Of a damaged file nothing is said here; loading reads all of them.
    """
    if not spec.tie_word_embeddings:
        return spec, {}
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                names = {EMBEDDING, HEAD}.intersection(tensors.keys())
                found |= {name: cast("torch.Tensor", tensors.get_tensor(name)) for name in names}
        except (SafetensorError, OSError):
            continue
    if HEAD not in found:
        return spec, {}
    if EMBEDDING not in found:
        return spec, {HEAD: EMBEDDING}
    head, embedding = found[HEAD], found[EMBEDDING]
    if head.dtype == embedding.dtype and torch.equal(head, embedding):
        return spec, {}
    note = f"tie_word_embeddings ignored: {HEAD} of the checkpoint differs from {EMBEDDING}"
    return replace(spec, tie_word_embeddings=False, notes=(*spec.notes, note)), {}
