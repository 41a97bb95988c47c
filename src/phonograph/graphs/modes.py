"""Vocabulary of the graph system: modes, levels of support, and the key of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from phonograph.errors import counted


class GraphMode(Enum):
    """Modes of running batches, by the field's names.

    NONE                every step is eager
    PIECEWISE           graphs between the attention calls, attention is eager
    FULL                one whole graph for every batch, from a decode set and a mixed set
    FULL_DECODE_ONLY    whole graphs for uniform decode batches, the rest is eager
    FULL_AND_PIECEWISE  whole graphs for uniform decode batches, pieces for the rest

    Example:
        ```python
        mode = GraphMode["FULL_AND_PIECEWISE"]
        assert mode.decode_full and mode.piecewise and not mode.mixed_full
        ```
    """

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @property
    def decode_full(self) -> bool:
        """Uniform decode batches replay whole graphs."""
        return self in (GraphMode.FULL, GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE)

    @property
    def mixed_full(self) -> bool:
        """Mixed batches replay whole graphs."""
        return self is GraphMode.FULL

    @property
    def piecewise(self) -> bool:
        """Some batches replay pieces."""
        return self in (GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE)


class GraphSupport(IntEnum):
    """Batches that a backend can serve inside a captured graph. Each level includes those below it.

    Example:
        ```python
        assert GraphSupport.ALWAYS > GraphSupport.UNIFORM_BATCH
        ```
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Only batches of queries of one token."""
    UNIFORM_BATCH = 2
    """Batches whose queries all have the same length (decode with speculation)."""
    ALWAYS = 3
    """Any batch, mixed ones included."""


@dataclass(frozen=True, slots=True)
class Support:
    """Level of support with its reason, for one resolved configuration.

    Attributes:
        level: batches that may run in a graph.
        reason: a sentence for the user.
    """

    level: GraphSupport
    reason: str


class GraphSet(Enum):
    """Set of graphs that a key belongs to."""

    DECODE = "decode"
    MIXED = "mixed"
    PIECEWISE = "piecewise"
    ENCODER = "encoder"
    """Encoders of audio: the tokens of a key are positions, and its slots audios."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Name of one captured graph.

    Attributes:
        graphs: the set.
        num_tokens: padded tokens T.
        num_reqs: request slots R. A mixed or piecewise graph has all of them, a decode graph of single tokens has T.
        query_len: tokens of the longest query in a decode graph: 1, or 1 + k with k drafts; 0 in the other sets.
        num_logits: rows that have logits; 0 for the last token of each request.
        makes_drafts: True if the graph ends with the passes of a draft model.
        shares: True if the graph attends prefixes that many sequences share in the way that is fastest for much of
            them; other graphs attend them too.

    Example:
        ```python
        key = GraphKey(GraphSet.DECODE, num_tokens=8, num_reqs=8, query_len=1)
        assert str(key) == "decode[8 tokens, 8 slots]"
        ```
    """

    graphs: GraphSet
    num_tokens: int
    num_reqs: int
    query_len: int = 0
    num_logits: int = 0
    makes_drafts: bool = False
    shares: bool = False

    @property
    def logits(self) -> int:
        """Rows of logits."""
        return self.num_logits or min(self.num_tokens, self.num_reqs)

    @property
    def kind(self) -> str:
        """Name of the set."""
        return self.graphs.value

    def __str__(self) -> str:
        logits = f", {self.num_logits} logits" if self.num_logits and self.graphs is not GraphSet.DECODE else ""
        more = ", makes drafts" * self.makes_drafts + ", shared prefixes" * self.shares
        return f"{self.kind}[{counted(self.num_tokens, 'token')}, {counted(self.num_reqs, 'slot')}{logits}{more}]"
