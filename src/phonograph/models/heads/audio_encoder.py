"""Encoder of audio: log-mel frames become the states that a decoder's cross attention reads (Whisper).

Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022, arXiv:2212.04356): two convolutions,
of which the second halves the frames, learned positions, layers that look to both sides, and a norm. The layers are
those of a kernel set; each audio has the same number of frames, so that attention needs no pages.

Shapes: B audios, M mel bins, P positions, E hidden size, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional

from phonograph.errors import ModelError, shortened
from phonograph.kernels.torch.layers import layer_norm
from phonograph.models.config_fields import INTS
from phonograph.models.layer_spec import LayerSpec
from phonograph.models.layers.linear import WeightAllocator, norm_views

if TYPE_CHECKING:
    from phonograph.models.heads.encoder_ends import InputWeights
    from phonograph.models.layers.kernel_set import Attend, FeedForwardPart, InputPart, MixerPart, Stream
    from phonograph.models.layers.part_weights import LayerWeights

PREFIX = "model.encoder"
"""Prefix of the names of the encoder's tensors."""
POSITIONS_PER_SECOND = 50
_FRAMES = {
    **{"feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": 16000, "hop_length": 160, "n_fft": 400},
    **{"padding_value": 0, "dither": 0, "do_normalize": False},
}
"""Fields of preprocessor_config.json by which frames are made, with the only values that work."""
_TAPS = 3
"""Frames that a convolution reads."""


@dataclass(frozen=True, kw_only=True)
class AudioEncoder:
    """The encoder as plain values.

    Attributes:
        num_mel_bins: M, numbers of a frame.
        num_positions: P, states of an audio, which has 2 * P frames.
        hidden_size: E, that of the decoder too.
        layers: layers without rope and window.
        suppressed: tokens that the decoder never writes.
        suppressed_first: tokens that it does not begin with either.
        no_timestamps: token of prompts after which it writes no timestamps, which are the tokens above; None if
            generation_config.json has none.
        max_first_timestamp: number of the latest timestamp that it begins with; None for any.
        alignment_heads: layer and head of each cross attention that shows when a token is spoken; empty if unknown.
        median_width: positions whose median smooths these heads.
    """

    num_mel_bins: int
    num_positions: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    no_timestamps: int | None = None
    max_first_timestamp: int | None = None
    alignment_heads: tuple[tuple[int, int], ...] = ()
    median_width: int = 7

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of an input: log-mel frames."""
        return self.num_mel_bins, 2 * self.num_positions

    @property
    def first_timestamp(self) -> int | None:
        """Token of the time 0; None for a model without timestamps."""
        return None if self.no_timestamps is None else self.no_timestamps + 1

    def suppressing(
        self, generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int, of_decoder: tuple[int, int]
    ) -> AudioEncoder:
        """Return the encoder with the tokens that generation_config.json, or else config.json, suppresses.

        Args:
            generation: generation_config.json.
            config: config.json.
            vocab_size: tokens of the model.
            of_decoder: layers and heads of the decoder.

        Raises:
            ModelError: they are no list of integers, or a token or number of timestamps or an alignment head is none.
        """
        found: list[tuple[int, ...]] = []
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            tokens = generation.get(name, config.get(name)) or []
            if not INTS.accepts(tokens):
                raise ModelError(f"{name}={shortened(repr(tokens))} must be {INTS.works} or null")
            found.append(tuple(token for token in tokens if 0 <= token < vocab_size))
        numbers: list[int | None] = []
        for name in ("no_timestamps_token_id", "max_initial_timestamp_index"):
            number = generation.get(name)
            is_number = isinstance(number, int) and not isinstance(number, bool)
            if number is not None and not (is_number and number in range(vocab_size)):
                raise ModelError(
                    f"{name}={shortened(repr(number))} must be a number below vocab_size={vocab_size} or null"
                )
            numbers.append(number)
        if numbers[0] is not None and not vocab_size % 32:
            # Masks have a bit after the vocabulary for the rule of `prefer_timestamps`.
            raise ModelError(
                f"no_timestamps_token_id={numbers[0]} needs a vocab_size that is no multiple of 32; leave it out"
            )
        heads = generation.get("alignment_heads") or []
        known = {(layer, head) for layer, head in product(*map(range, of_decoder))}
        if not isinstance(heads, list) or not all(isinstance(pair, list) and tuple(pair) in known for pair in heads):
            problem = f"must be null or pairs of a layer and a head below {of_decoder}"
            raise ModelError(f"alignment_heads={shortened(repr(heads))} {problem}")
        suppressed, suppressed_first = found
        return replace(
            self,
            suppressed=suppressed,
            suppressed_first=suppressed_first,
            no_timestamps=numbers[0],
            max_first_timestamp=numbers[1],
            alignment_heads=tuple((layer, head) for layer, head in heads),
        )

    def check_frames(self, preprocessor: Mapping[str, Any]) -> None:
        """Check that a preprocessor makes the frames that the encoder gets.

        Args:
            preprocessor: of preprocessor_config.json, or of processor_config.json where transformers 5 writes it.

        Raises:
            ModelError: it makes others.
        """
        inner = preprocessor.get("feature_extractor")
        found = cast("Mapping[str, Any]", inner) if isinstance(inner, dict) else preprocessor
        works = {**_FRAMES, "feature_size": self.num_mel_bins}
        works["chunk_length"] = self.num_positions // POSITIONS_PER_SECOND
        for name, value in works.items():
            if found.get(name) not in (None, value):
                raise ModelError(f"{name}={shortened(repr(found[name]))} of the preprocessor: only {value} works")

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name behind the prefix and the shape of each tensor that is of no layer."""
        size = self.hidden_size
        for number, inputs in ((1, self.num_mel_bins), (2, size)):
            yield f"conv{number}.weight", (size, inputs, _TAPS)
            yield f"conv{number}.bias", (size,)
        yield "embed_positions.weight", (self.num_positions, size)
        yield "layer_norm.weight", (size,)
        yield "layer_norm.bias", (size,)


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
        from phonograph.models.layers.kernel_set import Step

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
        from phonograph.models.layers.kernel_set import Stream

        x_BFE = self._convolved(1, features_BMF, stride=1)
        x_BPE = self._convolved(2, x_BFE.transpose(1, 2), stride=2)
        stream = Stream((x_BPE + self._tensors["embed_positions.weight"]).flatten(0, 1))
        return layer_norm(self.run(stream, self.spec.num_positions).hidden_TE, self._norm_2E, self._eps)

    def _convolved(self, number: int, x_BCF: torch.Tensor, *, stride: int) -> torch.Tensor:
        """Return a convolution over frames with its activation, as one product: [B, F / stride, E]."""
        weight_ECX, bias_E = (self._tensors[f"conv{number}.{name}"] for name in ("weight", "bias"))
        taps_BCFX = functional.pad(x_BCF, (1, 1)).unfold(2, _TAPS, stride)
        return functional.gelu(functional.linear(taps_BCFX.transpose(1, 2).flatten(2), weight_ECX.flatten(1), bias_E))


class _WholeAttention:
    """Attention of each token to all tokens of its audio, without a cache; see `Attend`."""

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions

    def __call__(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, layer: int) -> torch.Tensor:
        q, k, v = (x_THD.unflatten(0, (-1, self._num_positions)).transpose(1, 2) for x_THD in (q_THD, k_THD, v_THD))
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1).contiguous()
