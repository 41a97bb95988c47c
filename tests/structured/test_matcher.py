"""Matchers: masks, tokens, drafts and the way back, against matchers that start anew and against sets of texts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from byte_grammars import byte_compiler, byte_vocabulary

from phonograph.core.grammar import Grammar, GrammarError, Matcher
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.structured.compiler import GrammarCompiler
from phonograph.structured.vocabulary import Vocabulary

WALKS = 40
"""Random walks of each grammar; 2,500 by hand."""
PIECES = (b"aa", b"ab", b'{"', b'": ', b'"}', b", ", b"12", "é".encode()[:1], "é".encode()[1:] + b"a", b"abab")
ENDS = 256 + len(PIECES), 257 + len(PIECES)
THINK = ENDS[1] + 1
SIZE = THINK + 40
TOKENS = [*(bytes([byte]) for byte in range(256)), *PIECES, b"</s>", b"<|end|>", b"<think>", *[b""] * 39]
GRAMMARS: dict[str, dict[str, Any]] = {
    "object": {
        "json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 3}}},
        "disable_any_whitespace": True,
    },
    "list": {"json": {"type": "array", "items": {"enum": ["ab", 12, None]}, "maxItems": 3}},
    "regex": {"regex": "(ab|a)*é?[0-9]{0,2}"},
    "choice": {"choice": ["a", "ab", "abab", "<think>", "é"]},
    "lark": {"grammar": 'start: "a" start "a" | "b"'},
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: Vocabulary(TOKENS, frozenset({*ENDS, THINK}), ENDS, SIZE), ENDS)


def compiled(compiler: GrammarCompiler, **structured: Any) -> Grammar:
    return compiler.request(StructuredOutputs(**structured)).result()


def allowed(matcher: Matcher) -> list[int]:
    """Return the tokens of the mask, and check that nothing else was written."""
    words = -(-SIZE // 32)
    mask_RW = np.full((3, words), 0x5A5A5A5A, np.int32)
    matcher.fill(mask_RW, 1)
    assert (mask_RW[[0, 2]] == 0x5A5A5A5A).all()
    return np.flatnonzero(np.unpackbits(mask_RW[1].view(np.uint8), bitorder="little")).tolist()


def replayed(grammar: Grammar, token_ids: list[int]) -> Matcher:
    matcher = grammar.matcher()
    for token_id in token_ids:
        matcher.accept(token_id)
    return matcher


def check(matcher: Matcher, grammar: Grammar, taken: list[int], rng: random.Random) -> list[int]:
    """Compare a matcher with one that starts anew; return what may come next."""
    anew = replayed(grammar, taken)
    assert matcher.ended == anew.ended == (taken[-1:] in ([ENDS[0]], [ENDS[1]]))
    if matcher.ended:
        assert matcher.validate([ENDS[0]]) == matcher.validate([97]) == 0
        return []
    choices = allowed(matcher)
    assert choices == allowed(anew) and choices and not set(choices) & {THINK, *range(THINK, SIZE)}
    assert len(set(choices) & {*ENDS}) in (0, 2)
    for token_id in {*rng.sample(range(SIZE), 20), *rng.sample(choices, min(3, len(choices))), *ENDS, THINK, SIZE - 1}:
        assert matcher.validate([token_id]) == (token_id in choices)
    return choices


@pytest.mark.parametrize("kind", GRAMMARS)
def test_any_way_to_a_position_is_the_same(compiler: GrammarCompiler, kind: str) -> None:
    grammar, ends = compiled(compiler, **GRAMMARS[kind]), 0
    for seed in range(WALKS):
        rng = random.Random(f"{kind} {seed}")
        matcher, taken = grammar.matcher(), list[int]()
        others: list[tuple[Matcher, list[int]]] = []
        for _ in range(25):
            choices = check(matcher, grammar, taken, rng)
            action = rng.random()
            if action < 0.1:
                others.append((matcher.copy(), list(taken)))
            elif action < 0.25 or matcher.ended:
                count = rng.randint(0, len(taken))
                matcher.rollback(count)
                del taken[len(taken) - count :]
            elif action < 0.4:
                draft = [*rng.choices(choices, k=2), rng.choice(range(SIZE)), ENDS[1], rng.choice(choices)]
                copy, count = matcher.copy(), 0
                for token_id in draft:
                    try:
                        copy.accept(token_id)
                    except GrammarError:
                        break
                    count += 1
                assert matcher.validate(draft) == count
            elif action < 0.55:
                wrong = [one for one in rng.sample(range(SIZE), 30) if not matcher.validate([one])]
                for token_id in wrong:
                    with pytest.raises(GrammarError, match=f"token {token_id} is not allowed here"):
                        matcher.accept(token_id)
            else:
                stops = [one for one in choices if one in ENDS]
                token_id = rng.choice(stops if stops and rng.random() < 0.3 else choices)
                matcher.accept(token_id)
                taken.append(token_id)
                ends += matcher.ended
        for other, there in others:
            check(other, grammar, there, rng)
    assert ends > WALKS / 4


def test_masks_are_those_of_the_texts(compiler: GrammarCompiler) -> None:
    for seed in range(WALKS):
        rng = random.Random(seed)
        texts = {"".join(rng.choices('aab"é', k=rng.randint(1, 5))) for _ in range(rng.randint(1, 6))}
        grammar, encoded = compiled(compiler, choice=sorted(texts)), {text.encode() for text in texts}
        pending = [(grammar.matcher(), b"")]
        while pending:
            matcher, begun = pending.pop()
            right = {
                token_id
                for token_id, token in enumerate(TOKENS[: ENDS[0]])
                if any(text.startswith(begun + token) for text in encoded)
            }
            choices = set(allowed(matcher))
            assert choices - {*ENDS} <= right and {TOKENS[one][0] for one in right} == {
                TOKENS[one][0] for one in choices - {*ENDS}
            }
            assert choices & {*ENDS} == ({*ENDS} if begun in encoded else set())
            for token_id in right:
                after = matcher.copy()
                after.accept(token_id)
                pending.append((after, begun + TOKENS[token_id]))


def test_special_tokens_are_no_text(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, regex=r"[\s\S]*")
    for text in ("", "<think>", "</s>", "a<"):
        matcher = replayed(grammar, list(text.encode()))
        right = [token_id for token_id in range(ENDS[0]) if matcher.validate([token_id])]
        assert allowed(matcher) == [*right, *ENDS] and right[:128] == [*range(128)]
        for token_id in (THINK, THINK + 1, SIZE - 1):
            with pytest.raises(GrammarError, match="not allowed here"):
                matcher.accept(token_id)


def test_a_limit_of_the_library_is_an_error_and_no_end(compiler: GrammarCompiler) -> None:
    matcher, count = compiled(compiler, regex="(a{0,1000}){0,1000}").matcher(), 0
    with pytest.raises(GrammarError):
        while count < 500:
            choices = allowed(matcher)
            assert ord("a") in choices, f"an end after {count} tokens, without an error"
            matcher.accept(ord("a"))
            count += 1
    assert 0 < count < 500
    for call in (lambda: allowed(matcher), lambda: matcher.accept(ord("a")), lambda: matcher.accept(ENDS[0])):
        with pytest.raises(GrammarError):
            call()


def test_a_text_that_must_follow_may_have_any_of_its_tokens() -> None:
    own = byte_vocabulary(b"ab", b"abc")
    compiler = GrammarCompiler(lambda: own, own.eos)
    for structured in ({"grammar": 'root ::= "abc"'}, {"grammar": 'start: "abc"'}, {"choice": ["abc"]}):
        bitmask = np.zeros((1, -(-own.size // 32)), np.int32)
        compiler.request(StructuredOutputs(**structured)).result().matcher().fill(bitmask, 0)
        assert np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist() == [97, 257, 258]
    # Where the library looks for the end of this text, it does so until the memory is full.
    endless = compiler.request(StructuredOutputs(grammar='start: /a+/ "a"')).result(60).matcher()
    assert endless.validate([97] * 50) == 50
    compiler.close()


def test_an_ambiguous_grammar_ends_with_an_error_before_it_is_slow() -> None:
    compiler = byte_compiler()
    structured = StructuredOutputs(grammar="root ::= root [ab] root | [ab]")
    matcher = compiler.request(structured).result().matcher()
    bitmask = np.zeros((1, 9), np.int32)
    with pytest.raises(GrammarError, match="max is 500"):
        for _ in range(1000):
            matcher.fill(bitmask, 0)
            matcher.accept(97)
    compiler.close()
