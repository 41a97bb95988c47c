"""Prompts with audio: samples become the log-mel frames that a model's encoder reads, by transformers' extractor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from numbers import Integral
from typing import Any, cast

import numpy as np

from phonograph.core.token_types import EncoderTokens
from phonograph.engine.admission import Prompt
from phonograph.engine.offline.prompts import plain_prompt
from phonograph.engine.offline.text_pairs import text_pair
from phonograph.errors import RequestError, counted, shortened
from phonograph.models.heads.encoder_specs import AudioEncoder, TextEncoder
from phonograph.text.tokenizer import Tokenizer

SAMPLING_RATE = 16000
"""Samples of a second that the encoder's frames are made of."""
SAMPLES_PER_POSITION = 320
"""Samples of a position of the encoder: two frames."""
_RATES = range(1000, 384001, 25)
"""Rates that are resampled: the kernel has a row for each sample of the shortest common period."""
_ZERO_CROSSINGS = 64
_WORKS = '{"audio": (samples, sampling_rate)} with one dimension of floats works'


def encoder_prompt(prompt: object, tokenizer: Tokenizer | None, encoder: AudioEncoder | TextEncoder | None) -> Prompt:
    """Return a prompt, with the frames of its audio if it has some, or with its text for the encoder.

    Args:
        prompt: as for `plain_prompt`; or a mapping with `multi_modal_data` too; or one with `encoder_prompt`, which has
            that, and `decoder_prompt`, which is text or token ids. For an encoder of text see `text_pair`.
        tokenizer: of the text.
        encoder: encoder of the model, or None.

    Raises:
        RequestError: the prompt has another form, or its audio cannot be used.
    """
    if isinstance(encoder, TextEncoder):
        return text_pair(prompt, tokenizer, encoder)
    if encoder is None or not isinstance(prompt, Mapping):
        return plain_prompt(prompt)
    entries = dict(cast("Mapping[str, Any]", prompt))
    if "encoder_prompt" in entries:
        outer, inner = entries, entries["encoder_prompt"]
        if not isinstance(inner, Mapping) or set(outer) - {"encoder_prompt", "decoder_prompt", "cache_salt"}:
            problem = "must be a mapping with multi_modal_data, next to decoder_prompt"
            raise RequestError("encoder_prompt", shortened(repr(inner)), problem)
        given = cast("Mapping[str, Any]", inner)
        if set(given) - {"prompt", "multi_modal_data"} or given.get("prompt"):
            raise RequestError("encoder_prompt", shortened(repr(list(given))), f"has audio alone; {_WORKS}")
        data, decoder = given.get("multi_modal_data"), outer.get("decoder_prompt")
        entries = {"prompt" if isinstance(decoder, str) else "prompt_token_ids": decoder}
    else:
        data = entries.pop("multi_modal_data", None)
    text = plain_prompt(entries)
    if not data:
        return text
    if not isinstance(data, Mapping) or list(cast("Mapping[str, Any]", data)) != ["audio"]:
        raise RequestError("multi_modal_data", shortened(repr(data)), _WORKS)
    if isinstance(text, str):
        if tokenizer is None:
            raise RequestError("prompt", text, "is text, and the engine runs without a tokenizer; give token ids")
        text = tokenizer.encode(text, add_special_tokens=False)
    return EncoderTokens(text, log_mel(checked_samples(cast("Mapping[str, Any]", data)["audio"]), encoder))


def checked_samples(audio: object) -> np.ndarray:
    """Return the samples of audio at `SAMPLING_RATE`, float32 [N].

    Args:
        audio: samples, one dimension of floats between -1 and 1, and their rate; or a list of one such pair.

    Raises:
        RequestError: it is something else.
    """
    if isinstance(audio, list) and len(cast("list[object]", audio)) == 1:
        (audio,) = cast("list[object]", audio)
    if not isinstance(audio, tuple) or len(cast("tuple[object, ...]", audio)) != 2:
        raise RequestError("audio", shortened(repr(audio)), _WORKS)
    values, rate = cast("tuple[Any, Any]", audio)
    if isinstance(rate, bool) or not isinstance(rate, Integral) or int(rate) not in _RATES:
        problem = f"must be a multiple of {_RATES.step} from {_RATES.start} to {_RATES[-1]} samples a second"
        raise RequestError("sampling_rate", shortened(repr(rate)), problem)
    samples = np.asarray(values)
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise RequestError("audio", f"{samples.dtype} {list(samples.shape)}", f"is of another form; {_WORKS}")
    if not len(samples) or not np.isfinite(samples).all():
        problem = "has samples that are not finite" if len(samples) else "has no samples"
        raise RequestError("audio", f"{counted(len(samples), 'sample')}", f"{problem}; recorded sound works")
    return resampled(samples.astype(np.float32), int(rate))


def resampled(samples_N: np.ndarray, rate: int) -> np.ndarray:
    """Return samples at `SAMPLING_RATE`, by the sinc function under a Hann window.

    It is the band-limited interpolation of J. O. Smith's "Digital Audio Resampling". Frequencies above half of the
    lower rate are cut.

    Args:
        samples_N: float32.
        rate: one of `_RATES`.
    """
    if rate == SAMPLING_RATE:
        return samples_N
    # The server's process does without them where no audio has another rate.
    import torch
    from torch.nn import functional

    common = math.gcd(rate, SAMPLING_RATE)
    old, new = rate // common, SAMPLING_RATE // common
    cutoff = 0.99 * min(old, new)
    width = math.ceil(_ZERO_CROSSINGS * old / cutoff)
    # Row i of the kernel makes sample i of each period of `new` from `old` samples and those around them.
    times = torch.arange(-width, width + old, dtype=torch.float64) / old - torch.arange(new)[:, None] / new
    times = (times * cutoff).clamp(-_ZERO_CROSSINGS, _ZERO_CROSSINGS)
    kernel = torch.sinc(times) * (times * math.pi / _ZERO_CROSSINGS / 2).cos() ** 2 * (cutoff / old)
    padded = functional.pad(torch.from_numpy(samples_N)[None, None], (width, width + old))
    found = functional.conv1d(padded, kernel.float()[:, None], stride=old)[0].T.flatten()
    return found[: math.ceil(len(samples_N) * new / old)].numpy()


def log_mel(samples_N: np.ndarray, encoder: AudioEncoder) -> np.ndarray:
    """Return the log-mel frames of audio, float32 [M, F], padded with silence to the length that the encoder reads.

    Args:
        samples_N: at `SAMPLING_RATE`.
        encoder: of the model.

    Raises:
        RequestError: the audio is longer.
    """
    most = encoder.num_positions * SAMPLES_PER_POSITION
    if len(samples_N) > most:
        seconds = f"{len(samples_N) / SAMPLING_RATE:.2f} s"
        raise RequestError("audio", seconds, f"the model hears {most / SAMPLING_RATE:g} s at a time; give parts of it")
    extract = _extractor(encoder.num_mel_bins, most // SAMPLING_RATE)
    return extract(samples_N, sampling_rate=SAMPLING_RATE, return_tensors="np")["input_features"][0]


@lru_cache(maxsize=1)
def _extractor(num_mel_bins: int, seconds: int) -> Any:
    # It takes a second to import.
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=num_mel_bins, chunk_length=seconds)
