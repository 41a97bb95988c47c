"""Triton's interpreter, without its search through all of the language at each call of a function within a kernel.

For each such call it lists the members of five modules and classes to find the builtins that it replaces while a kernel
runs, although they are replaced already: a quarter of the time of tests with many small kernels.
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

    interpreter._patch_builtin = patch_builtin
