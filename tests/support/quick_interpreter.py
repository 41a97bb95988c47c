"""Triton's interpreter, without two things that it does again and again, up to half of the time of tests of kernels.

At each call of a function within a kernel it lists the members of five modules and classes, to find the builtins that
it replaces while a kernel runs, although they are replaced already. And for each value it makes a table of all types.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

_quick = False


def make_quick() -> None:
    """Does so once the interpreter is imported; until then it does nothing."""
    global _quick
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if _quick or interpreter is None:
        return
    _quick = True
    is_builtin, names = interpreter.tl.core.is_builtin, dict[Any, list[str]]()

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if not is_builtin(member):
                return  # a kernel runs: all of them are replaced
            interpreter._patch_attr(package, name, member, builder, scope)

    look_up, known = interpreter._get_np_dtype, dict[str, Any]()

    def np_dtype(kind: Any) -> Any:
        name = (kind.element_ty if kind.is_block() else kind).name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = np_dtype
