"""Grammars that begin after the end of reasoning: masks, validation, rollback and copies agree with a plain model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from byte_grammars import END, byte_compiler, byte_vocabulary, compiled, takes

from phonograph.core.grammar import Grammar, GrammarError, Matcher
from phonograph.core.sampling_params import SamplingParams
from phonograph.errors import RequestError
from phonograph.structured.phases import PhasedGrammar, with_reasoning

SIZE = byte_vocabulary().size
START, CLOSE = ord("<"), ord(">")


@pytest.fixture(scope="module")
def digits() -> Grammar:
    return compiled(byte_compiler(), regex="[0-9]{2}")


def mask(matcher: Matcher) -> set[int]:
    bitmask_RW = np.full((2, -(-SIZE // 32)), 0x55555555, np.int32)
    matcher.fill(bitmask_RW, 1)
    assert (bitmask_RW[0] == 0x55555555).all()
    return set(np.flatnonzero(np.unpackbits(bitmask_RW[1].view(np.uint8), bitorder="little")[:SIZE]))


def allowed(
    output: Sequence[int], *, grammar: Grammar | None, end: Sequence[int], start: int | None, budget: int | None
) -> set[int] | None:
    """Return the tokens that may follow an output, from the definition; None after the end."""
    every = set(range(SIZE))

    def after(rest: Sequence[int]) -> set[int] | None:
        if grammar is None:
            return None if END in rest else every
        matcher = grammar.matcher()
        for token_id in rest:
            matcher.accept(token_id)
        return None if matcher.ended else mask(matcher)

    if start is not None:
        if not output:
            first = after([])
            return None if first is None else first | {start}
        if output[0] != start:
            return after(output)
    begin = int(start is not None)
    for place in range(begin + len(end), len(output) + 1):
        if list(output[place - len(end) : place]) == list(end):
            return after(output[place:])
    if grammar is None and END in output:
        return None
    if budget is not None and len(output) - begin >= budget:
        begun = max(size for size in range(len(end)) if list(output[len(output) - size :]) == list(end[:size]))
        return {end[begun]}
    return every if grammar is None else every - {END}


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("end", [[CLOSE], [ord("/"), ord("/"), CLOSE]])
@pytest.mark.parametrize("start", [None, START])
@pytest.mark.parametrize("budget", [None, 0, 4])
def test_every_step_is_that_of_the_definition(
    digits: Grammar, constrained: bool, end: list[int], start: int | None, budget: int | None
) -> None:
    grammar = digits if constrained else None
    phased = PhasedGrammar(grammar, end, [END], start=start, budget=budget)
    about = {"grammar": grammar, "end": end, "start": start, "budget": budget}
    alphabet = [START, *end, ord("1"), ord("2"), ord("x"), END]
    rng = random.Random(5)
    for _ in range(60):
        matcher, output = phased.matcher(), list[int]()
        for _ in range(14):
            if rng.random() < 0.2:
                count = rng.randrange(len(output) + 1)
                matcher.rollback(count)
                del output[len(output) - count :]
            if rng.random() < 0.2:
                twin, matcher = matcher, matcher.copy()
                twin.rollback(len(output))
            expected = allowed(output, **about)
            assert matcher.ended == (expected is None)
            run = rng.choices(alphabet, k=4)
            known, number = list(output), 0
            while number < len(run) and run[number] in (allowed(known, **about) or ()):
                known.append(run[number])
                number += 1
            assert matcher.validate(run) == number, (output, run)
            if expected is None:
                continue
            assert mask(matcher) == expected
            token_id = rng.choice(alphabet)
            if token_id in expected:
                matcher.accept(token_id)
                output.append(token_id)
            elif token_id != END or constrained:
                with pytest.raises(GrammarError):
                    matcher.accept(token_id)
        assert allowed(output, **about) is None or mask(matcher) == allowed(output, **about)


def test_texts(digits: Grammar) -> None:
    phased = PhasedGrammar(digits, [CLOSE], [END])
    assert takes(phased, "I think 7>42") and takes(phased, ">42") and takes(phased, "<x>42")
    assert not takes(phased, "I think 7>4>2") and not takes(phased, "42") and not takes(phased, "I think>")
    decided = PhasedGrammar(digits, [CLOSE], [END], start=START)
    assert takes(decided, "42") and takes(decided, "<so>42") and not takes(decided, "so>42")
    assert phased.warnings == digits.warnings and PhasedGrammar(None, [1], [END]).warnings == ()


def test_parameters_make_the_grammar(digits: Grammar) -> None:
    assert with_reasoning(digits, SamplingParams(), [END]) is digits
    assert with_reasoning(None, SamplingParams(reasoning_end_token_ids=[5]), [END]) is None
    both = with_reasoning(digits, SamplingParams(reasoning_end_token_ids=[5], reasoning_start_token_id=4), [END])
    assert isinstance(both, PhasedGrammar) and both.grammar is digits and (both.start, both.end) == (4, (5,))
    budget = SamplingParams(reasoning_end_token_ids=[5, 6], thinking_token_budget=9)
    alone = with_reasoning(None, budget, [END])
    assert isinstance(alone, PhasedGrammar) and alone.grammar is None and (alone.budget, alone.end) == (9, (5, 6))


@pytest.mark.parametrize(
    ("values", "parameter"),
    [
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"thinking_token_budget": -1, "reasoning_end_token_ids": [1]}, "thinking_token_budget"),
        ({"reasoning_end_token_ids": "x"}, "reasoning_end_token_ids"),
        ({"reasoning_start_token_id": -1}, "reasoning_start_token_id"),
        ({"shown_token_ids": [1.5]}, "shown_token_ids"),
    ],
)
def test_wrong_parameters(values: dict[str, object], parameter: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("name", ["reasoning_end_token_ids", "reasoning_start_token_id", "shown_token_ids"])
def test_tokens_that_the_model_has_not(name: str) -> None:
    value = 70 if name.endswith("_id") else [1, 70]
    with pytest.raises(RequestError, match=f"{name}=70: the model's token ids are 0 to 69"):
        SamplingParams(**{name: value}).check_vocabulary(70)
