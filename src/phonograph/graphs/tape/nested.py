"""Tensors inside an operator's arguments: in lists, tuples and dictionaries.

torch's general tool for this took most of the time of a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_WITHOUT_TENSORS = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in `value`, in order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return `value` with `function` applied to each tensor, in new containers."""
    if type(value) in _WITHOUT_TENSORS:
        return value
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        return tuple([map_tensors(function, item) for item in value])  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return [map_tensors(function, item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return value
