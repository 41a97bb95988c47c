"""Recordings of requests: the bytes of a file become samples, and parts that the model hears at a time."""

from __future__ import annotations

import io
import wave
from importlib.util import find_spec
from typing import Any

import numpy as np

from phonograph.engine.offline.audio_prompts import SAMPLING_RATE, checked_samples
from phonograph.errors import RequestError
from phonograph.server.http.api_errors import ApiError, invalid

MOST_SECONDS = 1800
"""Longest recording, whose frames take 60 MB."""
_QUIET = SAMPLING_RATE // 10
"""Samples whose energy is compared to find a pause."""
_FULL_SCALE = {1: 128.0, 2: 2.0**15, 3: 2.0**31, 4: 2.0**31}
"""Amplitude of samples by their bytes; those of 3 bytes are read as 4."""


def read_samples(content: bytes) -> np.ndarray:
    """Return the samples of a file at `SAMPLING_RATE`, float32 [N], the mean of its channels.

    PCM in WAV needs no library. The package soundfile, if it is installed, reads FLAC, MP3, OGG and other WAV.

    Raises:
        ApiError: the file is not audio, has none, or is too long.
    """
    if not content:
        raise invalid("file", "file: is empty; a recording works")
    try:
        samples_NC, rate = _read_wav(content)
    except (wave.Error, EOFError) as error:
        if find_spec("soundfile") is None:
            problem = f"file: holds no WAV file of PCM ({error}); the package soundfile, which reads others, is missing"
            raise invalid("file", problem, code="invalid_audio") from None
        samples_NC, rate = _read_by_soundfile(content)
    try:
        return checked_samples((samples_NC.mean(1, dtype=np.float32), rate))
    except RequestError as error:
        raise invalid("file", f"file: {error}", code="invalid_audio") from None


def _read_wav(content: bytes) -> tuple[np.ndarray, int]:
    """Return samples [N, C] and their rate."""
    with wave.open(io.BytesIO(content)) as file:
        width, rate = file.getsampwidth(), file.getframerate()
        _check_length(file.getnframes(), rate)
        data = file.readframes(file.getnframes())
        channels = file.getnchannels()
    data = data[: len(data) // (width * channels) * width * channels]
    if width == 1:
        values = np.frombuffer(data, np.uint8).astype(np.float32) - 128
    elif width == 3:
        padded = np.zeros((len(data) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        values = padded.view("<i4")[:, 0].astype(np.float32)
    else:
        values = np.frombuffer(data, f"<i{width}").astype(np.float32)
    return (values / _FULL_SCALE[width]).reshape(-1, channels), rate


def _read_by_soundfile(content: bytes) -> tuple[np.ndarray, int]:
    import soundfile  # pyright: ignore[reportMissingImports]

    reader: Any = soundfile
    try:
        with reader.SoundFile(io.BytesIO(content)) as file:
            _check_length(file.frames, file.samplerate)
            return file.read(dtype="float32", always_2d=True), file.samplerate
    except ApiError:
        raise
    except RuntimeError as error:
        raise invalid("file", f"file: is not audio that soundfile reads ({error})", code="invalid_audio") from None


def _check_length(num_samples: int, rate: int) -> None:
    if not num_samples:
        raise invalid("file", "file: has no samples; a recording works", code="invalid_audio")
    if num_samples > MOST_SECONDS * max(rate, 1):
        seconds = num_samples / max(rate, 1)
        raise invalid("file", f"file: {seconds:.0f} s; recordings have {MOST_SECONDS} s at most: send parts of it")


def parts_of(samples_N: np.ndarray, most: int) -> list[np.ndarray]:
    """Return parts of at most `most` samples; a cut is where the last second of what fits is the quietest."""
    parts: list[np.ndarray] = []
    while len(samples_N) > most:
        end = samples_N[most - SAMPLING_RATE : most]
        energies = np.square(end[: len(end) // _QUIET * _QUIET].reshape(-1, _QUIET)).sum(1)
        cut = most - SAMPLING_RATE + int(energies.argmin()) * _QUIET + _QUIET // 2
        parts.append(samples_N[:cut])
        samples_N = samples_N[cut:]
    return [*parts, samples_N]
