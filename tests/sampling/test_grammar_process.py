"""Grammars that explode: they end in time with an error, and others go on beside them."""

from __future__ import annotations

import time

import pytest

from phonograph.engine.grammars.compiler import GrammarCompiler
from phonograph.engine.tokenizer import Tokenizer
from phonograph.errors import RequestError
from phonograph.models.folder import DEMO, model_folder
from phonograph.models.spec import read_model_spec
from phonograph.structured_outputs import StructuredOutputs

HARD = "|".join(f"[a-z]{{1,{length}}}" for length in range(1, 2000))


def test_a_grammar_that_takes_too_long_is_an_error_and_others_go_on() -> None:
    compiler = GrammarCompiler(
        lambda: Tokenizer.load(model_folder(DEMO)), read_model_spec("demo", trust_remote_code=False), seconds=1.0
    )
    try:
        first = compiler.request(StructuredOutputs(regex="a"))
        assert compiler.request(StructuredOutputs(regex="a")) is first, "the same is compiled once"
        first.result(60)
        start = time.monotonic()
        hard = compiler.request(StructuredOutputs(regex=HARD))
        with pytest.raises(RequestError, match="takes more than 1 s or too much memory"):
            hard.result(60)
        assert time.monotonic() - start < 8
        # Known now: nobody pays for it again. The process is started again for others.
        assert compiler.request(StructuredOutputs(regex=HARD)).done()
        assert compiler.request(StructuredOutputs(regex="b")).result(60).matcher()
    finally:
        compiler.close()
