"""Encoders whose states a decoder's cross attention reads, as plain values: of audio (Whisper) and of text (BART).

The server's process knows them, which does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from phonograph.errors import ModelError, shortened
from phonograph.models.config_fields import INTS
from phonograph.models.heads.pooler_spec import InputEmbedding

if TYPE_CHECKING:
    from phonograph.models.layer_spec import LayerSpec

PREFIX = "model.encoder"
"""Prefix of the names of the encoder's tensors."""
POSITIONS_PER_SECOND = 50
_FRAMES = {
    **{"feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": 16000, "hop_length": 160, "n_fft": 400},
    **{"padding_value": 0, "dither": 0, "do_normalize": False},
}
"""Fields of preprocessor_config.json by which frames are made, with the only values that work."""
TAPS = 3
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
            yield f"conv{number}.weight", (size, inputs, TAPS)
            yield f"conv{number}.bias", (size,)
        yield "embed_positions.weight", (self.num_positions, size)
        yield "layer_norm.weight", (size,)
        yield "layer_norm.bias", (size,)


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
