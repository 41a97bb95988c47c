"""Operators of Triton's interpreter as tests run them, next to the interpreter's own."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from quick_interpreter import make_quick
from quick_rules import ORIGINALS

_NUMBERS = (0, 3, 0.5)
_SHAPES = {
    **dict.fromkeys(("int1", "uint8", "uint32", "int64", "float16", "bfloat16"), ((1,), (2, 4))),
    **dict.fromkeys(("int32", "float32"), ((1,), (4,), (2, 1), (2, 4))),
}


@pytest.fixture
def interpreter() -> Iterator[Any]:
    """The interpreter with types as they are in a kernel."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    make_quick()
    scope = interpreter._LangPatchScope()
    interpreter._patch_lang_core(interpreter.tl.core, scope)
    yield interpreter
    scope.restore()


def operands(interpreter: Any) -> list[Any]:
    """Return scalars and blocks of all types: small numbers, of which none is 0."""
    core = interpreter.tl.core
    generator = np.random.default_rng(0)
    made: list[Any] = []
    for name, shapes in _SHAPES.items():
        kind = getattr(core, name)
        for shape in shapes:
            data = generator.integers(1, 7, shape).astype(interpreter._get_np_dtype(kind))
            its_type = kind if shape == (1,) else core.block_type(kind, [*shape])
            made.append(core.tensor(interpreter.TensorHandle(data, kind), its_type))
    kind = core.pointer_type(core.float32)
    addresses = np.arange(64, 68, dtype=np.uint64)
    made.append(core.tensor(interpreter.TensorHandle(addresses[:1], kind), kind))
    made.append(core.tensor(interpreter.TensorHandle(addresses, kind), core.block_type(kind, [4])))
    return made


def outcome(compute: Callable[[], Any]) -> Any:
    """Return all of a result, or the class of the error."""
    try:
        found = compute()
    except Exception as error:
        return type(error)
    handle = found.handle
    # The interpreter gives truth the type of what was compared.
    element = "" if found.dtype.name == "int1" else str(handle.dtype)
    facts = [str(found.type), str(found.dtype), element, [size.value for size in found.shape]]
    return [*facts, found.numel.value, handle.data.dtype, handle.data.tobytes()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_results_are_the_interpreters_own(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first result has the interpreter's types, and the second one comes by rule."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    tensors = operands(interpreter)
    columns = [(slice(None), None), (None, slice(None)), (slice(None), slice(None), None), (slice(0, 1), None)]
    cases: list[tuple[str, Any, Any]] = []
    for owner, name, _ in ORIGINALS:
        if owner is core.tensor:
            others = columns if name == "__getitem__" else (*tensors, *_NUMBERS)
            cases += [(name, *pair) for pair in itertools.product(tensors, others)]
    cases += [("cast", one, other.dtype) for one, other in itertools.product(tensors, tensors)]
    quick = {name: getattr(owner, name) for owner, name, _ in ORIGINALS}
    own = {name: partial(original, _semantic=semantic) for owner, name, original in ORIGINALS if owner is core.tensor}
    own["cast"] = next(original for _, name, original in ORIGINALS if name == "cast")

    def results(functions: dict[str, Any]) -> list[Any]:
        first = {"cast": (semantic,)}
        return [
            outcome(partial(functions[name], *first.get(name, ()), fresh(one), fresh(other)))
            for name, one, other in cases
        ]

    def fresh(one: Any) -> Any:  # a shift changes its operands' types
        is_tensor = isinstance(one, core.tensor)
        return core.tensor(interpreter.TensorHandle(one.handle.data, one.handle.dtype), one.type) if is_tensor else one

    first, second = results(quick), results(quick)
    for owner, name, original in ORIGINALS:
        monkeypatch.setattr(owner, name, original)
    for case, *found in zip(cases, first, second, results(own), strict=True):
        assert found[0] == found[1] == found[2], case
    assert sum(isinstance(one, list) for one in second) > 3000
