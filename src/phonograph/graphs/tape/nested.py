"""Tensors inside the arguments of an operator: in lists, tuples and dictionaries, which is all that operators take.

torch has a general tool for this; it took most of the time of a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in `value`, in order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A copy of `value` with each tensor replaced by what `function` makes of it; only containers are new."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        return tuple(map_tensors(function, item) for item in value)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return [map_tensors(function, item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return value
