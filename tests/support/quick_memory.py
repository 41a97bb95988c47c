"""Loads and stores of Triton's interpreter by rules, which check types once for those of pointers, masks and values."""

from __future__ import annotations

from typing import Any

import numpy as np
from quick_rules import PLAIN, Result, replace, result_maker, result_of


def make_memory_quick(interpreter: Any) -> None:
    semantic_type = interpreter.TritonSemantic
    slow_load, slow_store = semantic_type.load, semantic_type.store
    memory = interpreter._interpreter
    loads, stores = dict[Any, Result | None](), dict[Any, Result | None]()
    masks, zeros = dict[Any, Any](), dict[Any, Any]()
    result = result_maker(interpreter)

    def key_of(*operands: Any) -> Any:
        return tuple([None if one is None else one.type.name for one in operands])

    def converts(value: Any, element: Any) -> bool:
        """Return True if numpy converts a value to a pointer's element as the interpreter does."""
        if element.name == "int1":
            return False
        return value is None or value.dtype.name == element.name or {value.dtype.name, element.name} <= {*PLAIN}

    def mask_of(mask: Any, shape: Any) -> Any:
        if mask is not None:
            return _broadcast(mask.handle.data, shape)
        if shape not in masks:
            masks[shape] = np.ones(shape, bool)
        return masks[shape]

    def fits(rule: Any, pointer: Any, mask: Any) -> bool:
        return (
            rule is not None
            and pointer.handle.data.dtype is _ADDRESS
            and (mask is None or mask.handle.data.dtype is _BOOL)
        )

    def load(
        self: Any, pointer: Any, mask: Any, other: Any, boundary_check: Any, padding_option: Any, *rest: Any
    ) -> Any:
        if boundary_check or padding_option:
            return slow_load(self, pointer, mask, other, boundary_check, padding_option, *rest)
        key = key_of(pointer, mask, other)
        rule = loads.get(key)
        if rule is not None and fits(rule, pointer, mask):
            shape, dtype = rule.to, rule.left
            if other is not None:
                without = _broadcast(other.handle.data, shape)
                if without.dtype is not dtype:
                    without = without.astype(dtype)
            else:
                if (shape, dtype) not in zeros:
                    zeros[shape, dtype] = np.zeros(shape, dtype)
                without = zeros[shape, dtype]
            addresses = _broadcast(pointer.handle.data, shape)
            return result(memory.load(addresses, mask_of(mask, shape), without, dtype), rule)
        found = slow_load(self, pointer, mask, other, boundary_check, padding_option, *rest)
        if key not in loads:
            loads[key] = None
            if pointer.dtype.is_ptr() and converts(other, pointer.dtype.element_ty):
                loads[key] = result_of(found, found.handle.data.dtype, found.handle.data.shape)
        return found

    def store(self: Any, pointer: Any, value: Any, mask: Any, boundary_check: Any, *rest: Any) -> Any:
        if boundary_check:
            return slow_store(self, pointer, value, mask, boundary_check, *rest)
        key = key_of(pointer, value, mask)
        rule = stores.get(key)
        if rule is not None and fits(rule, pointer, mask):
            data, shape = _broadcast(value.handle.data, rule.to), rule.to
            if data.dtype is not rule.left:
                data = data.astype(rule.left)
            return memory.store(_broadcast(pointer.handle.data, shape), data, mask_of(mask, shape))
        found = slow_store(self, pointer, value, mask, boundary_check, *rest)
        if key not in stores:
            stores[key] = None
            if pointer.dtype.is_ptr() and converts(value, pointer.dtype.element_ty):
                dtype = interpreter._get_np_dtype(pointer.dtype.element_ty)
                stores[key] = result_of(pointer, dtype, pointer.handle.data.shape)
        return found

    replace(semantic_type, "load", load)
    replace(semantic_type, "store", store)


_ADDRESS, _BOOL = np.dtype(np.uint64), np.dtype(bool)


def _broadcast(data: Any, shape: Any) -> Any:
    return data if data.shape == shape else np.broadcast_to(data, shape)
