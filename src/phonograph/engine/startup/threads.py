"""Number of operator threads of a CPU engine, with its reason."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from phonograph.core.host_resources import num_cores, usable_cpus
from phonograph.models.spec import ModelSpec

_MIB = 1024**2
_BYTES_PER_THREAD = 2 * _MIB
"""Weight bytes of an average product per thread (docs/performance.md)."""
_VARIABLES = "OMP_NUM_THREADS", "MKL_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Threads:
    """A number of threads with its reason."""

    count: int
    reason: str


def plan_threads(
    model: ModelSpec, dtype: str, num_processes: int = 1, environment: Mapping[str, str] = os.environ
) -> Threads:
    """Return the caller's number of threads if one is set, else a number by the size of the model.

    Several engines of this machine share its cores, as do the ranks of an engine.

    Threads of one operator spin while they wait for each other. If another program occupies the core of one thread,
    each operator waits for that core, which can take a hundred times as long as the operator. A model whose products
    are too short for several threads therefore gets one. torch does not tell whether its number was set: a number that
    is neither the number of cores nor half of it (two hardware threads per core) is taken as set. Without a set number,
    the CPU quota of the process is the upper bound.
    """
    count, quota = torch.get_num_threads(), ""
    caller = _caller(count, environment)
    if caller is not None:
        return Threads(count, caller)
    if (allowed := usable_cpus()) < count:
        count = allowed
        quota = f", and the CPU quota of the control group (container) allows {count}"
    rest = f"{quota}; OMP_NUM_THREADS sets another number"
    if model.pooler is not None:
        return Threads(count, f"prompts without output make steps of many tokens{rest}")
    # Products: QKV, output, gate-up and down of each layer, and the logits.
    average = model.weight_bytes(dtype) / (4 * model.num_layers + 1)
    gaining = max(1, int(average / _BYTES_PER_THREAD))
    least = _BYTES_PER_THREAD // _MIB
    why = f"a product reads {average / _MIB:.1f} MiB of weights on average, and a thread gains from {least} MiB on"
    if num_processes > 1:
        count, why = max(1, count // num_processes), f"{why}, and {num_processes} processes share the cores"
    return Threads(min(gaining, count), f"{why}{rest}")


def start_threads(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of threads for the load of weights: torch's, within the CPU quota unless a caller set it."""
    count = torch.get_num_threads()
    return min(count, usable_cpus()) if _caller(count, environment) is None else count


def _caller(count: int, environment: Mapping[str, str]) -> str | None:
    """Return what set torch's number of threads, or None if torch chose it."""
    for name in _VARIABLES:
        if environment.get(name):
            return f"{name}={environment[name]}"
    return None if count in (num_cores(), num_cores() // 2) else "set by torch.set_num_threads"
