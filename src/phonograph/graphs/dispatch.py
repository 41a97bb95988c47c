"""Dispatch of batches to graphs, with padding and the reason: one table look-up a step.

Decisions are made when the engine starts, one for each number of tokens and kind of batch. So `decide` is O(1),
allocates nothing, and agrees with `explain`. Those about decodes with drafts are made when their numbers first occur;
the latest are kept.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from phonograph.graphs.capture_list import CaptureList
from phonograph.graphs.modes import GraphKey, GraphMode, GraphSet
from phonograph.graphs.resolve import Resolution

_DECODES = "decodes of one token"
_MIXED = "prefill or mixed batch"
_KEPT = 1024
"""Number of decisions about drafts that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Shape of a batch without padding.

    Attributes:
        num_tokens: query tokens of all sequences.
        num_reqs: sequences.
        decode_query_len: the longest query if all sequences are decodes, else None: 1, or more with drafts.
        num_logits: rows of logits; 0 for the last token of each request.
        makes_drafts: the step ends with the passes of a draft model.
        shares: many sequences share long prefixes, as far as is known from earlier steps.
    """

    num_tokens: int
    num_reqs: int
    decode_query_len: int | None
    num_logits: int = 0
    makes_drafts: bool = False
    shares: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision for one batch, with the reason.

    Attributes:
        mode: FULL, PIECEWISE or NONE.
        key: the graph; None for an eager step.
        num_tokens: after padding.
        reason: a sentence for the user, with the numbers of the step.
        cause: the reason without numbers of the step, to count steps by.
    """

    mode: GraphMode
    key: GraphKey | None
    num_tokens: int
    cause: str
    reason: str

    @property
    def label(self) -> str:
        """Short name to count steps by."""
        if self.key is not None:
            mode = self.mode.value.lower()
            return mode if mode == self.key.kind else f"{mode} {self.key.kind}"
        return "eager"

    def eagerly(self, num_tokens: int, why: str) -> Decision:
        """Return an eager decision for the same batch, if a request needs what its graph cannot do.

        Args:
            num_tokens: tokens of the batch without padding.
            why: the reason.
        """
        return Decision(mode=GraphMode.NONE, key=None, num_tokens=num_tokens, cause=why, reason=why)


class Dispatcher:
    """Table from batch shapes to decisions.

    Args:
        resolution: the mode that runs.
        captures: the graphs that there are.
        max_num_tokens: largest number of tokens in a step.

    Example:
        ```python
        dispatcher = llm.plan.make_dispatcher()
        decision = dispatcher.decide(StepShape(num_tokens=2, num_reqs=2, decode_query_len=1))
        print(decision.mode, decision.key, decision.reason)
        ```
    """

    def __init__(
        self,
        resolution: Resolution,
        captures: CaptureList,
        *,
        max_num_tokens: int,
    ) -> None:
        self.resolution = resolution
        self.captures = captures
        self.max_num_tokens = max_num_tokens
        self._general = captures.mixed or captures.piecewise
        decode_tiers = [(captures.decode, _DECODES), (self._general, f"{_DECODES} that no decode graph holds")]
        self._decode = [self._choose(tokens, decode_tiers) for tokens in range(max_num_tokens + 1)]
        sharing_tiers = [(captures.sharing, f"{_DECODES} that share prefixes"), *decode_tiers]
        self._sharing = [self._choose(tokens, sharing_tiers) for tokens in range(max_num_tokens + 1)]
        mixed_tiers = [(self._general, _MIXED)]
        self._mixed = [self._choose(tokens, mixed_tiers) for tokens in range(max_num_tokens + 1)]
        self._drafted = lru_cache(maxsize=_KEPT)(self._draft)

    def decide(self, shape: StepShape) -> Decision:
        """Return the decision for a batch of at most max_num_tokens tokens.

        Args:
            shape: the batch without padding.
        """
        if shape.makes_drafts or shape.num_logits > shape.num_reqs:
            return self._drafted(shape)
        if shape.decode_query_len != 1:
            return self._mixed[shape.num_tokens]
        return (self._sharing if shape.shares else self._decode)[shape.num_tokens]

    def _draft(self, shape: StepShape) -> Decision:
        """Choose the smallest graph that holds the tokens, the sequences and the rows of logits of a batch."""
        longest, tokens = shape.decode_query_len, shape.num_tokens
        if longest is None:
            wide, kind = (), f"{_MIXED}, with drafts"
        else:
            wide, kind = self.captures.drafting, "decodes with drafts"
            if not self.captures.ragged and tokens != shape.num_reqs * longest:
                wide, kind = (), "decodes with different numbers of drafts"
        key = next((key for key in wide if _holds(key, shape)), None)
        if key is None:
            if wide:
                kind += " that no such graph holds"
            general = sorted(self._general + self.captures.wide, key=lambda key: (key.num_tokens, key.logits))
            key = next((key for key in general if _holds(key, shape)), None)
        if key is not None:
            return self._graph(tokens, key, kind)
        return self._eager(tokens, [*wide, *self._general])

    def _choose(self, tokens: int, tiers: list[tuple[tuple[GraphKey, ...], str]]) -> Decision:
        """Choose the smallest graph that holds `tokens`, from the first tier that has one, else an eager step."""
        for keys, kind in tiers:
            position = bisect_left(keys, tokens, key=lambda key: key.num_tokens)
            if position < len(keys):
                return self._graph(tokens, keys[position], kind)
        return self._eager(tokens, [key for keys, _ in tiers for key in keys])

    def _graph(self, tokens: int, key: GraphKey, kind: str) -> Decision:
        padding = key.num_tokens - tokens
        are = "is" if padding == 1 else "are"
        text = f"{kind}; " + (f"{padding} of {key.num_tokens} tokens {are} padding" if padding else "no padding")
        if key.graphs is not GraphSet.PIECEWISE:
            return Decision(mode=GraphMode.FULL, key=key, num_tokens=key.num_tokens, cause=kind, reason=text)
        text += "; attention runs between the pieces"
        return Decision(mode=GraphMode.PIECEWISE, key=key, num_tokens=key.num_tokens, cause=kind, reason=text)

    def _eager(self, tokens: int, keys: list[GraphKey]) -> Decision:
        mode = self.resolution.mode
        largest = max((key.num_tokens for key in keys), default=0)
        if mode is GraphMode.NONE:
            cause = reason = f"graphs are off: {self.resolution.reasons[-1].text}"
        elif tokens <= largest:
            cause = reason = "more sequences, drafts or rows of logits than a graph of that many tokens holds"
        elif keys:
            cause = "more tokens than the largest graph holds"
            reason = f"{tokens} tokens are more than the largest graph holds ({largest})"
        else:
            cause = reason = f"{mode.value} has no graph for a batch that is not of decodes alone"
        return Decision(mode=GraphMode.NONE, key=None, num_tokens=tokens, cause=cause, reason=reason)


def _holds(key: GraphKey, shape: StepShape) -> bool:
    """Return True if a graph holds a batch with drafts."""
    longest = 0 if key.graphs is not GraphSet.DECODE else shape.decode_query_len or 0
    rows = key.num_tokens >= shape.num_tokens and key.num_reqs >= shape.num_reqs and key.logits >= shape.num_logits
    return rows and key.query_len >= longest and key.makes_drafts == shape.makes_drafts
