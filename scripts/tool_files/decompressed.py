"""Weights of checkpoints in compressed-tensors, by the code of the package."""

from __future__ import annotations

from pathlib import Path

import torch
from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer
from tiny_models import stored_tensors


def decompressed(written: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint in float32. Scales are widened first, because products are in their type."""
    tensors = {
        name: tensor.float() if name.endswith("_scale") and tensor.element_size() > 1 else tensor
        for name, tensor in stored_tensors(written).items()
    }
    ignored = ["re:.*embed_tokens", "re:.*norm", "lm_head"]
    weights = CompressedTensorsDequantizer(written, ignored, torch.float32).process(tensors)
    return {name: weight for name, weight in weights.items() if name.endswith((".weight", ".bias"))}
