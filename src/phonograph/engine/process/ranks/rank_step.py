"""Messages between rank 0, which is the engine, and the other ranks of tensor parallelism.

Rank 0 schedules, decides and samples. The others know no request: a step reaches them as arrays and the key of a graph.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from phonograph.core.batch import BlockAppend, ScheduledBatch, StateCopy
from phonograph.graphs.modes import GraphKey
from phonograph.runner.step_inputs import StepRows, rows_of


class RankStep(NamedTuple):
    """A step of all ranks. Arrays are int32.

    Attributes:
        slots, context_lens, query_lens: [N], of the rows, decodes first.
        num_decodes, num_decode_tokens: see `ScheduledBatch`.
        token_ids: [T], tokens of the step, which only rank 0 has; -1 for those that its device has.
        starts: [S, 3], of sequences that start: slot, length of the prompt and most tokens.
        appends: [A, 4], slot, first entry, KV group and number of blocks of each `BlockAppend`.
        block_ids: their blocks, one after another.
        copies: [C, 2], pages to copy before the step, from and to.
        states: [C, 4], checkpoints of states: 1 for those that the step writes and 0 for those that sequences start
            from, then the numbers of `StateCopy`.
        key: graph that runs the step; None for an eager step.
        all_hidden: an eager step computes all rows in the last layer.
        makes_drafts: an eager step ends with the passes of a draft model on rank 0.
    """

    slots: np.ndarray
    context_lens: np.ndarray
    query_lens: np.ndarray
    num_decodes: int
    num_decode_tokens: int
    token_ids: np.ndarray
    starts: np.ndarray
    appends: np.ndarray
    block_ids: np.ndarray
    copies: np.ndarray
    states: np.ndarray
    key: GraphKey | None
    all_hidden: bool
    makes_drafts: bool

    @classmethod
    def of(
        cls, rows: StepRows, token_ids_T: np.ndarray, key: GraphKey | None, *, all_hidden: bool, makes_drafts: bool
    ) -> RankStep:
        """Return a step of rank 0 for the others."""
        batch = rows.batch
        appends = [(one.slot, one.start, one.group, len(one.block_ids)) for one in batch.appends]
        states = [(saves, *one) for saves, copies in enumerate((batch.restored, batch.saved)) for one in copies]
        starts = [(new.slot, new.prompt_len, new.max_len) for new in batch.new]
        return cls(
            slots=rows.slots.astype(np.int32),
            context_lens=rows.context_lens.astype(np.int32),
            query_lens=rows.query_lens.astype(np.int32),
            num_decodes=batch.num_decodes,
            num_decode_tokens=batch.num_decode_tokens,
            token_ids=token_ids_T,
            starts=np.array(starts, np.int32).reshape(-1, 3),
            appends=np.array(appends, np.int32).reshape(-1, 4),
            block_ids=np.array([block for one in batch.appends for block in one.block_ids], np.int32),
            copies=np.array(batch.copies, np.int32).reshape(-1, 2),
            states=np.array(states, np.int32).reshape(-1, 4),
            key=key,
            all_hidden=all_hidden,
            makes_drafts=makes_drafts,
        )

    def rows(self) -> StepRows:
        """Return the step as rows. No row samples on a rank that gets the step."""
        ends = np.cumsum(self.appends[:, 3])
        appends = [
            BlockAppend(slot=slot, start=start, group=group, block_ids=self.block_ids[end - count : end].tolist())
            for (slot, start, group, count), end in zip(self.appends.tolist(), ends.tolist(), strict=True)
        ]
        restored, saved = (
            [StateCopy(*copy) for kind, *copy in self.states.tolist() if kind == saves] for saves in (0, 1)
        )
        batch = ScheduledBatch(
            slots=self.slots.tolist(),
            query_lens=self.query_lens.tolist(),
            context_lens=self.context_lens.tolist(),
            samples=[False] * len(self.slots),
            num_decodes=self.num_decodes,
            num_decode_tokens=self.num_decode_tokens,
            num_tokens=len(self.token_ids),
            appends=appends,
            copies=[(source, target) for source, target in self.copies.tolist()],
            restored=restored,
            saved=saved,
        )
        return rows_of(batch, np.zeros(int(self.slots.max()) + 1, np.int64))


class Score(NamedTuple):
    """Logits for the log-probabilities of a prompt: `num_rows` rows of the latest step from `first` on."""

    first: int
    num_rows: int


class Capture(NamedTuple):
    """Capture of all graphs, when all ranks have loaded the weights."""


class TimeDrafting(NamedTuple):
    """Replays of graphs that rank 0 times; see `Runner.time_drafting`."""


class Verify(NamedTuple):
    """Comparison of each graph with eager runs; the answer is the list of mismatches."""

    num_replays: int
    seed: int


class RankSleep(NamedTuple):
    """Sleep of all ranks at a level; the answer is None, or the error of a rank that is as it was before."""

    level: int


class RankWakeUp(NamedTuple):
    """End of the sleep of parts of the memory on all ranks; answered as `RankSleep`."""

    tags: tuple[str, ...]


Command = RankStep | Score | Capture | TimeDrafting | Verify | RankSleep | RankWakeUp
