"""Results of Triton's interpreter whose types are known from an earlier one."""

from __future__ import annotations

from typing import Any, NamedTuple

PLAIN = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp16", "fp32", "fp64")
"""Types that numpy converts as the interpreter does."""
ORIGINALS: list[tuple[Any, str, Any]] = []
"""The interpreter's own functions, each with its class and name."""


def replace(owner: Any, name: str, function: Any) -> None:
    ORIGINALS.append((owner, name, getattr(owner, name)))
    setattr(owner, name, function)


class Result(NamedTuple):
    """Types of an operand as it must be, and of the result; `to` is numpy's, or the result's shape."""

    left: Any
    to: Any
    element: Any
    type: Any
    dtype: Any
    shape: Any
    numel: Any


def result_of(found: Any, left: Any = None, to: Any = None) -> Result:
    return Result(left, to, element_of(found), found.type, found.dtype, found.shape, found.numel)


def element_of(found: Any) -> Any:
    """Return the type of a result's numbers. The interpreter gives comparisons that of what they compare."""
    return found.handle.dtype if found.dtype.is_ptr() else found.dtype


def result_maker(interpreter: Any) -> Any:
    tensor, handle_type = interpreter.tl.core.tensor, interpreter.TensorHandle
    new = object.__new__

    def result(data: Any, rule: Any) -> Any:
        handle, made = new(handle_type), new(tensor)
        handle.data, handle.dtype, handle.attr = data, rule.element, {}
        made.handle, made.type, made.dtype = handle, rule.type, rule.dtype
        made.shape, made.numel = rule.shape, rule.numel
        return made

    return result
