"""Launches of Triton's interpreter: a kernel's signature is read once, and the language is replaced once.

The interpreter takes its replacements of the language back after each launch, and makes them anew at the next one and
in each call of a function in a kernel. A process that interprets kernels has no other use of the language.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any


def make_launches_quick(interpreter: Any) -> None:
    _patch_language(interpreter)
    _patch_executor(interpreter)
    _patch_calls(interpreter)


def _patch_language(interpreter: Any) -> None:
    core = interpreter.tl.core
    is_builtin, patch_lang = core.is_builtin, interpreter._patch_lang
    langs, replacements = dict[Any, list[Any]](), dict[Any, Any]()
    checks_semantic = core.builtin(lambda: None).__code__

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if (member, builder) not in replacements:
            semantic = interpreter.TritonSemantic(builder)
            # `builtin` adds only the check that there is a semantic.
            call = member.__wrapped__ if getattr(member, "__code__", None) is checks_semantic else member

            def with_semantic(*args: Any, **keywords: Any) -> Any:
                keywords["_semantic"] = semantic
                return call(*args, **keywords)

            replacements[member, builder] = with_semantic
        scope.set_attr(obj, name, replacements[member, builder])

    def patch_lang_of(fn: Any) -> Any:
        if fn not in langs:
            langs[fn] = [value for value in fn.__globals__.values() if value is interpreter.tl or value is core]
        if any(is_builtin(lang.arange) for lang in langs[fn]):
            patch_lang(fn)
        return interpreter._LangPatchScope()  # there is nothing to restore

    interpreter._patch_attr = patch_attr
    interpreter._patch_lang = patch_lang_of


def _patch_executor(interpreter: Any) -> None:
    executor = interpreter.GridExecutor
    make, convert, copy_in, copy_out = (
        executor.__init__,
        interpreter._implicit_cvt,
        executor._init_args_hst,
        executor._restore_args_dev,
    )
    executors, converted = dict[Any, tuple[list[str], Any, dict[str, Any]]](), dict[Any, Any]()
    tensor, handle_type = interpreter.tl.core.tensor, interpreter.TensorHandle

    def init(self: Any, fn: Any, arg_names: Any, grid: Any, pre_run_hooks: Any = ()) -> None:
        self.fn, self.grid, self.pre_run_hooks = fn, grid, pre_run_hooks
        if fn not in executors:
            make(self, fn, arg_names, grid, pre_run_hooks)
            parameters = inspect.signature(fn).parameters.values()
            defaults = {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
            executors[fn] = arg_names, {*self.constexprs}, defaults

    def implicit_cvt(value: Any) -> Any:
        """Keep types of tensors and numbers."""
        kind = type(value)
        if hasattr(value, "data_ptr"):
            key, data = value.dtype, [value.data_ptr()]
        elif kind is int or kind is bool:
            key, data = (kind, value), [value]
        else:
            return convert(value)
        if key not in converted:
            made = convert(value)
            converted[key] = made.type, made.handle.dtype, made.handle.data.dtype
        its_type, element, dtype = converted[key]
        return tensor(handle_type(interpreter.np.array(data, dtype), element), its_type)

    def call(self: Any, *args_dev: Any, **keywords: Any) -> None:
        names, constexprs, defaults = executors[self.fn]
        known = {*names}
        keywords = {name: value for name, value in keywords.items() if name in known}
        on_cpu = all(map(_is_on_cpu, args_dev)) and all(map(_is_on_cpu, keywords.values()))
        args, host = (args_dev, keywords) if on_cpu else copy_in(self, args_dev, keywords)
        for hook in self.pre_run_hooks:
            hook(*args, **host)
        interpreter._patch_lang(self.fn)
        if len(args) > len(names) or not host.keys().isdisjoint(names[: len(args)]):
            inspect.getcallargs(self.fn, *args, **host)  # raises
        given = defaults | dict(zip(names, args, strict=False)) | host
        values = {name: value if name in constexprs else implicit_cvt(value) for name, value in given.items()}
        grid = self.grid(values) if callable(self.grid) else self.grid
        grid += (1,) * (3 - len(grid))
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        try:
            for x in range(grid[0]):
                for y in range(grid[1]):
                    for z in range(grid[2]):
                        builder.set_grid_idx(x, y, z)
                        self.fn(**values)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error
        if not on_cpu:
            copy_out(self, args_dev, args, keywords, host)

    executor.__init__, executor.__call__ = init, call


def _is_on_cpu(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_on_cpu, value))
    value = getattr(value, "base", value)  # of a descriptor
    return not hasattr(value, "data_ptr") or value.device.type == "cpu"


def _patch_calls(interpreter: Any) -> None:
    """Functions in kernels are looked up once, and parsed by one thread at a time.

    CPython 3.11 counts the depth of a syntax tree for all threads together, and refuses trees that two make at once.
    """
    function_type = interpreter.InterpretedFunction
    slow, rewritten = function_type.__call__, dict[Any, Any]()

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        fn = rewritten.get(self.fn)
        if fn is None:
            rewritten[self.fn] = self.rewrite()
            return slow(self, *args, **keywords)
        try:
            return fn(*args, **keywords)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def rewrite_alone(self: Any) -> Any:
        with parsing:
            return rewrite(self)

    rewrite, parsing = interpreter.FunctionRewriter.rewrite_ast, threading.Lock()
    interpreter.FunctionRewriter.rewrite_ast = rewrite_alone
    function_type.__call__ = call
