"""Places of a text where given last tokens occur, and the continuation that is the most frequent after them.

The algorithm is that of suffix decoding (Oliaro et al. 2024, "SuffixDecoding: A Model-Free Approach to Speeding Up
Large Language Model Inference"). A match of m tokens gives a path: the most frequent next token, then the most
frequent one after both, and so on. The probability of a token is the share of the places that go on so far. A path's
score is the sum of its probabilities, which is the number of tokens that are expected to be right.

A suffix tree has every count, at several nodes a token. Here each token has a link to the earlier place with the same
last two tokens, as in a compressor of the LZ77 family: memory and time of an insertion do not depend on the length of
a match. A query walks the newest of these places, compares their tokens, and counts those with the longest matches.
So a count is of recent places, and a match has two tokens or more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

END = -1
"""Token between two texts, which no pattern has."""
MOST_VISITED = 64
"""Places that are compared, the newest first."""
MOST_COUNTED = 16
"""Places that are counted, those with the longest matches first."""


class PathLimits(NamedTuple):
    """Bounds of a continuation.

    Attributes:
        tokens: most tokens.
        match: most last tokens that are compared.
        factor: most tokens for each token of the match.
        probability: least probability of a token.
    """

    tokens: int
    match: int
    factor: float
    probability: float


class SuffixIndex:
    """A text with its places by their last two tokens. A place is the number of tokens before a token."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self._first = 0  # place of tokens[0]
        self._earlier = array("q")
        self._latest: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens, of the vocabulary or `END`."""
        tokens, earlier, latest = self.tokens, self._earlier, self._latest
        before = tokens[-1] if tokens else END
        for place, token in enumerate(token_ids, self._first + len(tokens)):
            pair = before << 32 | token & 0xFFFFFFFF
            earlier.append(latest.get(pair, -1))
            latest[pair] = place
            tokens.append(token)
            before = token

    def drop(self, count: int) -> None:
        """Remove the first tokens. It takes as long as the rest is large."""
        del self.tokens[:count], self._earlier[:count]
        self._first += count
        self._latest = {pair: place for pair, place in self._latest.items() if place >= self._first}

    def continuation(self, pattern: array[int], limits: PathLimits) -> tuple[list[int], float]:
        """Return the path with the highest score after the last tokens of `pattern`, and the score.

        Of equal scores, the one after the longest match counts.

        Args:
            pattern: tokens; those of this index itself, whose end is a place without a continuation, or any others.
            limits: of the path.
        """
        matches = self._matches(pattern, limits.match)
        best, best_score = [], 0.0
        for number, (length, _) in enumerate(matches, 1):
            if number < len(matches) and matches[number][0] == length:
                continue
            most = min(limits.tokens, int(length * limits.factor))
            if most <= best_score:
                break  # the paths of shorter matches are shorter
            path, score = self._path([place for _, place in matches[:number]], most, limits.probability)
            if score > best_score:
                best, best_score = path, score
        return best, best_score

    def _matches(self, pattern: array[int], longest: int) -> list[tuple[int, int]]:
        """Return lengths and places of matches, the longest first, and of equal lengths the newest first."""
        if len(pattern) < 2:
            return []
        tokens, earlier, first = self.tokens, self._earlier, self._first
        longest = min(longest, len(pattern))
        place = self._latest.get(pattern[-2] << 32 | pattern[-1], -1)
        found: list[tuple[int, int]] = []
        whole = pattern[-longest:]
        for _ in range(MOST_VISITED):
            index = place - first
            if index < 1:
                break
            if index + 1 >= longest and tokens[index + 1 - longest : index + 1] == whole:
                length = longest
            else:
                length, most = 2, min(longest, index + 1)
                while length < most and tokens[index - length] == whole[-1 - length]:
                    length += 1
            found.append((length, place))
            place = earlier[index]
        found.sort(key=lambda match: -match[0])
        return found[:MOST_COUNTED]

    def _path(self, places: Sequence[int], most: int, least: float) -> tuple[list[int], float]:
        rests: list[array[int]] = []
        for place in places:
            start = place + 1 - self._first
            rest = self.tokens[start : start + most]
            if END in rest:
                del rest[rest.index(END) :]
            rests.append(rest)
        path, score, share = list[int](), 0.0, 1.0
        while (done := len(path)) < most:
            if rests.count(rests[0]) == len(rests):  # all places go on alike
                same = rests[0][done:]
                return [*path, *same], score + share * len(same)
            followers: dict[int, list[array[int]]] = {}
            for rest in rests:
                if done < len(rest):
                    followers.setdefault(rest[done], []).append(rest)
            # Of equally frequent tokens, the one after the longest and newest match.
            token, going = max(followers.items(), key=lambda follower: len(follower[1]))
            share *= len(going) / sum(map(len, followers.values()))
            if share < least:
                break
            path.append(token)
            score += share
            rests = going
        return path, score
