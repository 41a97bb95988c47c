"""Settings that a model which transformers' module runs does not have."""

from __future__ import annotations

from phonograph.config.engine_config import EngineConfig
from phonograph.errors import ConfigError
from phonograph.models.modules.module_spec import ModuleSpec
from phonograph.models.spec import ModelSpec


def check_module(config: EngineConfig, model: ModelSpec) -> None:
    """Check that the settings work with transformers' module, if one runs the model.

    Raises:
        ConfigError: one of them does not.
    """
    if not isinstance(model, ModuleSpec):
        if config.model_impl == "transformers":
            raise ConfigError("model_impl", "transformers", "a GGUF file has no module of transformers; auto works")
        return
    unsupported = {
        "tensor_parallel_size": config.tensor_parallel_size > 1,
        "speculative_config": config.speculation is not None and config.speculation.model is not None,
        "quantization": config.quantization is not None,
        "quantize_lm_head": config.quantize_lm_head is not None,
        "convert": config.convert == "embed",
        "enable_sleep_mode": config.enable_sleep_mode,
        "expert_load_metrics": config.expert_load_metrics,
        "batch_invariant": config.batch_invariant,
    }
    for name, is_set in unsupported.items():
        if is_set:
            problem = f"transformers' module runs {model.architecture}, which does not have this; leave it out"
            raise ConfigError(name, getattr(config, name), problem)
