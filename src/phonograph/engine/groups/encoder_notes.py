"""Notes and refusals of a model whose decoder attends to the states of an encoder of audio."""

from __future__ import annotations

from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import DeviceSpec
from phonograph.errors import ConfigError, UnsupportedModelError
from phonograph.models.spec import ModelSpec
from phonograph.models.weights.tensor_parallel import SETTING

_UNSUPPORTED = {
    "speculative_config": None,
    "num_speculative_tokens": 0,
    "quantization": None,
    "quantize_lm_head": None,
    "kv_cache_dtype": "auto",
    "enable_sleep_mode": False,
    SETTING: 1,
}
"""Settings without a rule for encoders of audio, with the only value that works."""


def encoder_notes(config: EngineConfig, model: ModelSpec, device: DeviceSpec) -> list[str]:
    """Return notes on the encoder of audio; none without one.

    Raises:
        ConfigError: a setting has no rule for it yet.
        UnsupportedModelError: nor has the device.
    """
    if model.encoder is None:
        return []
    if device.kind != "cpu":
        raise UnsupportedModelError(f"{model.architecture} does not run on a GPU yet; device=cpu works")
    for name, works in _UNSUPPORTED.items():
        if (value := getattr(config, name)) != works:
            raise ConfigError(name, value, f"{model.architecture} has no rule for it yet; leave it out")
    if model.quantization is not None:
        raise ConfigError("quantization", model.quantization.name, f"{model.architecture} has weights of 16 or 32 bits")
    return [
        f"each audio has {model.encoder.num_positions} positions of the encoder in a KV group of their own; the "
        "encoder runs once a request, before its first step, outside of graphs",
        "no prefix cache: keys of the decoder depend on the audio, and its prompts are shorter than a block",
    ]
