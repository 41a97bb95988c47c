"""Notes and refusals of a model whose decoder attends to the states of an encoder."""

from __future__ import annotations

from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import DeviceSpec
from phonograph.core.limits import Limits
from phonograph.errors import ConfigError
from phonograph.models.heads.encoder_specs import AudioEncoder, TextEncoder
from phonograph.models.layer_spec import LayerFeedForward
from phonograph.models.spec import DTYPE_BYTES, ModelSpec
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


_MOST_AUDIOS = 8
"""Audios of the largest graph of an encoder. Those of 12,000 positions keep a GPU busy."""


def max_audios(model: ModelSpec, max_num_seqs: int, device: DeviceSpec) -> int:
    """Return the audios that a GPU encodes at a time; 0 on a CPU, which encodes one after another, and for texts."""
    if not isinstance(model.encoder, AudioEncoder) or device.kind == "cpu":
        return 0
    return min(_MOST_AUDIOS, 1 << (max_num_seqs.bit_length() - 1))


def encoder_bytes(model: ModelSpec, dtype: str, limits: Limits) -> int:
    """Estimate the memory of the encoder on a GPU: inputs, and twice the intermediates of the largest batch, or text.

    Libraries load their kernels in a run before the capture, whose memory is not that of the graphs.
    """
    encoder = model.encoder
    if encoder is None:
        return 0
    size, num_mel_bins = encoder.hidden_size, encoder.num_mel_bins if isinstance(encoder, AudioEncoder) else 0
    inner = max(
        layer.feed_forward.down.num_inputs
        for layer in encoder.layers
        if isinstance(layer.feed_forward, LayerFeedForward)
    )
    # The stream with its norm, and projections, the input of the second convolution or both ends of the activation.
    width = 2 * size + max(6 * size, 2 * inner, 4 * num_mel_bins + 4 * size)
    return DTYPE_BYTES[dtype] * max(limits.max_audios, 1) * encoder.num_positions * (2 * num_mel_bins + 2 * width)


def encoder_notes(config: EngineConfig, model: ModelSpec, limits: Limits, device: DeviceSpec) -> list[str]:
    """Return notes on the encoder; none without one.

    Raises:
        ConfigError: a setting has no rule for it yet.
    """
    if model.encoder is None:
        return []
    for name, works in _UNSUPPORTED.items():
        if (value := getattr(config, name)) != works:
            raise ConfigError(name, value, f"{model.architecture} has no rule for it yet; leave it out")
    if model.quantization is not None:
        raise ConfigError("quantization", model.quantization.name, f"{model.architecture} has weights of 16 or 32 bits")
    is_text = isinstance(model.encoder, TextEncoder)
    graphs = f"in graphs of its own, for up to {limits.max_audios} audios" if limits.max_audios else "outside of graphs"
    return [
        f"each {'text has up to' if is_text else 'audio has'} {model.encoder.num_positions} positions of the encoder "
        f"in a KV group of their own; the encoder runs before the first step of a request, {graphs}; with the prefix "
        "cache, once for each of them",
    ]
