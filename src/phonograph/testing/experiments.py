"""Experiments that tell faults apart. Each replays a batch that differs from the captured one in one respect.

A wrong replay therefore names the value that the graph froze. Captured lengths are short wherever the contract allows
it, because a builder may only rely on the graph's shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.testing.conformance_batch import BatchShape

Lengths = Sequence[int]
FROZEN, TAIL = "frozen contents", "unzeroed metadata tail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Experiment for one fault.

    name: the fault that a wrong replay of `after` suggests
    cause: a sentence about it

    captured: batch of the capture
    before: batches that are replayed first, without a check
    after: batch that is replayed and checked
    skipped: reason why this graph cannot have the fault, or ""
    """

    name: str
    cause: str
    captured: BatchShape
    after: BatchShape
    before: tuple[BatchShape, ...] = field(default=())
    skipped: str = ""


def limits_for(device_type: str) -> Limits:
    """Return limits of odd numbers: a query longer than any tile, and on a GPU contexts long enough to be split."""
    return Limits(max_num_seqs=7, max_num_batched_tokens=160, max_model_len=256 if device_type == "cpu" else 2048)


def experiments(key: GraphKey, limits: Limits) -> list[Experiment]:
    """Return the directed experiments for a graph, those with the most reliable names first."""
    uniform = key.graphs is GraphSet.DECODE
    longest = limits.max_model_len
    # All tokens of the graph in all of its slots, so that there is no padding unless an experiment is about it.
    even = _even(key.num_tokens, key.num_reqs)
    medium = max(even) + 60
    full = batch("full", even, [medium - 3 * index for index in range(len(even))])
    short = batch("short contexts", even, even)
    long = batch("long contexts", even, [longest - 37 * index for index in range(len(even))])
    one = batch("one sequence", [key.num_tokens], [200])
    few = batch("few", [even[0], even[-1]], [medium - 11, medium])
    return [
        Experiment(
            name=FROZEN,
            cause="it has the lengths of the captured one, so the graph froze contents: a block table, slots, lengths",
            captured=full,
            after=full,
        ),
        Experiment(
            name="stale max query length",
            cause="only its queries are longer, so the graph froze a bound made of the captured max_query_len; for a "
            "mixed graph the bound is the number of tokens",
            captured=batch("short queries", even, [200] * len(even)),
            after=full if uniform else _one_long_query(key),
            skipped="all queries of a decode graph have its query length" if uniform else "",
        ),
        Experiment(
            name="stale split count",
            cause="only its contexts are longer, so the graph froze a number of splits, a grid or a loop bound made of "
            "the captured max_seq_len; the bound is max_model_len, or the schedule is to be made in schedule()",
            captured=short,
            after=long,
        ),
        Experiment(
            name="stale decode count",
            cause="only the share of decodes differs, so the graph froze num_decodes or num_decode_tokens",
            # Prefills that run as decodes are wrong; decodes that run as prefills are only slow.
            captured=full if uniform else _with_decodes(key, 3),
            after=full if uniform else _with_decodes(key, 0),
            skipped="a decode graph has nothing but decodes" if uniform else "",
        ),
        Experiment(
            name="stale sequence count",
            cause="it has more sequences than the captured batch, so the graph froze num_reqs; empty slots are to be "
            "served as slots of length 0",
            captured=few if uniform else one,
            after=full,
        ),
        Experiment(
            name=TAIL,
            cause="it has fewer sequences than the ones before, so entries of theirs stayed after the present ones "
            "and were used; a builder clears the tail of what it refills",
            captured=full,
            # In `one` all rows of a mixed graph belong to the first slot, which `few` fills too.
            before=(full,) if uniform else (full, one),
            after=few,
        ),
    ]


def random_batches(key: GraphKey, limits: Limits, count: int, seed: int) -> list[BatchShape]:
    """Draw ragged batches with padding that fit `key`, decodes first."""
    rng = np.random.default_rng(seed)
    drawn: list[BatchShape] = []
    for index in range(count):
        if key.graphs is GraphSet.DECODE:
            queries = [key.query_len] * int(rng.integers(1, key.num_reqs + 1))
        else:
            tokens = int(rng.integers(key.num_reqs, key.num_tokens + 1))
            cuts = np.sort(rng.choice(np.arange(1, tokens), int(rng.integers(0, key.num_reqs)), replace=False))
            queries = sorted(int(length) for length in np.diff([0, *cuts, tokens]))
        lens = [int(rng.integers(length, limits.max_model_len + 1)) for length in queries]
        drawn.append(batch(f"random {index}", queries, lens))
    return drawn


def batch(name: str, query_lens: Lengths, seq_lens: Lengths) -> BatchShape:
    return BatchShape(name=name, query_lens=tuple(query_lens), seq_lens=tuple(seq_lens))


def describe(shape: BatchShape) -> str:
    """Describe a batch with its lengths."""
    return f"{shape.name} (queries {_spelled(shape.query_lens)}, sequences {_spelled(shape.seq_lens)})"


def _one_long_query(key: GraphKey) -> BatchShape:
    others = [2] * (key.num_reqs - 1)
    return batch("one long query", [*others, key.num_tokens - sum(others)], [200] * key.num_reqs)


def _with_decodes(key: GraphKey, count: int) -> BatchShape:
    """Return query lengths: a third of the tokens in one, the rest spread over the others, `count` of them single."""
    longest = key.num_tokens // 3
    spread = _even(key.num_tokens - longest - count, key.num_reqs - 1 - count)
    return batch(f"{count} decodes", [*[1] * count, *spread, longest], [200] * key.num_reqs)


def _even(total: int, parts: int) -> list[int]:
    """Divide `total` into equal parts, the last with the rest."""
    return [total // parts] * (parts - 1) + [total - total // parts * (parts - 1)]


def _spelled(lengths: Lengths) -> str:
    """Return lengths with repeats counted: "6 x 22, 28"."""
    parts: list[str] = []
    for length in dict.fromkeys(lengths):
        count = sum(one == length for one in lengths)
        parts.append(str(length) if count == 1 else f"{count} x {length}")
    return ", ".join(parts)
