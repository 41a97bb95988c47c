"""A small set of combinations in which every value of each factor meets every value of every other factor."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows that cover all pairs, the same at each call; few, though not the fewest.

    Each row begins with a pair that is missing; its other values are those that cover most missing pairs.
    """
    names = list(factors)
    missing = {
        frozenset(((a, i), (b, j)))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    order = sorted(missing, key=lambda pair: sorted(pair, key=lambda item: names.index(item[0])))
    rows: list[dict[str, int]] = []
    for pair in order:
        if pair not in missing:
            continue
        row: dict[str, int] = dict(pair)
        for name in names:
            if name not in row:
                row[name] = _best(name, len(factors[name]), row, missing, turn=len(rows))
        missing -= {frozenset(two) for two in itertools.combinations(row.items(), 2)}
        rows.append(row)
    return [{name: factors[name][row[name]] for name in names} for row in rows]


def _best(name: str, count: int, row: Mapping[str, int], missing: set[frozenset[tuple[str, int]]], *, turn: int) -> int:
    """Return the value that covers most missing pairs with those of the row; equal values take turns."""

    def gain(value: int) -> tuple[int, int]:
        return sum(frozenset(((name, value), other)) in missing for other in row.items()), (value - turn) % count

    return max(range(count), key=gain)
