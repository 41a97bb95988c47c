"""Recordings of a speech benchmark: noise, or the files of a folder."""

from __future__ import annotations

import io
import random
import wave
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from phonograph.bench.serving.settings import ServingRequest
from phonograph.errors import ConfigError

_RATE = 16000
_AMPLITUDE = 1000


def noise(rng: random.Random, seconds: int) -> ServingRequest:
    """Return white noise, as a WAV file of 16 kHz."""
    samples = np.random.default_rng(rng.getrandbits(32)).integers(-_AMPLITUDE, _AMPLITUDE, seconds * _RATE, "<i2")
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setparams((1, 2, _RATE, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return ServingRequest(prompt=content.getvalue(), output_len=0, seconds=seconds)


def read_recordings(path: Path) -> list[ServingRequest]:
    """Read a recording, or all files of a folder in the order of their names.

    Raises:
        ConfigError: there is none, or one of them is not audio.
    """
    try:
        files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
        found = [(file, file.read_bytes()) for file in files]
    except OSError as error:
        raise ConfigError("dataset_path", str(path), f"cannot be read: {error}") from error
    if not found:
        raise ConfigError("dataset_path", str(path), "has no files; a folder of recordings works")
    return [ServingRequest(prompt=content, output_len=0, seconds=_seconds(file, content)) for file, content in found]


def _seconds(path: Path, content: bytes) -> float:
    try:
        with wave.open(io.BytesIO(content)) as file:
            return file.getnframes() / file.getframerate()
    except (wave.Error, EOFError) as error:
        if find_spec("soundfile") is None:
            problem = (
                f"{path.name} is no WAV file of PCM ({error}); the package soundfile, which reads others, is missing"
            )
            raise ConfigError("dataset_path", str(path.parent), problem) from None
    import soundfile  # pyright: ignore[reportMissingImports]

    try:
        return soundfile.info(io.BytesIO(content)).duration
    except RuntimeError as error:
        raise ConfigError("dataset_path", str(path), f"is not audio that soundfile reads ({error})") from None
