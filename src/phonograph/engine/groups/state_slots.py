"""States of a model's layers in the slots of requests: their bytes, their support of graphs, and what they exclude."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import DeviceSpec
from phonograph.errors import ConfigError, UnsupportedModelError
from phonograph.graphs.modes import Support
from phonograph.models.layers.states.state_mixer import slot_bytes
from phonograph.models.spec import DTYPE_BYTES, ModelSpec


def state_bytes(model: ModelSpec, dtype: str) -> int:
    """Return the bytes of all states of a sequence; 0 for a model without any."""
    return sum(slot_bytes(mixer, DTYPE_BYTES[dtype]) for mixer in model.states.values())


def mixer_names(model: ModelSpec) -> str:
    """Return the names of the kinds of mixers with a state."""
    return ", ".join(dict.fromkeys(mixer.name for mixer in model.states.values()))


def weakest_of(support: Support, model: ModelSpec) -> Support:
    """Return the lowest level of graph support among the attention's and those of the mixers with a state."""
    supports: Iterable[Support] = (mixer.graph_support for mixer in model.states.values())
    return min([support, *supports], key=lambda one: one.level)


def prefix_cache_note(config: EngineConfig, model: ModelSpec, num_checkpoints: int) -> str | None:
    """Return a note on the prefix cache of a model whose layers have states; None for others, and without the cache."""
    if not model.states or not config.enable_prefix_caching:
        return None
    if not num_checkpoints:
        return (
            f"prefix cache off: state_checkpoint_share={config.state_checkpoint_share} of the KV cache has no room for "
            f"a checkpoint of the states ({mixer_names(model)})"
        )
    interval = config.state_checkpoint_interval
    every = f", and every {interval} tokens (state_checkpoint_interval)" if interval else ""
    return (
        f"prefix cache: {num_checkpoints} checkpoints of the states ({mixer_names(model)}), at the last block of a "
        f"prompt and at the end of a prefix that prompts share{every}"
    )


def check_interval(config: EngineConfig, model: ModelSpec, block_sizes: Iterable[int]) -> None:
    """Check that checkpoints end with a block in every KV group.

    Raises:
        ConfigError: they do not.
    """
    interval, step = config.state_checkpoint_interval, lcm(*block_sizes)
    if model.states and interval % step:
        problem = f"must be a multiple of the block size; {-(-interval // step) * step} works"
        raise ConfigError("state_checkpoint_interval", interval, problem)


def check_states(config: EngineConfig, model: ModelSpec, dtype: str, device: DeviceSpec) -> None:
    """Check that settings and device fit the layers with a state, if there are any.

    Raises:
        ConfigError: a setting does not; the message says what works.
        UnsupportedModelError: there are no kernels for the device.
    """
    if not model.states:
        return
    names = mixer_names(model)
    if model.pooler is not None:
        raise UnsupportedModelError(f"{config.model}: a model with a {names} that pools is not supported; text works")
    refusals = [] if device.kind == "cpu" else [mixer.gpu_refusal for mixer in model.states.values()]
    for refusal in filter(None, refusals):
        raise UnsupportedModelError(f"{config.model}: {refusal}; device=cpu works")
    if dtype == "float16":
        problem = f"decays of {names} may overflow in float16; bfloat16 or float32 works"
        raise ConfigError("dtype", dtype, problem)
    if config.kv_cache_dtype.startswith("fp8"):
        problem = f"states of {names} are float32, and beside them FP8 keys are not tested; auto works"
        raise ConfigError("kv_cache_dtype", config.kv_cache_dtype, problem)
    if config.batch_invariant:
        problem = f"chunks of {names} depend on the other sequences of a step; leave it out"
        raise ConfigError("batch_invariant", True, problem)
    if config.speculation is not None:
        problem = f"a state of {names} cannot go back behind a draft that was not accepted; leave it out"
        raise ConfigError("speculative_config", config.speculation.note, problem)
