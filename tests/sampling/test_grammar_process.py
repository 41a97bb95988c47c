"""Grammars that explode: they end in time with an error, and others go on beside them."""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections.abc import Callable

import pytest

from phonograph.engine.grammars import compiler as compiler_module
from phonograph.engine.grammars.compiler import GrammarCompiler
from phonograph.engine.tokenizer import Tokenizer
from phonograph.errors import RequestError
from phonograph.models.folder import DEMO, model_folder
from phonograph.models.spec import read_model_spec
from phonograph.structured_outputs import StructuredOutputs

HARD = "|".join(f"[a-z]{{1,{length}}}" for length in range(1, 2000))


def demo_compiler(load: Callable[[], Tokenizer] = lambda: Tokenizer.load(model_folder(DEMO))) -> GrammarCompiler:
    return GrammarCompiler(load, read_model_spec("demo", trust_remote_code=False), seconds=1.0)


def test_a_grammar_that_takes_too_long_is_an_error_and_others_go_on() -> None:
    compiler = demo_compiler()
    try:
        first = compiler.request(StructuredOutputs(regex="a"))
        assert compiler.request(StructuredOutputs(regex="a")) is first, "the same is compiled once"
        first.result(60)
        start = time.monotonic()
        hard = compiler.request(StructuredOutputs(regex=HARD))
        with pytest.raises(RequestError, match="takes more than 1 s or too much memory"):
            hard.result(60)
        assert time.monotonic() - start < 8
        # The process is started again for others.
        assert compiler.request(StructuredOutputs(regex="b")).result(60).matcher()
    finally:
        compiler.close()


def test_a_grammar_that_took_too_long_is_compiled_when_it_is_asked_for_again() -> None:
    compiler = demo_compiler()
    structured = StructuredOutputs(regex="[a-z ]{1,600}")  # which is there long after a time of nothing is over
    try:
        compiler.request(StructuredOutputs(regex="b")).result(60)  # the process is there
        compiler._seconds = 0.0  # a machine so busy that nothing is done in time
        with pytest.raises(RequestError, match="takes more than 0 s"):
            compiler.request(structured).result(60)
        compiler._seconds = 60.0
        first = compiler.request(structured)
        assert first.result(60).matcher() and compiler.request(structured) is first
    finally:
        compiler.close()


def test_each_refusal_is_raised_anew_and_keeps_no_frame_alive() -> None:
    class Asker:
        """What a frame that asks may hold, such as a request."""

    compiler = demo_compiler()
    structured = StructuredOutputs(regex="a(")

    def ask() -> tuple[RequestError, weakref.ref[Asker]]:
        asker = Asker()
        try:
            compiler.request(structured).result(60)
        except RequestError as error:
            return error, weakref.ref(asker)
        raise AssertionError

    try:
        raised = [ask() for _ in range(4)]
        assert len({id(error) for error, _ in raised}) == 4
        assert {str(error) for error, _ in raised} == {"regex='a(': has a '(' that is not closed"}
        depths = {len(traceback.extract_tb(error.__traceback__)) for error, _ in raised}
        assert len(depths) == 1, "a traceback grows"
        askers = [asker for _, asker in raised]
        raised.clear()
        assert [asker() for asker in askers] == [None] * 4
        assert compiler.request(structured).done(), "what is wrong with a grammar is known"
    finally:
        compiler.close()


def test_a_job_that_nobody_waits_for_is_never_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun = threading.Event(), []

    def load() -> Tokenizer:
        go.wait(60)
        return Tokenizer.load(model_folder(DEMO))

    compiler = demo_compiler(load)
    read = compiler_module._for_the_library
    monkeypatch.setattr(compiler_module, "_for_the_library", lambda job: (begun.append(job.source), read(job))[1])
    try:
        busy = [compiler.request(StructuredOutputs(regex=text)) for text in "ab"]  # both threads
        gone, shared, last = (StructuredOutputs(regex=text) for text in "cde")
        left = compiler.request(gone)
        kept = compiler.request(shared)
        assert compiler.request(shared) is kept
        end = compiler.request(last)
        compiler.leave(left)
        compiler.leave(kept)  # one of two
        assert left.cancelled() and not kept.cancelled()
        again = compiler.request(StructuredOutputs(regex="cc"))
        compiler.leave(again)
        go.set()
        assert all(future.result(60).matcher() for future in (*busy, kept, end))
        assert begun == ["a", "b", "d", "e"]
        compiler.leave(end)  # too late: it is there
        assert compiler.request(last) is end
        assert compiler.request(gone).result(60).matcher(), "who asks later gets it"
    finally:
        go.set()
        compiler.close()
