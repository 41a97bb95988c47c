"""Speeds up Triton's interpreter, which spends most of the time of a kernel in Python around numpy's work.

- Launches and operators: see `quick_launch` and `quick_operators`.
- Each value makes a table of all types, and its type and shape are built from constants of the language each time.
- A scan takes one element after the other.
- Sums and products of integers are computed again in 64 bits to assert that they do not overflow; the assertion does
  nothing unless the interpreter's options say `debug`.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from quick_launch import make_launches_quick
from quick_operators import make_operators_quick

_quick = False


def make_quick() -> None:
    """Replace the slow parts once the interpreter is imported; do nothing before."""
    global _quick
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if _quick or interpreter is None:
        return
    _quick = True
    make_launches_quick(interpreter)
    _keep_types(interpreter)
    make_operators_quick(interpreter)
    interpreter.ScanOps.generic_scan = _scan
    if not interpreter.InterpreterOptions().debug:
        interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None


def _keep_types(interpreter: Any) -> None:
    core = interpreter.tl.core
    constexpr, sequence, block_type, tensor = core.constexpr, core.tuple, core.block_type, core.tensor
    look_up, make_type, equal = interpreter._get_np_dtype, block_type.__init__, sequence.__eq__
    dtypes, types, shapes, by_element = dict[str, Any](), dict[Any, Any](), dict[Any, Any](), dict[Any, Any]()

    def np_dtype(kind: Any) -> Any:
        name = (kind.element_ty if kind.is_block() else kind).name
        if name not in dtypes:
            dtypes[name] = look_up(kind)
        return dtypes[name]

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        values = shape.values if isinstance(shape, sequence) else shape
        key = (element_ty.name, *(size.value if isinstance(size, constexpr) else size for size in values))
        known = types.get(key)
        if known is None:
            make_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known

    def with_element(self: Any, element_ty: Any) -> Any:
        key = element_ty.name, self.name
        if key not in by_element:
            by_element[key] = block_type(element_ty, self.shape)
        return by_element[key]

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        sizes = tuple(kind.shape.values) if kind.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = sequence([constexpr(size) for size in sizes]), constexpr(math.prod(sizes))
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[sizes]

    def equal_sequence(self: Any, other: Any) -> Any:
        if isinstance(other, sequence):
            return constexpr(self.values == other.values)
        return constexpr(self.values == other) if isinstance(other, list) else equal(self, other)

    interpreter._get_np_dtype = np_dtype
    block_type.__init__ = init_type
    block_type.with_element_ty = with_element
    tensor.__init__ = init_tensor
    sequence.__eq__ = equal_sequence


def _scan(self: Any, inputs: Any) -> list[Any]:
    """Scan in steps of 1, 2, 4 ... elements: the function is associative."""
    size = inputs[0].handle.data.shape[self.axis]
    index = np.arange(size).reshape([-1 if axis == self.axis else 1 for axis in range(len(inputs[0].shape))])
    found, step = [*inputs], 1
    while step < size:
        before = [self.to_tensor(np.roll(one.handle.data, step, self.axis), one.dtype) for one in found]
        together = self.combine_fn.fn(*before, *found)
        together = together if isinstance(together, tuple) else (together,)
        found = [
            self.to_tensor(np.where(index < step, one.handle.data, both.handle.data), one.dtype)
            for one, both in zip(found, together, strict=True)
        ]
        step *= 2
    return found
