"""The index of suffix decoding beside its definition, by brute force over all places of a text."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phonograph.speculation import suffix_index
from phonograph.speculation.suffix_drafts import OutputCache
from phonograph.speculation.suffix_index import END, PathLimits, SuffixIndex


def matches_of(text: Sequence[int], pattern: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """Return lengths and places of the matches that count."""
    found: list[tuple[int, int]] = []
    for place in range(len(text) - 1, 0, -1):
        length = 0
        while length < min(longest, len(pattern), place + 1) and text[place - length] == pattern[-1 - length]:
            length += 1
        if length >= 2:
            found.append((length, place))
    newest = found[: suffix_index.MOST_VISITED]
    return sorted(newest, key=lambda match: (-match[0], -match[1]))[: suffix_index.MOST_COUNTED]


def path_of(text: Sequence[int], places: Sequence[int], most: int, least: float) -> tuple[list[int], float]:
    path, score, share = list[int](), 0.0, 1.0
    while len(path) < most:
        begun = [place for place in places if list(text[place + 1 : place + 1 + len(path)]) == path]
        ends = [place + 1 + len(path) for place in begun]
        next_tokens = [text[end] for end in ends if end < len(text) and text[end] != END]
        if not next_tokens:
            break
        counts = Counter(next_tokens)
        # Of equal counts, the token after the longest and newest match, which stands first.
        token = max(counts, key=lambda one: (counts[one], -next_tokens.index(one)))
        share *= counts[token] / len(next_tokens)
        if share < least:
            break
        path.append(token)
        score += share
    return path, score


def continuation_of(text: Sequence[int], pattern: Sequence[int], limits: PathLimits) -> tuple[list[int], float]:
    """Return the best path by its definition: of all lengths of a match, the highest score, then the longest match."""
    matches = matches_of(text, pattern, limits.match)
    best: tuple[list[int], float] = ([], 0.0)
    for length in range(limits.match, 1, -1):
        places = [place for found, place in matches if found >= length]
        most = min(limits.tokens, int(length * limits.factor))
        found = path_of(text, places, most, limits.probability)
        if found[1] > best[1] + 1e-9:
            best = found
    return best


def texts(most: int, alphabet: int = 3) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, alphabet - 1), max_size=most)


LIMITS = st.builds(
    PathLimits,
    st.integers(1, 9),
    st.integers(2, 7),
    st.sampled_from([0.0, 0.4, 1.0, 1.5, 4.0]),
    st.sampled_from([0.0, 0.1, 0.34, 0.6, 1.0]),
)


@given(texts(150), LIMITS, st.integers(1, 20))
def test_continuations_of_a_text_are_those_of_the_definition(text: list[int], limits: PathLimits, size: int) -> None:
    """Whatever the runs by which the text grew."""
    index = SuffixIndex()
    for start in range(0, len(text), size):
        index.extend(text[start : start + size])
    assert index.tokens.tolist() == text
    path, score = index.continuation(index.tokens, limits)
    wanted, wanted_score = continuation_of(text, text, limits)
    assert (path, score) == (wanted, pytest.approx(wanted_score))
    assert len(path) <= limits.tokens and score <= len(path)


@given(st.lists(texts(30), max_size=8), texts(12), LIMITS)
def test_continuations_of_other_texts(outputs: list[list[int]], pattern: list[int], limits: PathLimits) -> None:
    index, whole = SuffixIndex(), list[int]()
    for one in outputs:
        index.extend((END, *one))
        whole += [END, *one]
    path, score = index.continuation(array("i", pattern), limits)
    wanted, wanted_score = continuation_of(whole, pattern, limits)
    assert (path, score) == (wanted, pytest.approx(wanted_score))


@given(st.lists(texts(20), max_size=30), st.integers(1, 5), st.integers(1, 60), texts(10), LIMITS)
def test_a_cache_has_the_latest_outputs(
    outputs: list[list[int]], most: int, tokens: int, pattern: list[int], limits: PathLimits
) -> None:
    """Dropping the oldest leaves the index of the others, as if those had never been there."""
    cache, kept = OutputCache(most, tokens), list[list[int]]()
    for one in outputs:
        cache.add(one)
        if len(one) >= 2:
            kept.append([END, *one])
        if len(kept) > 1.25 * most or sum(map(len, kept)) > 1.25 * tokens:
            while kept and (len(kept) > most or sum(map(len, kept)) > tokens):
                del kept[0]
    whole = [token for one in kept for token in one]
    assert cache.index.tokens.tolist() == whole and len(whole) <= 1.25 * tokens
    fresh = SuffixIndex()
    fresh.extend(whole)
    known = array("i", pattern)
    assert cache.index.continuation(known, limits) == fresh.continuation(known, limits)


def test_a_cache_of_no_requests_keeps_nothing() -> None:
    cache = OutputCache(0, 100)
    cache.add([1, 2, 3])
    assert len(cache.index) == 0


def test_only_the_newest_places_are_visited() -> None:
    """A text in which a pair is more frequent than that; the oldest of its places had the longest match."""
    index = SuffixIndex()
    index.extend([7, 8, 9, 1, 2, 5])
    for number in range(suffix_index.MOST_VISITED):
        index.extend([100 + number, 1, 2, 6])
    index.extend([7, 8, 9, 1, 2])
    assert index.continuation(index.tokens, PathLimits(4, 24, 1.0, 0.0))[0][:1] == [6]


def test_the_most_frequent_token_wins_and_the_longest_match_breaks_ties() -> None:
    index = SuffixIndex()
    for token in (5, 5, 6):
        index.extend([1, 2, token, END])
    index.extend([4, 1, 2, 6, END])
    pattern, limits = array("i", [3, 1, 2]), PathLimits(1, 24, 1.0, 0.0)
    assert index.continuation(pattern, limits) == ([6], 0.5)
    index.extend([1, 2, 5, END])
    assert index.continuation(pattern, limits) == ([5], 0.6)
    assert index.continuation(array("i", [4, 1, 2]), limits) == ([6], 1.0)
    assert index.continuation(pattern, limits._replace(probability=0.6)) == ([5], 0.6)
    assert index.continuation(pattern, limits._replace(probability=0.61)) == ([], 0.0)


def test_of_equal_scores_the_longest_match_counts() -> None:
    index = SuffixIndex()
    for output in ([4, 1, 2, 7], [1, 2, 8, 9], [1, 2, 8, 9], [1, 2, 6]):
        index.extend((END, *output))
    limits = PathLimits(2, 24, 1.0, 0.0)
    assert index.continuation(array("i", [3, 1, 2]), limits) == ([8, 9], 1.0)
    assert index.continuation(array("i", [4, 1, 2]), limits) == ([7], 1.0)
