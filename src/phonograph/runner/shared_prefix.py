"""Finds the prefix that all sequences of a batch have in the same blocks, for cascade attention.

Sequences get the same blocks only from the prefix cache, when they are admitted: what is appended later is fresh, and
nobody else's. So what some slots have in common stays as it is until one of them is loaded anew, and a step with the
slots of the step before costs no comparison.
"""

from __future__ import annotations

import numpy as np

from phonograph.batch import BlockAppend, ScheduledBatch

_COLUMNS = 64
"""Entries of the block tables that are compared at a time: a batch that has little in common ends soon."""


class SharedPrefixes:
    """The host's copy of the block tables, [R, N] by slot, and the latest answer."""

    def __init__(self, *, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._slots: list[int] = []
        self._num_shared = 0

    def update(self, appends: list[BlockAppend]) -> None:
        """Takes over the blocks that a step adds; before `find` is asked about that step."""
        for append in appends:
            end = append.start + len(append.block_ids)
            self._tables[append.slot, append.start : end] = append.block_ids
            self._num_blocks[append.slot] = end
            if append.start == 0:
                self._slots = []

    def find(self, batch: ScheduledBatch) -> int:
        """Tokens of the batch's common prefix, a multiple of the block size; 0 for a sequence alone.

        Only blocks count that are full and computed in every sequence before this step, so at least the step's own
        tokens come behind them.
        """
        if len(batch.slots) == 1:
            return 0
        if batch.slots != self._slots:
            self._num_shared = self._compare(batch.slots)
            self._slots = batch.slots.copy()
        if not self._num_shared:
            return 0
        return min(self._num_shared, min(batch.context_lens) // self._block_size) * self._block_size

    def _compare(self, slots: list[int]) -> int:
        """Leading blocks that the slots have in common. A block that they share may come behind one that they do not,
        where equal prefixes were computed side by side, so all are compared."""
        first, rows = self._tables[slots[0]], np.array(slots)
        if (self._tables[rows, 0] != first[0]).any():
            return 0
        num_blocks = int(self._num_blocks[rows].min())
        for start in range(0, num_blocks, _COLUMNS):
            stop = min(start + _COLUMNS, num_blocks)
            differ = (self._tables[rows, start:stop] != first[start:stop]).any(0)
            if differ.any():
                return start + int(differ.argmax())
        return num_blocks
