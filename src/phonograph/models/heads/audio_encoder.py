"""Encoder of audio: log-mel frames become the states that a decoder's cross attention reads (Whisper).

Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022, arXiv:2212.04356): two convolutions,
of which the second halves the frames, learned positions, layers that look to both sides, and a norm. The layers are
those of a kernel set; each audio has the same number of frames, so that attention needs no pages.

Shapes: B audios, M mel bins, P positions, E hidden size, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch.nn import functional

from phonograph.kernels.torch.layers import layer_norm
from phonograph.models.heads.encoder_ends import InputWeights
from phonograph.models.heads.encoder_specs import PREFIX, TAPS, AudioEncoder
from phonograph.models.layers.kernel_set import Attend, FeedForwardPart, InputPart, MixerPart, Step, Stream
from phonograph.models.layers.linear import WeightAllocator, norm_views
from phonograph.models.layers.part_weights import LayerWeights


class EncoderLayers:
    """Layers of an encoder, on a kernel set.

    Attributes:
        layers: their weights.
        input: tables of the input; None for audio.
    """

    input: InputWeights | None = None
    _begin: InputPart | None = None

    def __init__(self, layers: list[LayerWeights]) -> None:
        self.layers = layers
        self._parts: list[tuple[MixerPart, FeedForwardPart]] = []

    def bind(self, parts: Iterable[tuple[MixerPart | None, FeedForwardPart | None]], begin: InputPart | None) -> None:
        """Take the parts of the layers, which have both, and that of the input, if it has tables."""
        self._parts = [(mixer, after) for mixer, after in parts if mixer is not None and after is not None]
        self._begin = begin

    def run(self, stream: Stream, num_positions: int) -> Stream:
        """Return the stream behind the layers, of inputs with `num_positions` each."""
        step = Step([], cast("Attend", _WholeAttention(num_positions)))
        for mixer, feed_forward in self._parts:
            stream = feed_forward(mixer(stream, step))
        return stream

    def with_layers(self, views: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the destinations of an encoder's tensors, and those of the layers, by the names in a checkpoint."""
        for index, layer in enumerate(self.layers):
            views |= {f"layers.{index}.{name}": view for name, view in layer.checkpoint_views().items()}
        return {f"{PREFIX}.{name}": view for name, view in views.items()}


class AudioEncoderWeights(EncoderLayers):
    """Weights of the encoder, and its forward pass.

    Attributes:
        spec: the encoder as values.
    """

    def __init__(self, spec: AudioEncoder, layers: list[LayerWeights], allocate: WeightAllocator, eps: float) -> None:
        super().__init__(layers)
        self.spec = spec
        self._eps = eps
        self._norm_2E = allocate.layer_norm(spec.hidden_size, bias=True)
        shapes = {name: shape for name, shape in spec.tensors() if not name.startswith("layer_norm")}
        self._tensors = {name: allocate.tensor(*shape) for name, shape in shapes.items()}

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Return the destination of each tensor of a checkpoint by its name."""
        return self.with_layers(self._tensors | norm_views("layer_norm", self._norm_2E))

    def __call__(self, features_BMF: torch.Tensor) -> torch.Tensor:
        """Return the states [B * P, E] of audios.

        Args:
            features_BMF: log-mel frames, F = 2 * P of each audio, in the model's type.
        """
        x_BFE = self._convolved(1, features_BMF, stride=1)
        x_BPE = self._convolved(2, x_BFE.transpose(1, 2), stride=2)
        stream = Stream((x_BPE + self._tensors["embed_positions.weight"]).flatten(0, 1))
        return layer_norm(self.run(stream, self.spec.num_positions).hidden_TE, self._norm_2E, self._eps)

    def _convolved(self, number: int, x_BCF: torch.Tensor, *, stride: int) -> torch.Tensor:
        """Return a convolution over frames with its activation, as one product: [B, F / stride, E]."""
        weight_ECX, bias_E = (self._tensors[f"conv{number}.{name}"] for name in ("weight", "bias"))
        taps_BCFX = functional.pad(x_BCF, (1, 1)).unfold(2, TAPS, stride)
        return functional.gelu(functional.linear(taps_BCFX.transpose(1, 2).flatten(2), weight_ECX.flatten(1), bias_E))


class _WholeAttention:
    """Attention of each token to all tokens of its audio, without a cache; see `Attend`."""

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions

    def __call__(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, layer: int) -> torch.Tensor:
        q, k, v = (x_THD.unflatten(0, (-1, self._num_positions)).transpose(1, 2) for x_THD in (q_THD, k_THD, v_THD))
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1).contiguous()
