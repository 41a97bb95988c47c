"""Operators of Triton's interpreter by rules: types are checked once for each pair of types, then numpy computes.

The interpreter checks types, makes an array of each constant, converts and broadcasts both operands anew in each
operation, which takes ten times as long as the operation. Here the interpreter does so for the first operands of their
types. Its result has the type of all later ones, and numpy broadcasts by itself. Operands with conversions other than
numpy's, as those of bfloat16 and FP8, are left to the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from quick_memory import make_memory_quick
from quick_rules import PLAIN, Result, element_of, replace, result_maker, result_of

_COMPARED = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
_COMPUTED = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "mod": np.fmod}
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_SHIFTED = {"lshift": np.left_shift, "rshift": np.right_shift}


class _Rule(NamedTuple):
    """Types of operands as they must be, what they are converted to, and the function and type of the result."""

    left: Any
    right: Any
    to_left: Any
    to_right: Any
    function: Callable[..., Any]
    constant: Any
    element: Any
    type: Any
    dtype: Any
    shape: Any
    numel: Any


def make_operators_quick(interpreter: Any) -> None:
    core = interpreter.tl.core
    names = {name: (function, {}) for name, function in _COMPARED.items()}
    for name, function in (_COMPUTED | _BITWISE | _SHIFTED).items():
        names[f"__{name}__"] = names[f"__r{name}__"] = function, {}
    names["__truediv__"] = np.divide, {"div_or_mod": True}
    names["__floordiv__"] = _divided, {"div_or_mod": True}
    names["__mod__"] = np.fmod, {"div_or_mod": True}
    for name in ("__rmod__", "__rlshift__", "__rrshift__"):
        del names[name]
    for name, (function, options) in names.items():
        replace(core.tensor, name, _operator(interpreter, name, function, options))
    _patch_conversions(interpreter)
    _patch_shapes(interpreter)
    _patch_choice(interpreter)
    make_memory_quick(interpreter)


def _divided(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right


def _operator(interpreter: Any, name: str, function: Callable[..., Any], options: dict[str, Any]) -> Any:
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    tensor, constexpr = core.tensor, core.constexpr
    slow, reflected = getattr(tensor, name), name.startswith("__r") and name != "__rshift__"
    rules = dict[Any, _Rule | None]()
    result = result_maker(interpreter)

    def operator(self: Any, other: Any) -> Any:
        data = self.handle.data
        if type(other) is constexpr:
            other = other.value
        if type(other) is tensor:
            key, right = (self.type.name, other.type.name), other.handle.data
        else:
            key, right = (self.type.name, type(other), other), None
        rule = rules.get(key)
        if rule is not None and data.dtype is rule.left:
            if right is None:
                right = rule.constant
            elif right.dtype is not rule.right:
                return slow(self, other, _semantic=semantic)
            elif rule.to_right is not None:
                right = right.astype(rule.to_right)
            if rule.to_left is not None:
                data = data.astype(rule.to_left)
            return result(rule.function(right, data) if reflected else rule.function(data, right), rule)
        found = slow(self, other, _semantic=semantic)
        if key not in rules:
            rules[key] = make_rule(self, other, found)
        return found

    def make_rule(self: Any, other: Any, found: Any) -> _Rule | None:
        is_tensor = type(other) is tensor
        left = self.dtype
        if left.is_ptr():
            return _pointer_rule(interpreter, self, other, found) if name == "__add__" else None
        checked = semantic.to_tensor(other) if name in _COMPARED else other
        if is_tensor and other.dtype.is_ptr():
            return None
        mine, others = semantic.binary_op_type_checking_impl(self, checked, False, False, True, **options)
        common = mine.dtype
        types = [left, common, *([other.dtype] if is_tensor else [])]
        with_bool = function in (*_BITWISE.values(), *_COMPARED.values())
        if others.dtype.name != common.name or not _converts(types, with_bool):
            return None
        if name == "__truediv__" and not common.is_floating():
            return None
        if name in ("__lshift__", "__rshift__") and left.name != common.name:
            return None
        np_dtype = interpreter._get_np_dtype
        to, constant = np_dtype(common), None
        if not is_tensor:
            constant = np.array([others.handle.data.flat[0]], to)
        return _Rule(
            left=np_dtype(left),
            right=np_dtype(other.dtype) if is_tensor else None,
            to_left=None if left.name == common.name else to,
            to_right=None if not is_tensor or other.dtype.name == common.name else to,
            function=function,
            constant=constant,
            element=element_of(found),
            type=found.type,
            dtype=found.dtype,
            shape=found.shape,
            numel=found.numel,
        )

    return operator


def _converts(types: list[Any], with_bool: bool) -> bool:
    """Return True if numpy converts between these types as the interpreter does."""
    names = {one.name for one in types}
    return names <= {*PLAIN} or (with_bool and names == {"int1"})


def _pointer_rule(interpreter: Any, pointer: Any, offset: Any, found: Any) -> _Rule | None:
    if not found.dtype.is_ptr():
        return None
    size = max(1, pointer.handle.get_element_ty().primitive_bitwidth // 8)
    is_tensor = type(offset) is interpreter.tl.core.tensor
    if is_tensor and offset.dtype.name not in PLAIN:
        return None
    return _Rule(
        left=np.dtype(np.uint64),
        right=interpreter._get_np_dtype(offset.dtype) if is_tensor else None,
        to_left=None,
        to_right=None,
        function=lambda address, count: address + size * count.astype(np.uint64),
        constant=None if is_tensor else np.array([offset], np.int64),
        element=element_of(found),
        type=found.type,
        dtype=found.dtype,
        shape=found.shape,
        numel=found.numel,
    )


def _patch_conversions(interpreter: Any) -> None:
    """Numbers of Python become arrays once, and types that numpy converts are not looked at again."""
    core, semantic_type = interpreter.tl.core, interpreter.TritonSemantic
    tensor, handle_type = core.tensor, interpreter.TensorHandle
    slow_to_tensor, slow_cast, slow_arange = semantic_type.to_tensor, semantic_type.cast, semantic_type.arange
    numbers, casts, ranges = dict[Any, Any](), dict[Any, Result | None](), dict[Any, Any]()
    result = result_maker(interpreter)

    def kept(made: Any) -> Any:
        made.handle.data.setflags(write=False)
        return made.handle.data, made.handle.dtype, made.type

    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        kind = type(x)
        if kind is tensor:
            return x
        if kind is not int and kind is not float and kind is not bool:
            return slow_to_tensor(self, x, check_type)
        if (kind, x) not in numbers:
            numbers[kind, x] = kept(slow_to_tensor(self, x, check_type))
        data, element, its_type = numbers[kind, x]
        return tensor(handle_type(data, element), its_type)

    def arange(self: Any, start: Any, end: Any, *, ret_ty: Any = None) -> Any:
        if ret_ty is not None:
            return slow_arange(self, start, end, ret_ty=ret_ty)
        if (start, end) not in ranges:
            ranges[start, end] = kept(slow_arange(self, start, end))
        data, element, its_type = ranges[start, end]
        return tensor(handle_type(data, element), its_type)

    def cast(self: Any, value: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        if fp_downcast_rounding is not None:
            return slow_cast(self, value, dst_ty, fp_downcast_rounding)
        source, target = value.dtype, dst_ty.scalar
        if source.name == target.name:
            return value
        key, data = (value.type.name, target.name), value.handle.data
        rule = casts.get(key)
        if rule is not None and data.dtype is rule.left:
            return result(data.astype(rule.to), rule)
        found = slow_cast(self, value, dst_ty)
        if key not in casts:
            casts[key] = None
            if target.name in PLAIN and source.name in (*PLAIN, "int1"):
                casts[key] = result_of(found, *map(interpreter._get_np_dtype, (source, target)))
        return found

    for function in (to_tensor, arange, cast):
        replace(semantic_type, function.__name__, function)


def _patch_shapes(interpreter: Any) -> None:
    """New axes and broadcasts are views of numpy's."""
    core, semantic_type = interpreter.tl.core, interpreter.TritonSemantic
    tensor, semantic = core.tensor, interpreter.interpreter_semantic
    slow_getitem, slow_broadcast = tensor.__getitem__, semantic_type.broadcast_impl_value
    slow_checking = semantic_type.binary_op_type_checking_impl
    views, broadcasts = dict[Any, Result](), dict[Any, Any]()
    result, everything = result_maker(interpreter), slice(None)

    def getitem(self: Any, slices: Any) -> Any:
        if type(slices) is not tuple or not self.type.is_block():
            return slow_getitem(self, slices, _semantic=semantic)
        key = self.type.name, tuple([one is None for one in slices])
        view = views.get(key)
        if view is not None and all(one is None or one == everything for one in slices):
            return result(self.handle.data[slices], view)
        found = slow_getitem(self, slices, _semantic=semantic)
        views[key] = result_of(found)
        return found

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        key = left.type.name, right.type.name
        if key[0] == key[1]:
            return left, right
        sides = broadcasts.get(key)
        if sides is not None and left.handle.data.dtype is sides[0].left and right.handle.data.dtype is sides[1].left:
            return tuple(
                [
                    one if side.to is None else result(np.broadcast_to(one.handle.data, side.to), side)
                    for one, side in zip((left, right), sides, strict=True)
                ]
            )
        found = slow_broadcast(self, left, right)
        if key not in broadcasts:
            broadcasts[key] = [
                result_of(after, before.handle.data.dtype, None if after is before else after.handle.data.shape)
                for before, after in zip((left, right), found, strict=True)
            ]
        return found

    def checking(self: Any, left: Any, right: Any, *rest: Any, **options: Any) -> Any:
        if (
            not options
            and (len(rest) < 4 or not rest[3])
            and type(left) is type(right) is tensor
            and left.type.name == right.type.name
            and not left.dtype.is_ptr()
        ):
            return left, right
        return slow_checking(self, left, right, *rest, **options)

    replace(tensor, "__getitem__", getitem)
    replace(semantic_type, "broadcast_impl_value", broadcast)
    replace(semantic_type, "binary_op_type_checking_impl", checking)


def _patch_choice(interpreter: Any) -> None:
    core, semantic_type = interpreter.tl.core, interpreter.TritonSemantic
    tensor, constexpr = core.tensor, core.constexpr
    slow_where, slow_unwrap = semantic_type.where, core._unwrap_if_constexpr
    rules = dict[Any, Any]()
    result, containers = result_maker(interpreter), (list, tuple, core.tuple)

    def where(self: Any, condition: Any, x: Any, y: Any) -> Any:
        sides = (x, y)
        key = (
            condition.type.name,
            *[one.type.name if type(one) is tensor else (type(one), one) for one in sides],
        )
        rule = rules.get(key)
        if rule is not None:
            numbers, made = rule
            data = [one.handle.data if number is None else number for one, number in zip(sides, numbers, strict=True)]
            if condition.handle.data.dtype is made.left and data[0].dtype is data[1].dtype is made.to:
                return result(np.where(condition.handle.data, *data), made)
        found = slow_where(self, condition, x, y)
        if key not in rules:
            rules[key] = make_rule(self, condition, x, y, found)
        return found

    def make_rule(semantic: Any, condition: Any, x: Any, y: Any, found: Any) -> Any:
        converted = semantic.binary_op_type_checking_impl(x, y, True, True)
        numbers, kinds = list[Any](), {one.dtype.name for one in converted}
        for before, after in zip((x, y), converted, strict=True):
            if type(before) is tensor:
                numbers.append(None)
                kinds.add(before.dtype.name)
            else:
                numbers.append(after.handle.data.reshape(-1)[:1])
        if len(kinds) > 1 or converted[0].dtype.is_ptr() or condition.dtype.name != "int1":
            return None
        return numbers, result_of(found, np.dtype(bool), found.handle.data.dtype)

    def unwrap(o: Any) -> Any:
        kind = type(o)
        if kind is constexpr:
            return o.value
        return slow_unwrap(o) if isinstance(o, containers) else o

    replace(semantic_type, "where", where)
    core._unwrap_if_constexpr = unwrap
