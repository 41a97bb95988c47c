"""The model of a configuration, in the weight format that it chooses."""

from __future__ import annotations

from dataclasses import replace

from phonograph.config.engine_config import EngineConfig
from phonograph.errors import ConfigError
from phonograph.files.model_files import is_gguf, model_path
from phonograph.models.quantization.float8 import Fp8Head
from phonograph.models.quantization.quantization_config import choose_quantization
from phonograph.models.spec import ModelSpec, read_model_spec


def read_configured_model(config: EngineConfig, *, config_only: bool) -> ModelSpec:
    """Return the spec of the configured model, in the configured weight format.

    Raises:
        ConfigError: the checkpoint is in another weight format, or its head cannot be converted.
        ModelError: as `read_model_spec`.
    """
    folder = model_path(
        config.model, revision=config.revision, config_only=config_only, download_dir=config.download_dir
    )
    if config.quantize_lm_head is not None and is_gguf(folder):
        raise ConfigError("quantize_lm_head", config.quantize_lm_head, f"{folder} is a GGUF file; leave it out")
    spec = read_model_spec(
        folder,
        trust_remote_code=config.trust_remote_code,
        hf_overrides=config.hf_overrides,
        convert=config.convert,
        model_impl=config.model_impl,
    )
    if spec.fp8_kv_cache and config.kv_cache_dtype != "fp8":
        note = "the checkpoint has scales for a KV cache in FP8, which kv_cache_dtype=fp8 uses"
        spec = replace(spec, notes=(*spec.notes, note))
    if config.quantize_lm_head is not None:
        spec = spec.with_head_scheme(Fp8Head(origin="FP8, made at load", scales="channel"))
    quantization = choose_quantization(spec.quantization, config.quantization)
    return spec if quantization is spec.quantization else spec.with_quantization(quantization)
