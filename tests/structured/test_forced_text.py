"""Grammars that leave one text: each token that a mask allows leads to it, with any decoder of the tokenizer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from sentencepiece_like import sentencepiece_like
from tokenizers_made import byte_fallback, byte_level

from phonograph.core.grammar import Matcher
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.structured.compiler import GrammarCompiler
from phonograph.structured.vocabulary import Vocabulary
from phonograph.text.tokenizer import Tokenizer

TOKENIZERS = {"sentencepiece": sentencepiece_like, "byte level": byte_level, "byte fallback": byte_fallback}


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """With three rows that no token has."""
    size = len(tokenizer.hugging_face)
    return Vocabulary.of_tokenizer(tokenizer, size + 3, sorted(tokenizer.special_token_ids)[:1])


def allowed(matcher: Matcher, size: int) -> list[int]:
    bitmask = np.full((1, -(-size // 32)), -1, np.int32)
    matcher.fill(bitmask, 0)
    return np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "structured",
    [
        {"choice": ["Tom a."]},
        {"choice": [" Tom  a"]},
        {"choice": ["a Tom", "a Toma"]},
        {"choice": ["日本 x\n"]},
        {"choice": ["a Tom. " * 200]},
        {"json": {"type": "object", "properties": {"a Tom": {"const": "Größe"}}, "required": ["a Tom"]}},
    ],
)
def test_each_token_that_a_mask_allows_is_taken(name: str, structured: dict[str, Any]) -> None:
    own = vocabulary(TOKENIZERS[name]())
    structured = {"disable_any_whitespace": True, **structured}
    matcher = GrammarCompiler(lambda: own, own.eos).request(StructuredOutputs(**structured)).result().matcher()
    text = b""
    while not matcher.ended:
        token_ids = allowed(matcher, own.size)
        assert token_ids and all(matcher.validate([one]) for one in token_ids), (text, token_ids)
        matcher.accept(token_ids[0])
        text += b"" if token_ids[0] in own.eos else own.tokens[token_ids[0]]
    if "choice" in structured:
        assert text.decode() in structured["choice"]
    else:
        assert json.loads(text) == {"a Tom": "Größe"}
