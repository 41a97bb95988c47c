"""Entry points among the kernels of `phonograph.kernels.triton`, read from their source."""

from __future__ import annotations

import ast
from pathlib import Path

import phonograph.kernels.triton


def kernel_entries() -> set[str]:
    """Return module.function of each compiled function that no other compiled function calls."""
    compiled: set[tuple[str, str]] = set()
    called: set[str] = set()
    for path in Path(phonograph.kernels.triton.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
                compiled.add((path.stem, node.name))
                # Work of a group of warps is passed on by name.
                called.update(name.id for name in ast.walk(node) if isinstance(name, ast.Name))
    return {f"{module}.{name}" for module, name in compiled if name not in called}


def _is_jit(decorator: ast.expr) -> bool:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(function, ast.Attribute) and function.attr == "jit"
