"""Grammars over a vocabulary whose tokens are the 256 bytes, so that any text can be asked of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from checks.structured.walk import Walk, Walker
from phonograph.core.grammar import Grammar
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.structured.compiler import GrammarCompiler
from phonograph.structured.vocabulary import Vocabulary

END = 256


def byte_vocabulary(*more: bytes) -> Vocabulary:
    """Return a vocabulary of the bytes, the end, and tokens of several bytes."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *more]
    return Vocabulary(tokens, frozenset({END}), (END,), len(tokens))


def byte_compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary, (END,))


def compiled(compiler: GrammarCompiler, **structured: Any) -> Grammar:
    return compiler.request(StructuredOutputs(**{"disable_any_whitespace": True, **structured})).result()


def takes(grammar: Grammar, text: str) -> bool:
    """Return True if the grammar allows the text, and the end after it."""
    tokens = [*text.encode(), END]
    return grammar.matcher().validate(tokens) == len(tokens)


@cache
def _walker() -> Walker:
    vocabulary = byte_vocabulary()
    return Walker(vocabulary.tokens, vocabulary.eos, vocabulary.size)


def walk(grammar: Grammar, rng: np.random.Generator, most: int = 200) -> Walk:
    """Draw a text byte by byte through the masks."""
    return _walker().walk(grammar.matcher(), rng, most)
