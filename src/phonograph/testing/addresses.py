"""Paths and addresses of the tensors in an object, to name a buffer that moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, cast

import torch

_DEPTH = 6


def tensors_of(held: object, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the tensors of an object on a device, by their path through fields, attributes and containers."""
    found: dict[str, torch.Tensor] = {}
    _walk(held, "", device, found, set(), _DEPTH)
    return found


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    """Return the paths with a tensor at another address. The caller keeps both alive, so no memory is reused."""
    return [path for path in before if path in after and before[path].data_ptr() != after[path].data_ptr()]


def _walk(
    value: Any, path: str, device: torch.device, found: dict[str, torch.Tensor], seen: set[int], depth: int
) -> None:
    if isinstance(value, torch.Tensor):
        if value.device.type == device.type and value.numel():
            found[path] = value
        return
    if depth == 0 or value is None or isinstance(value, str | bytes | int | float | Enum | type) or id(value) in seen:
        return
    seen.add(id(value))
    for name, inner in _parts(value):
        _walk(inner, f"{path}{name}" if path or name.startswith("[") else name[1:], device, found, seen, depth - 1)


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", inner) for key, inner in cast(Mapping[Any, Any], value).items()]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", inner) for index, inner in enumerate(cast(list[Any], value))]
    if is_dataclass(value):
        return [(f".{one.name}", getattr(value, one.name, None)) for one in fields(value)]
    if callable(value):
        return []
    return [(f".{name}", inner) for name, inner in getattr(value, "__dict__", {}).items()]
