"""Chooses, for every batch, the graph that runs it, the padding, and says why: one table look-up a step.

All decisions are made when the engine starts, one for each number of tokens and kind of batch, so that `decide` is
O(1), allocates nothing, and what runs is what `explain` printed.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from phonograph.graphs.capture_list import CaptureList
from phonograph.graphs.modes import GraphKey, GraphMode, GraphSet
from phonograph.graphs.resolve import Resolution


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """num_tokens, num_reqs: without padding; uniform_query_len: the query length all sequences share, or None."""

    num_tokens: int
    num_reqs: int
    uniform_query_len: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """mode: FULL, PIECEWISE or NONE for this step; key: the graph, None when eager; num_tokens: after padding.

    cause: the part of the reason without the numbers of this step, so that steps can be counted by it
    """

    mode: GraphMode
    key: GraphKey | None
    num_tokens: int
    cause: str
    reason: str

    @property
    def label(self) -> str:
        """A short name to count steps by."""
        return "eager" if self.key is None else f"{self.mode.value.lower()} {self.key.graphs.value}"


class Dispatcher:
    """The table from batch shapes to decisions."""

    def __init__(self, resolution: Resolution, captures: CaptureList, *, max_num_tokens: int) -> None:
        self.resolution = resolution
        self.captures = captures
        self._query_len = captures.decode_query_len
        general = captures.mixed or captures.piecewise
        uniform = f"uniform batch of query length {self._query_len}"
        decode_tiers = [(captures.decode, uniform), (general, f"{uniform} that no decode graph holds")]
        self._decode = [self._choose(tokens, decode_tiers) for tokens in range(max_num_tokens + 1)]
        mixed_tiers = [(general, "prefill or mixed batch")]
        self._mixed = [self._choose(tokens, mixed_tiers) for tokens in range(max_num_tokens + 1)]

    def decide(self, shape: BatchShape) -> Decision:
        """The decision for a batch of at most max_num_tokens tokens."""
        table = self._decode if shape.uniform_query_len == self._query_len else self._mixed
        return table[shape.num_tokens]

    def _choose(self, tokens: int, tiers: list[tuple[tuple[GraphKey, ...], str]]) -> Decision:
        """The smallest graph that holds `tokens`, of the first tier that has one, else eager."""
        for keys, kind in tiers:
            position = bisect_left(keys, tokens, key=lambda key: key.num_tokens)
            if position < len(keys):
                return self._graph(tokens, keys[position], kind)
        return self._eager(tokens, [key for keys, _ in tiers for key in keys])

    def _graph(self, tokens: int, key: GraphKey, kind: str) -> Decision:
        padding = key.num_tokens - tokens
        text = f"{kind}; " + (f"{padding} of {key.num_tokens} tokens are padding" if padding else "no padding")
        if key.graphs is not GraphSet.PIECEWISE:
            return Decision(mode=GraphMode.FULL, key=key, num_tokens=key.num_tokens, cause=kind, reason=text)
        text += "; attention runs between the pieces"
        return Decision(mode=GraphMode.PIECEWISE, key=key, num_tokens=key.num_tokens, cause=kind, reason=text)

    def _eager(self, tokens: int, keys: list[GraphKey]) -> Decision:
        mode = self.resolution.mode
        if mode is GraphMode.NONE:
            cause = reason = f"graphs are off: {self.resolution.reasons[-1].text}"
        elif keys:
            largest = max(key.num_tokens for key in keys)
            cause = "more tokens than the largest graph holds"
            reason = f"{tokens} tokens are more than the largest graph holds ({largest})"
        else:
            cause = reason = f"{mode.value} has no graph for a batch that is not uniform"
        return Decision(mode=GraphMode.NONE, key=None, num_tokens=tokens, cause=cause, reason=reason)
