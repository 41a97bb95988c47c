"""Tied embeddings: `tie_word_embeddings` of the configuration compared with the tensors of the files.

Merged LoRAs often keep `tie_word_embeddings: true` with a separate head. As in transformers, a head that differs from
the embeddings is used, an equal one is a copy, and one without embeddings is both.
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
    """Return the model as the files have it, and a mapping of tensor names to the names that they stand for.

    Damaged files are skipped: loading reports them.
    """
    if not spec.tie_word_embeddings:
        return spec, {}
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                own = {spec.tensor_name(name): name for name in cast("list[str]", tensors.keys())}
                names = {EMBEDDING, HEAD}.intersection(own)
                found |= {name: cast("torch.Tensor", tensors.get_tensor(own[name])) for name in names}
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
