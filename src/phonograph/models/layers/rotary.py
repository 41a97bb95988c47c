"""Tables of cosines and sines for the rotary embedding, one for each distinct rope of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from phonograph.models.layer_spec import RopeTable
from phonograph.models.spec import ModelSpec


class RotaryTables(NamedTuple):
    """Tables on a device.

    Attributes:
        tables: [positions, 2h] by rope: cosines of each position's h angles, then sines. A rope with a scale of queries
            has the scales in a last column.
        device: device of the tables, also if there are none.
    """

    tables: Mapping[RopeTable, torch.Tensor]
    device: torch.device

    def number(self, rope: RopeTable | None) -> int | None:
        """Return the number of a rope's table; None for no rope."""
        return None if rope is None else list(self.tables).index(rope)


def rotary_tables(spec: ModelSpec, num_positions: int, dtype: torch.dtype, device: torch.device) -> RotaryTables:
    """Return the tables of a model; angles in float32 as in transformers."""
    ropes = dict.fromkeys(one.rope for one in spec.attentions.values())
    tables = {rope: _table(rope, num_positions, dtype, device) for rope in ropes if rope is not None}
    return RotaryTables(tables, device)


def _table(rope: RopeTable, num_positions: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    is_long = 0 < rope.original_length < num_positions
    frequencies = torch.tensor(
        rope.long_frequencies if is_long else rope.frequencies, dtype=torch.float32, device=device
    )
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles, pairs = torch.outer(positions, frequencies), frequencies.numel()
    table = torch.empty(num_positions, 2 * pairs + (rope.query_beta != 0), dtype=dtype, device=device)
    table[:, :pairs] = angles.cos() * rope.factor
    table[:, pairs : 2 * pairs] = angles.sin() * rope.factor
    if rope.query_beta:
        table[:, -1] = 1 + rope.query_beta * torch.log1p(torch.floor(positions / rope.query_length))
    return table
