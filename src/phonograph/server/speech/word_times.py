"""Times of words, by dynamic time warping over what the second pass of a model says of tokens and positions.

Word times are those of transformers' `return_timestamps="word"`.

Shapes: N tokens, P positions of the encoder.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from phonograph.server.speech.transcript import SECONDS_PER_STEP, Segment

_BEFORE = "\"'“¡¿([{-"
_AFTER = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
"""Punctuation that belongs to the word after it, or before it."""
WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages whose words are characters."""


@dataclass(slots=True)
class _Word:
    """Text, and the first and the last of its tokens."""

    text: str
    first: int
    last: int


def token_times(matrix_NP: np.ndarray) -> list[float]:
    """Return the time in seconds at which each token begins along the best path (Sakoe and Chiba, 1978).

    The path goes from the first token and position to the last, by one token, one position or both at a time. Costs are
    computed along diagonals. Equal costs are as in transformers: the step by a position.
    """
    tokens, positions = matrix_NP.shape
    matrix_NP = -np.nan_to_num(matrix_NP.astype(np.float64))
    moves = np.zeros((tokens + positions + 1, tokens + 1), np.int8)
    before, last = (np.full(tokens + 1, np.inf, np.float32) for _ in range(2))
    before[0] = 0
    for diagonal in range(2, tokens + positions + 1):
        at = np.arange(max(1, diagonal - positions), min(tokens, diagonal - 1) + 1)
        both, token, position = before[at - 1], last[at - 1], last[at]
        move = np.where((both < token) & (both < position), 0, np.where((token < both) & (token < position), 1, 2))
        before, last = last, np.full(tokens + 1, np.inf, np.float32)
        last[at] = matrix_NP[at - 1, diagonal - at - 1] + np.choose(move, (both, token, position))
        moves[diagonal, at] = move
    begins = np.zeros(tokens, np.int64)
    token, position = tokens, positions
    while token > 0 and position > 0:
        begins[token - 1] = position - 1
        move = moves[token + position, token]
        token, position = token - (move != 2), position - (move != 1)
    return (begins * SECONDS_PER_STEP).tolist()


def words_of(
    segment: Segment, times: Sequence[tuple[float, float]], language: str | None, decode: Callable[[list[int]], str]
) -> list[dict[str, object]]:
    """Return the words of a segment in OpenAI's form.

    Args:
        segment: tokens of text.
        times: begin and end of each of its tokens.
        language: code of the language.
        decode: returns the text of tokens.
    """
    words = _characters(segment.token_ids, decode)
    if language not in WITHOUT_SPACES:
        words = _spaced(words)
    return [
        {"word": one.text.strip(), "start": round(times[one.first][0], 2), "end": round(times[one.last][1], 2)}
        for one in _with_punctuation(words)
    ]


def _characters(token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[_Word]:
    """Return runs of tokens that are whole characters. A character may have several tokens."""
    whole, found, first, length = decode([*token_ids]), list[_Word](), 0, 0
    for last in range(len(token_ids)):
        text = decode([*token_ids[first : last + 1]])
        broken = length + text.find("\ufffd")
        if "\ufffd" not in text or broken >= len(whole) or whole[broken] == "\ufffd":
            found.append(_Word(text, first, last))
            first, length = last + 1, length + len(text)
    return found


def _spaced(parts: Sequence[_Word]) -> list[_Word]:
    """Join parts to words that begin with a space or are punctuation."""
    found: list[_Word] = []
    for part in parts:
        if not found or part.text.startswith(" ") or part.text.strip() in string.punctuation:
            found.append(part)
        else:
            found[-1] = _Word(found[-1].text + part.text, found[-1].first, part.last)
    return found


def _with_punctuation(words: Sequence[_Word]) -> list[_Word]:
    """Join punctuation to the word after it, then to the word before it."""
    found: list[_Word] = []
    for word in reversed(words):
        if found and word.text.startswith(" ") and word.text.strip() in _BEFORE:
            found[-1] = _Word(word.text + found[-1].text, word.first, found[-1].last)
        else:
            found.append(word)
    joined: list[_Word] = []
    for word in reversed(found):
        if joined and not joined[-1].text.endswith(" ") and word.text in _AFTER:
            joined[-1] = _Word(joined[-1].text + word.text, joined[-1].first, word.last)
        else:
            joined.append(word)
    return joined
