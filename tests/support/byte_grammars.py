"""Grammars over a vocabulary whose tokens are the 256 bytes, so that any text can be asked of them."""

from __future__ import annotations

import json
from typing import Any

from phonograph.engine.grammars import worker

END = 256


def byte_compiler() -> Any:
    import xgrammar

    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    return xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=END + 1, stop_token_ids=[END])
    )


def compiled(compiler: Any, kind: str, source: Any) -> Any:
    text = source if isinstance(source, str) else json.dumps(source)
    return worker._compile(compiler, worker.Job(kind, text, False))


def takes(grammar: Any, text: str) -> bool:
    """Whether the text, and then the end, is what the grammar allows."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(END)
