"""States of a model's layers in the slots of requests: their bytes, their support of graphs, and what they exclude."""

from __future__ import annotations

from collections.abc import Iterable

from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import DeviceSpec
from phonograph.errors import ConfigError, UnsupportedModelError
from phonograph.graphs.modes import Support
from phonograph.models.layers.states.state_mixer import slot_bytes
from phonograph.models.spec import DTYPE_BYTES, ModelSpec

NO_PREFIX_CACHE = (
    "prefix cache off: the layers with a state ({names}) would need the state at the end of the prefix, which is not "
    "kept"
)


def state_bytes(model: ModelSpec, dtype: str) -> int:
    """Return the bytes of all states of a sequence; 0 for a model without any."""
    return sum(slot_bytes(mixer, DTYPE_BYTES[dtype]) for mixer in model.states.values())


def mixer_names(model: ModelSpec) -> str:
    """Return the names of the kinds of mixers with a state."""
    return ", ".join(dict.fromkeys(mixer.name for mixer in model.states.values()))


def weakest_of(support: Support, model: ModelSpec) -> Support:
    """Return the lowest level of graph support among the attention's and those of the mixers with a state."""
    supports: Iterable[Support] = (mixer.graph_support for mixer in model.states.values())
    return min(support, *supports, key=lambda one: one.level)


def check_states(config: EngineConfig, model: ModelSpec, dtype: str, device: DeviceSpec) -> None:
    """Check that settings and device fit the layers with a state, if there are any.

    Raises:
        ConfigError: a setting does not; the message says what works.
        UnsupportedModelError: there are no kernels for the device.
    """
    if not model.states:
        return
    names = mixer_names(model)
    if device.kind != "cpu":
        raise UnsupportedModelError(f"{config.model}: {names} has no kernels on a GPU yet; device=cpu works")
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
