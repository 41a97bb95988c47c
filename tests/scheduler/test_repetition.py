"""Repeated patterns at the end of an output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phonograph import LLM, RepetitionDetectionParams, SamplingParams
from phonograph.core.repetition_detection import RepetitionDetector
from phonograph.errors import RequestError


def repeats(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """Return True if the end of the tokens is one pattern several times."""
    count = params.min_count
    return any(
        len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
        for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
    )


@given(
    tokens=st.lists(st.integers(0, 2), max_size=40),
    least=st.integers(0, 3),
    more=st.integers(0, 6),
    count=st.integers(2, 4),
)
def test_patterns_are_found_where_they_end(tokens: list[int], least: int, more: int, count: int) -> None:
    most = max(least + more, 1)
    params = RepetitionDetectionParams(max_pattern_size=most, min_pattern_size=least, min_count=count)
    detector = RepetitionDetector(params)
    for length, token in enumerate(tokens, 1):
        assert detector.push(token) == repeats(tokens[:length], params)


def test_a_repeated_pattern_ends_the_output() -> None:
    pattern = {"max_pattern_size": 3, "min_count": 4}
    with LLM("demo", max_model_len=256, max_num_seqs=4, enforce_eager=True) as llm:
        one = SamplingParams(temperature=0, max_tokens=32, allowed_token_ids=[65], repetition_detection=pattern)
        late = SamplingParams(
            temperature=0, max_tokens=32, min_tokens=9, allowed_token_ids=[65], repetition_detection=pattern
        )
        none = SamplingParams(temperature=0, max_tokens=32, allowed_token_ids=[65], repetition_detection={})
        found = [output.outputs[0] for output in llm.generate(["a"] * 3, [one, late, none])]
        assert [(len(one.token_ids), one.finish_reason) for one in found] == [
            (4, "repetition"),
            (9, "repetition"),
            (32, "length"),
        ]
        assert found[0].stop_reason == "repetition_detected" and found[2].stop_reason is None


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"max_pattern_size": 5}, "repetition_detection.min_count=0: must be an integer >= 2"),
        ({"max_pattern_size": 10**6, "min_count": 2}, "max_pattern_size=1000000: must be an integer >= 0 and <= 4096"),
        ({"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2}, "min_pattern_size=2: must be"),
        ({"min_count": True}, "min_count=True: must be"),
        ({"size": 5}, "repetition_detection='size': is not a field; fields are max_pattern_size"),
        (5, "repetition_detection=5: must be RepetitionDetectionParams or a mapping of its fields"),
    ],
)
def test_impossible_patterns_are_refused(values: object, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(repetition_detection=values)  # pyright: ignore[reportArgumentType]
    assert says in str(caught.value)
