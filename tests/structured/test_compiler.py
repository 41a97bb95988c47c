"""The compiler of grammars: what it keeps, whom a failure concerns, cancelled requests, and its end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
from byte_grammars import END, byte_compiler, byte_vocabulary, takes

from phonograph.core.grammar import Grammar
from phonograph.core.structured_outputs import Strictness, StructuredOutputs
from phonograph.errors import RequestError
from phonograph.structured import compiler as compiler_module
from phonograph.structured.compiler import CACHE_SIZE, THREADS, GrammarCompiler
from phonograph.structured.matcher import LlguidanceLibrary
from phonograph.structured.vocabulary import Vocabulary

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


def grammar_of(compiler: GrammarCompiler, **structured: Any) -> Grammar:
    return compiler.request(StructuredOutputs(**structured)).result(60)


def test_the_same_request_has_the_same_grammar() -> None:
    compiler = byte_compiler()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    first = grammar_of(compiler, json=schema)
    again = compiler.request(StructuredOutputs(json='{"type":"object","properties":{"a":{"type":"integer"}}}'))
    assert again.done() and again.result() is first
    assert schema == {"type": "object", "properties": {"a": {"type": "integer"}}}, "the caller's own is changed"
    others = [
        {"json": {"properties": {"a": {"type": "integer"}}, "type": "object"}},
        {"json": schema, "disable_any_whitespace": False},
        {"json": schema, "disable_additional_properties": False},
        {"json": schema, "strictness": "relaxed"},
    ]
    assert len({id(first), *(id(grammar_of(compiler, **one)) for one in others)}) == 5
    compiler.close()


def test_so_many_grammars_are_kept_and_the_last_used_longest() -> None:
    compiler = byte_compiler()
    grammars = [grammar_of(compiler, regex=f"a{{{count}}}") for count in range(1, CACHE_SIZE + 1)]
    assert grammar_of(compiler, regex="a{1}") is grammars[0]
    grammar_of(compiler, regex="b")
    assert len(compiler._cache) == CACHE_SIZE
    assert grammar_of(compiler, regex="a{1}") is grammars[0] and grammar_of(compiler, regex="a{3}") is grammars[2]
    assert grammar_of(compiler, regex="a{2}") is not grammars[1]
    assert takes(grammars[1], "aa"), "what is kept no longer is used on"
    compiler.close()


def test_a_cancelled_request_leaves_nothing() -> None:
    go = threading.Event()

    def load() -> Vocabulary:
        assert go.wait(60)
        return byte_vocabulary()

    compiler = GrammarCompiler(load, (END,))
    busy = [compiler.request(StructuredOutputs(regex="a" * count)) for count in range(1, THREADS + 1)]
    gone, last = (compiler.request(StructuredOutputs(regex=text)) for text in ("gone", "last"))
    assert gone.cancel() and not any(future.done() for future in (*busy, last))
    go.set()
    assert all(future.result(60) for future in (*busy, last))
    with pytest.raises(CancelledError):
        gone.result(60)
    assert "gone" not in {job.source for job in compiler._cache} and len(compiler._cache) == THREADS + 1
    assert takes(grammar_of(compiler, regex="gone"), "gone")
    compiler.close()


@pytest.mark.parametrize("error", [ValueError("a fault"), MemoryError(), KeyboardInterrupt(), BaseException("panic")])
def test_any_failure_is_the_requests_alone(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Panics of the library are no Exception."""

    def of_regex(library: LlguidanceLibrary, regex: str) -> Any:
        if regex == "bad":
            raise error
        return library.of_lark(f"start: /{regex}/")

    monkeypatch.setattr(compiler_module.LlguidanceLibrary, "of_regex", of_regex)
    compiler = byte_compiler()
    futures = [compiler.request(StructuredOutputs(regex=one)) for one in ("a", *["bad"] * (2 * THREADS), "b")]
    assert futures[0].result(60) and futures[-1].result(60)
    failures = [future.exception(60) for future in futures[1:-1]]
    assert all(isinstance(one, RequestError) and "regex='bad'" in str(one) for one in failures)
    assert len({id(one) for one in failures}) == 2 * THREADS, "a shared exception gathers tracebacks"
    assert len(compiler._cache) == 2
    compiler.close()


def test_a_vocabulary_that_cannot_be_had_is_each_requests_error_and_asked_for_again() -> None:
    loads: list[Vocabulary | None] = [None, byte_vocabulary()]
    compiler = GrammarCompiler(lambda: loads.pop(0), (END,))
    with pytest.raises(RequestError, match="needs the model's tokenizer"):
        grammar_of(compiler, regex="a")
    compiler.warm()
    assert takes(grammar_of(compiler, regex="a"), "a") and takes(grammar_of(compiler, regex="b"), "b") and not loads
    compiler.close()
    with pytest.raises(RequestError, match="has no end-of-sequence token"):
        GrammarCompiler(byte_vocabulary, ()).request(StructuredOutputs(regex="a"))


@pytest.mark.parametrize("engine", ["strict", "relaxed"])
def test_a_request_has_its_own_strictness_or_the_engines(engine: Strictness) -> None:
    compiler = GrammarCompiler(byte_vocabulary, (END,), engine)
    for asked in (None, "strict", "relaxed"):
        future = compiler.request(StructuredOutputs(json=UNIQUE, strictness=asked))
        if (asked or engine) == "strict":
            assert "uniqueItems cannot be enforced; strictness='relaxed' accepts it" in str(future.exception(60))
        else:
            assert future.result(60).warnings == ("uniqueItems cannot be enforced",)
    compiler.close()


@pytest.mark.parametrize(
    ("structured", "is_taken"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, True),
        ({"json": {"type": "nope"}}, False),
        ({"json": {"type": "array", "uniqueItems": True, "items": {"type": "nope"}}}, False),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, False),
        ({"json": {"$ref": "#/nowhere"}}, False),
        ({"json": {"type": "string", "pattern": "^(?=a)"}}, True),
        ({"json": {"type": "string", "pattern": "^(?=a)", "enum": [2]}}, False),
        ({"regex": "a("}, False),
        ({"grammar": "root ::= x"}, False),
    ],
)
def test_errors_name_the_relaxed_mode_only_where_it_takes_the_request(structured: Any, is_taken: bool) -> None:
    compiler = byte_compiler()
    error = compiler.request(StructuredOutputs(**structured)).exception(60)
    relaxed = compiler.request(StructuredOutputs(**structured, strictness="relaxed"))
    assert isinstance(error, RequestError) and (relaxed.exception(60) is None) == is_taken
    assert str(error).endswith("; strictness='relaxed' accepts it, with a warning") == is_taken
    assert "relaxed" not in str(relaxed.exception(60)) and ("relaxed" in str(error)) == is_taken
    compiler.close()


def test_after_the_end_nothing_is_compiled() -> None:
    go = threading.Event()
    compiler = GrammarCompiler(lambda: byte_vocabulary() if go.wait(60) else None, (END,))
    futures: list[Future[Grammar]] = [compiler.request(StructuredOutputs(regex="a" * n)) for n in range(1, THREADS + 3)]
    while not all(future.running() for future in futures[:THREADS]):
        time.sleep(0.001)
    compiler.close()
    assert [future.cancelled() for future in futures] == [False] * THREADS + [True] * 2
    go.set()
    assert all(future.result(60) for future in futures[:THREADS])
    with pytest.raises(RuntimeError):
        compiler.request(StructuredOutputs(regex="b"))
