"""Specification of a model that transformers' own module runs, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from phonograph.models.spec import ModelSpec


class RecordedAttention(NamedTuple):
    """Attention of a layer as its module asks for it.

    Attributes:
        module: name of the module that calls it.
        num_query_heads, num_kv_heads: heads.
        head_size: numbers of a head of queries and keys.
        value_size: numbers of a head of values.
        scale: factor of the scores.
        window: (left, right) as in `LayerAttention`.
        softcap: cap of scaled scores; 0 for none.
        sinks: name of the parameter with the sinks, or None.
    """

    module: str
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    scale: float
    window: tuple[int, int]
    softcap: float
    sinks: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpec(ModelSpec):
    """A model that transformers' module runs. The matrices of its layers have the sizes of the widest, for estimates.

    Attributes:
        config: fields of config.json, as JSON.
        calls: attention of each layer.
        shapes: shapes of the parameters, by name in the module.
        uncapturable: operation of the module that a graph cannot hold, or None.
    """

    config: str
    calls: tuple[RecordedAttention, ...]
    shapes: Mapping[str, tuple[int, ...]]
    uncapturable: str | None

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every parameter of the module."""
        return dict(self.shapes)
