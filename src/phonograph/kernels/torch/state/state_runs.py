"""Runs of tokens between two reads or writes of a sequence's state, in the operators of mixers that have one.

Shapes: R sequences of the step, N of them that are computed together, T tokens of each, S places of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch


def state_runs(
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    slots_R: torch.Tensor,
    checkpoints_3R: torch.Tensor,
    pools: Sequence[torch.Tensor],
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Yield indices of tokens, int64 [N, T], and copies of their sequences' states, [N, ...] of each pool.

    The caller overwrites the copies with the states after these tokens, which are then written to the pools. A sequence
    whose step is its first one starts from zeros, whatever its slot has. A sequence in slot -1 starts from zeros too,
    and writes no state.

    Args:
        query_start_loc: int32 [R + 1].
        seq_lens_R: int32, tokens of each sequence, the step's included.
        slots_R: int32, slot of each sequence; -1 for none.
        checkpoints_3R: int32, by sequence: the place that its state is read from, in place of its slot; the place that
            it is copied to; and its tokens at the copy. -1 for none.
        pools: [S, ...], states by slot, then by checkpoint.
    """
    for runs in _runs(query_start_loc.tolist(), seq_lens_R.tolist(), slots_R.tolist(), checkpoints_3R.tolist()):
        sources = torch.tensor([run.source for run in runs])
        states = [pool[sources.clamp_min(0)] for pool in pools]
        for state in states:
            state[sources < 0] = 0
        yield torch.tensor([run.start for run in runs]).unsqueeze(1) + torch.arange(runs[0].num_tokens), states
        for target in (0, 1):
            places = torch.tensor([run.targets[target] for run in runs])
            written = places >= 0
            for pool, state in zip(pools, states, strict=True):
                pool[places[written]] = state[written]


class _StateRun(NamedTuple):
    """Tokens of a sequence between two reads or writes of its state.

    Attributes:
        start: first token in the step.
        num_tokens: its tokens.
        source: place of the state before; -1 for zeros.
        targets: places of the state after, the slot and a checkpoint; -1 for none.
    """

    start: int
    num_tokens: int
    source: int
    targets: tuple[int, int]


def _runs(
    starts: list[int], lens: list[int], slots: list[int], checkpoints: list[list[int]]
) -> Iterator[list[_StateRun]]:
    """Yield runs that are computed together: all of one token, then each of the others in their order."""
    single: list[_StateRun] = []
    others: list[_StateRun] = []
    rows = zip(pairwise(starts), lens, slots, *checkpoints, strict=True)
    for (start, stop), length, slot, restored, saved, saved_len in rows:
        count = stop - start
        if not count:
            continue
        source = -1 if slot < 0 or length == count else slot if restored < 0 else restored
        before = saved_len - (length - count)
        if saved < 0 or before == count:
            run = _StateRun(start, count, source, (slot, saved))
            (single if count == 1 else others).append(run)
        else:
            others.append(_StateRun(start, before, source, (slot, saved)))
            others.append(_StateRun(start + before, count - before, slot, (slot, -1)))
    if single:
        yield single
    yield from ([run] for run in others)
