"""Sequences of a step by the reads and writes of their states: which tokens a mixer with a state computes together.

Shapes: T tokens, R sequences of the step, N runs that are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch


class StateRuns(NamedTuple):
    """Runs of as many tokens each. A run is the tokens of a sequence between two reads or writes of its state.

    Attributes:
        tokens_NT: int64, tokens of each run in the step.
        sources_N: int64, places of the states before; -1 for zeros.
        targets_2N: int64, places of the states after, the slots and the checkpoints; -1 for none.
    """

    tokens_NT: torch.Tensor
    sources_N: torch.Tensor
    targets_2N: torch.Tensor

    def read(self, pool: torch.Tensor) -> torch.Tensor:
        """Return the states before, from a pool of them by place."""
        unknown = (self.sources_N < 0).view(-1, *[1] * (pool.ndim - 1))
        return pool[self.sources_N.clamp_min(0)].masked_fill_(unknown, 0)

    def write(self, pool: torch.Tensor, states: torch.Tensor) -> None:
        """Write the states after to a pool."""
        for places_N in self.targets_2N:
            written = places_N >= 0
            pool[places_N[written]] = states[written]


def state_runs(
    query_start_loc: torch.Tensor, seq_lens_R: torch.Tensor, slots_R: torch.Tensor, checkpoints_3R: torch.Tensor
) -> Iterator[StateRuns]:
    """Yield the runs of a step, in an order in which each reads what those before it have written.

    A sequence whose step is its first one starts from zeros, whatever its slot has. A sequence in slot -1 starts from
    zeros too, and writes no state.

    Args:
        query_start_loc: int32 [R + 1].
        seq_lens_R: int32, tokens of each sequence, the step's included.
        slots_R: int32, slot of each sequence; -1 for none.
        checkpoints_3R: int32, by sequence: the place that its state is read from, in place of its slot; the place that
            it is copied to; and its tokens at the copy. -1 for none.
    """
    single: list[_StateRun] = []
    others: list[_StateRun] = []
    starts, lens, slots = query_start_loc.tolist(), seq_lens_R.tolist(), slots_R.tolist()
    rows = zip(pairwise(starts), lens, slots, *checkpoints_3R.tolist(), strict=True)
    for (start, stop), length, slot, restored, saved, saved_len in rows:
        count = stop - start
        if not count:
            continue
        source = -1 if slot < 0 or length == count else slot if restored < 0 else restored
        before = saved_len - (length - count)
        if saved < 0 or before == count:
            (single if count == 1 else others).append(_StateRun(start, count, source, (slot, saved)))
        else:
            others.append(_StateRun(start, before, source, (slot, saved)))
            others.append(_StateRun(start + before, count - before, slot, (slot, -1)))
    if single:
        yield _together(single)
    yield from (_together([run]) for run in others)


class _StateRun(NamedTuple):
    start: int
    num_tokens: int
    source: int
    targets: tuple[int, int]


def _together(runs: list[_StateRun]) -> StateRuns:
    starts = torch.tensor([run.start for run in runs])
    return StateRuns(
        starts.unsqueeze(1) + torch.arange(runs[0].num_tokens),
        torch.tensor([run.source for run in runs]),
        torch.tensor([run.targets for run in runs]).T,
    )
