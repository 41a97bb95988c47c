"""Encoder of text whose states a decoder's cross attention reads (BART).

Lewis et al., "BART: Denoising Sequence-to-Sequence Pre-training" (2020, arXiv:1910.13461): embeddings of the tokens,
which are those of the decoder, learned positions, a norm of the sum, and layers that look to both sides.

Shapes: P tokens of the encoder's prompt, E hidden size.
"""

from __future__ import annotations

import torch

from phonograph.models.heads.audio_encoder import AudioEncoderWeights, EncoderLayers
from phonograph.models.heads.encoder_ends import InputWeights
from phonograph.models.heads.encoder_specs import AudioEncoder, TextEncoder
from phonograph.models.layers.linear import WeightAllocator
from phonograph.models.layers.part_weights import LayerWeights

_NAMES = {"positions.": "embed_positions.", "embed_norm.": "layernorm_embedding."}
"""Beginnings of the names of an input's tensors, and those in checkpoints."""


class TextEncoderWeights(EncoderLayers):
    """Weights of the encoder, and its forward pass.

    Attributes:
        spec: the encoder as values.
    """

    def __init__(self, spec: TextEncoder, layers: list[LayerWeights], allocate: WeightAllocator) -> None:
        super().__init__(layers)
        self.spec = spec
        self.input = self._tables = InputWeights.make(spec.input, spec.hidden_size, allocate)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Return the destination of each tensor of a checkpoint by its name."""
        own = self._tables.checkpoint_views()
        views = {new + name.removeprefix(old): own[name] for old, new in _NAMES.items() for name in own if old in name}
        return self.with_layers(views)

    def __call__(self, token_ids_P: torch.Tensor) -> torch.Tensor:
        """Return the states [P, E] of a text."""
        assert self._begin is not None, "the encoder is bound to a kernel set"
        stream = self._begin(token_ids_P, torch.arange(len(token_ids_P), device=token_ids_P.device))
        return self.run(stream, len(token_ids_P)).hidden_TE


def make_encoder(
    spec: AudioEncoder | TextEncoder, layers: list[LayerWeights], allocate: WeightAllocator, eps: float
) -> AudioEncoderWeights | TextEncoderWeights:
    """Allocate the weights of an encoder without contents."""
    if isinstance(spec, AudioEncoder):
        return AudioEncoderWeights(spec, layers, allocate, eps)
    return TextEncoderWeights(spec, layers, allocate)
