"""Grammars over a vocabulary whose tokens are the 256 bytes, so that any text can be asked of them."""

from __future__ import annotations

from typing import Any

from phonograph.structured.compiler import GrammarCompiler
from phonograph.structured.protocol import Grammar
from phonograph.structured.vocabulary import Vocabulary
from phonograph.structured_outputs import StructuredOutputs

END = 256


def byte_vocabulary(*more: bytes) -> Vocabulary:
    """The bytes, the end, and tokens of several bytes."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *more]
    return Vocabulary(tokens, frozenset({END}), (END,), len(tokens), lambda text: list(text.encode()))


def byte_compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary, (END,))


def compiled(compiler: GrammarCompiler, **structured: Any) -> Grammar:
    return compiler.request(StructuredOutputs(**{"disable_any_whitespace": True, **structured})).result()


def takes(grammar: Grammar, text: str) -> bool:
    """Whether the text, and then the end, is what the grammar allows."""
    tokens = [*text.encode(), END]
    return grammar.matcher().validate(tokens) == len(tokens)
