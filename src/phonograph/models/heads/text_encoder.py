"""Encoder of text whose states a decoder's cross attention reads (BART).

Lewis et al., "BART: Denoising Sequence-to-Sequence Pre-training" (2020, arXiv:1910.13461): embeddings of the tokens,
which are those of the decoder, learned positions, a norm of the sum, and layers that look to both sides.

Shapes: P tokens of the encoder's prompt, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from phonograph.errors import ModelError, shortened
from phonograph.models.heads.audio_encoder import AudioEncoder, AudioEncoderWeights, EncoderLayers
from phonograph.models.heads.encoder_ends import InputWeights
from phonograph.models.heads.pooler_spec import InputEmbedding
from phonograph.models.layer_spec import LayerSpec
from phonograph.models.layers.linear import WeightAllocator

if TYPE_CHECKING:
    from phonograph.models.layers.part_weights import LayerWeights

_NAMES = {"positions.": "embed_positions.", "embed_norm.": "layernorm_embedding."}
"""Beginnings of the names of an input's tensors, and those in checkpoints."""


@dataclass(frozen=True, kw_only=True)
class TextEncoder:
    """The encoder as plain values.

    Attributes:
        num_positions: tokens of its longest prompt.
        hidden_size: E, that of the decoder too.
        layers: layers without rope and window.
        input: positions and norm beside the embeddings of tokens.
        start: tokens that begin the decoder's prompts.
    """

    num_positions: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    input: InputEmbedding
    start: tuple[int, ...]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the longest input: its token ids."""
        return (self.num_positions,)

    def starting(self, generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int) -> TextEncoder:
        """Return the encoder with the token that generation_config.json, or else config.json, writes first.

        Raises:
            ModelError: a token is not of the vocabulary.
        """
        name = "forced_bos_token_id"
        forced = generation.get(name, config.get(name))
        start = self.start if forced is None else (*self.start, forced)
        if not all(type(token) is int and 0 <= token < vocab_size for token in start):
            problem = f"must be tokens below vocab_size={vocab_size}"
            raise ModelError(f"decoder_start_token_id and {name}={shortened(repr(start))} {problem}")
        return replace(self, start=start)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name behind the prefix and the shape of each tensor that is of no layer."""
        yield "embed_positions.weight", (self.input.positions, self.hidden_size)
        yield "layernorm_embedding.weight", (self.hidden_size,)
        yield "layernorm_embedding.bias", (self.hidden_size,)


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
