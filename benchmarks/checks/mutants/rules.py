"""Rules by which faults are planted in a source: each is a small change that a test should notice.

Docstrings, texts, annotations, decorators, assertions, log calls and the contents of errors stay as they are, and so
does what only a compiler of kernels reads. A change keeps the number of lines, so that records of lines stay right.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
_LOGS = {"log", "logger", "logging", "print", "warnings"}
_HINTS = {"debug_barrier", "pdl_begin", "pdl_end", "static_assert"}
_COMPILER_OPTIONS = {"num_warps", "num_stages", "maxnreg", "eviction_policy", "cache_modifier"}
_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True)
class Fault:
    """A change of a source.

    Attributes:
        rule: name of the rule.
        line: first line of the change.
        span: lines of the statement, of its head if it has a body.
        before: source of the changed expression or statement.
        after: source of its replacement.
        start: first byte of the change.
        stop: byte after the last one.
        at_import: True outside of functions: what runs it first is chance.
    """

    rule: str
    line: int
    span: range
    before: str
    after: str
    start: int
    stop: int
    at_import: bool

    def planted(self, source: str) -> str:
        """Return the source with the fault."""
        data = source.encode()
        old = data[self.start : self.stop]
        new = self.after.encode() + b"\n" * old.count(b"\n")
        new = new if self.after == "pass" else b"(" + new + b")"
        return (data[: self.start] + new + data[self.stop :]).decode()


def faults_of(source: str) -> list[Fault]:
    """Return all faults that the rules plant in a source."""
    return list(_Planter(source).statements(ast.parse(source).body))


class _Planter:
    def __init__(self, source: str) -> None:
        self._data = source.encode()
        self._starts = [0]
        for line in source.encode().splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._depth = 0

    def statements(self, body: list[ast.stmt]) -> Iterator[Fault]:
        for node in body:
            yield from self._statement(node)

    def _statement(self, node: ast.stmt) -> Iterator[Fault]:
        inner: list[ast.stmt] = getattr(node, "body", [])
        span = range(node.lineno, max(inner[0].lineno, node.lineno + 1) if inner else (node.end_lineno or 0) + 1)
        if isinstance(node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom) or _is_log(node):
            return
        if _is_effect(node):
            yield self._fault("statement", node, "pass", span)
        if isinstance(node, ast.If | ast.While):
            yield from self._condition(node.test, span, is_guard=_is_guard(node))
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "targets", "target", "type_params"):
                continue
            self._depth += is_function and field == "body"
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, ast.stmt):
                    yield from self._statement(one)
                elif isinstance(one, ast.ExceptHandler | ast.match_case):
                    yield from self.statements(one.body)
                elif isinstance(one, ast.AST):
                    yield from self._expression(one, span)
            self._depth -= is_function and field == "body"

    def _condition(self, test: ast.expr, span: range, *, is_guard: bool = False) -> Iterator[Fault]:
        if isinstance(test, ast.Constant) or "TYPE_CHECKING" in ast.unparse(test):
            return
        yield self._fault("guard" if is_guard else "condition", test, "False", span)
        yield self._fault("condition", test, "True", span)

    def _expression(self, node: ast.AST, span: range) -> Iterator[Fault]:
        if isinstance(node, ast.JoinedStr | ast.FormattedValue):
            return
        if isinstance(node, ast.expr):
            yield from self._changes(node, span)
        if isinstance(node, ast.IfExp):
            yield from self._condition(node.test, span)
        if isinstance(node, ast.comprehension):
            for one in node.ifs:
                yield self._fault("condition", one, "True", span)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            for bound in (node.slice.lower, node.slice.upper):
                if bound is not None and not isinstance(bound, ast.Constant):
                    yield self._fault("bound", bound, f"{ast.unparse(bound)} + 1", span)
                    yield self._fault("bound", bound, f"{ast.unparse(bound)} - 1", span)
        for field, value in ast.iter_fields(node):
            for one in value if isinstance(value, list) else [value]:
                if field == "annotation" or (isinstance(one, ast.keyword) and one.arg in _COMPILER_OPTIONS):
                    continue
                if isinstance(one, ast.AST) and not isinstance(one, ast.expr_context | ast.operator):
                    yield from self._expression(one, span)

    def _changes(self, node: ast.expr, span: range) -> Iterator[Fault]:
        """Yield the changes of one expression, without those within it."""
        match node:
            case ast.Compare(left=left, ops=[operator, *rest], comparators=comparators):
                other = _COMPARISONS[type(operator)]()
                yield self._fault("comparison", node, ast.Compare(left, [other, *rest], comparators), span)
            case ast.BoolOp(op=operator, values=values):
                other = ast.Or() if isinstance(operator, ast.And) else ast.And()
                yield self._fault("boolean", node, ast.BoolOp(other, values), span)
                for place in range(len(values)):
                    others = values[:place] + values[place + 1 :]
                    fewer = others[0] if len(others) == 1 else ast.BoolOp(operator, others)
                    yield self._fault("boolean", node, fewer, span)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._fault("negation", node, operand, span)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub()) if not _is_text(node):
                yield self._fault("operand", node, left, span)
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                yield self._fault("constant", node, str(value + 1), span)
                if value > 0:
                    yield self._fault("constant", node, str(value - 1), span)
            case ast.Name(id=name, ctx=ast.Load()) if name in _NAMES:
                yield self._fault("extreme", node, _NAMES[name], span)
            case ast.Attribute(value=value, attr=name) if name in _NAMES:
                yield self._fault("extreme", node, ast.Attribute(value, _NAMES[name]), span)
            case _:
                pass

    def _fault(self, rule: str, node: ast.expr | ast.stmt, after: str | ast.expr, span: range) -> Fault:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        stop = self._starts[node.end_lineno - 1] + node.end_col_offset
        text = after if isinstance(after, str) else ast.unparse(after)
        before = self._data[start:stop].decode()
        return Fault(rule, node.lineno, span, before, text, start, stop, at_import=self._depth == 0)


def _is_effect(node: ast.stmt) -> bool:
    """Return True for a statement that can be left out without a name that is missing later."""
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Delete) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    )


def _is_guard(node: ast.If | ast.While) -> bool:
    return isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], _EXITS)


def _is_log(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    names = ast.unparse(call.func).strip("_").split(".") if isinstance(call, ast.Call) else [""]
    return names[0].strip("_") in _LOGS or names[-1] in _HINTS


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str))
        for one in ast.walk(node)
    )
