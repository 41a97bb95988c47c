"""Numbers in a schema that the library takes for others, or that make its grammar an empty text.

Integers beyond 64 bits become floating point in it, what it writes of a number has six decimals, and exclusive bounds
are no longer such where a reader's floating point is coarser than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from phonograph.errors import shortened

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LEAST, _MOST = -(2**63), 2**63 - 1
_MOST_COUNT = 2**31 - 2
_MOST_MULTIPLE = 1024
_UNIT = 10**6
"""The library's steps between numbers, in one."""
_COARSE = 10**9
"""From here on floating point has numbers too few for exclusive bounds of six decimals."""


def refusal_of_numbers(schema: dict[str, Any]) -> str | None:
    """Why numbers in a schema cannot be held."""
    for key in ("const", "enum"):
        for value in _numbers(schema.get(key)):
            if isinstance(value, int) and not _LEAST <= value <= _MOST:
                return (
                    f"{key!r} has the integer {_short(value)}, beyond 64 bits, which cannot be held by a grammar; "
                    "write it as a string, or as a float if that is near enough"
                )
    for key in _COUNTS:
        value = schema.get(key)
        if key.startswith("min") and isinstance(value, int) and value > _MOST_COUNT:
            return f"{key!r} of {_short(value)} is more than an output can have"
    return _refusal_of_multiples(schema) or _refusal_of_bounds(schema)


def narrow_numbers(schema: dict[str, Any]) -> None:
    """Writes bounds and counts that the library takes for others as such that it takes right, in place."""
    for key in _COUNTS:
        value = schema.get(key)
        if key.startswith("max") and isinstance(value, int) and value > _MOST_COUNT:
            del schema[key]  # no output reaches it
    given = _given(schema)
    if len(given) < len(schema.keys() & {*BOUNDS}):
        return  # one is no number, which the library says
    if _integers_only(schema) and any(not isinstance(one, int) or not _LEAST <= one <= _MOST for one in given.values()):
        low, high = _steps_within(schema, 1)
        for key in given:
            del schema[key]
        if low is not None:
            schema["minimum"] = max(low, _LEAST)
        if high is not None:
            schema["maximum"] = min(high, _MOST)
    elif _allows(schema, "number"):
        for key, value in given.items():
            if abs(value) >= _COARSE:
                _write_coarse(schema, key)


def _refusal_of_multiples(schema: dict[str, Any]) -> str | None:
    if "multipleOf" not in schema:
        return None
    if schema.get("type") != "integer" or any(key in schema for key in BOUNDS):
        return "multipleOf can be held by a grammar for integers without bounds only"
    unit = schema["multipleOf"]
    if not is_number(unit) or unit != int(unit) or not 1 <= unit <= _MOST_MULTIPLE:
        return f"multipleOf {_short(unit)} cannot be held by a grammar; integers from 1 to {_MOST_MULTIPLE} can"
    return None


def _refusal_of_bounds(schema: dict[str, Any]) -> str | None:
    shown = ", ".join(f"{key}: {_short(value)}" for key, value in _given(schema).items())
    if _integers_only(schema):
        low, high = _steps_within(schema, 1)
        low, high = max(low, _LEAST) if low is not None else _LEAST, min(high, _MOST) if high is not None else _MOST
        return None if low <= high else f"no integer of 64 bits lies within the bounds {shown}"
    if not _allows(schema, "number"):
        return None
    low, high = _steps_within(schema, _UNIT)
    if low is not None and high is not None and low > high:
        return f"no number of six decimals, as grammars have them, lies within the bounds {shown}"
    if any(math.isinf(_beside(schema, key)) for key in _given(schema)):
        return f"no number of floating point lies within the bounds {shown}"
    return None


def _steps_within(schema: dict[str, Any], unit: int) -> tuple[int | None, int | None]:
    """The bounds that a schema sets, counted in steps of one `unit`th, the exclusive ones made inclusive.

    They keep a bound of floating point both as it is written and as it is: readers differ in which they take.
    """
    lows: list[int] = []
    highs: list[int] = []
    for key, value in _given(schema).items():
        for bound in (Fraction(repr(value)) * unit, Fraction(value) * unit):
            if key.endswith("inimum"):
                lows.append(math.ceil(bound) if key == "minimum" else math.floor(bound) + 1)
            else:
                highs.append(math.floor(bound) if key == "maximum" else math.ceil(bound) - 1)
    return max(lows, default=None), min(highs, default=None)


def _write_coarse(schema: dict[str, Any], key: str) -> None:
    """Writes one bound as an inclusive one of floating point."""
    bound = _beside(schema, key)
    del schema[key]
    side, choose = ("minimum", max) if key.endswith("inimum") else ("maximum", min)
    schema[side] = choose(bound, schema.get(side, bound))


def _beside(schema: dict[str, Any], key: str) -> float:
    """The first number of floating point that a bound lets through."""
    bound = schema[key]
    towards = math.inf if key.endswith("inimum") else -math.inf
    try:
        near = float(bound)
    except OverflowError:
        near = math.inf if bound > 0 else -math.inf
    lets_through = near >= bound if towards > 0 else near <= bound
    return near if lets_through and (near != bound or key in ("minimum", "maximum")) else math.nextafter(near, towards)


def _given(schema: dict[str, Any]) -> dict[str, float]:
    return {key: schema[key] for key in BOUNDS if is_number(schema.get(key))}


def _numbers(value: Any) -> Iterator[float]:
    """All numbers in a value."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, list):
            pending += one
        elif isinstance(one, dict):
            pending += one.values()
        elif is_number(one):
            yield one


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integers_only(schema: dict[str, Any]) -> bool:
    return _allows(schema, "integer") and not _allows(schema, "number")


def _allows(schema: dict[str, Any], kind: str) -> bool:
    """Whether values of a schema may be of a type; numbers where it has none."""
    kinds = schema.get("type", "number")
    return kind in (kinds if isinstance(kinds, list) else [kinds])


def _short(value: Any) -> str:
    return shortened(str(value), 50)
