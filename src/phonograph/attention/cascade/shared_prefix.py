"""Finds the prefix that all sequences of a batch have in the same blocks, for cascade attention.

Sequences get the same blocks only from the prefix cache, when they are admitted: what is appended later is fresh, and
nobody else's. So what two slots have in common stays as it is until one of them is loaded anew. Every slot is compared
with one of them, the anchor, when it is loaded; a step takes a minimum. All are compared again only when the anchor is
gone.
"""

from __future__ import annotations

import numpy as np

from phonograph.core.batch import BlockAppend, ScheduledBatch


class SharedPrefixes:
    """The host's copy of the block tables, [R, N] by slot, and the leading blocks that each shares with the anchor."""

    def __init__(self, *, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._with_anchor = np.zeros(max_num_seqs, np.int64)
        self._anchor: int | None = None
        self._slots: list[int] = []
        self._shared = 0
        """Blocks that `_slots`, those of the step before, have in common."""

    def update(self, appends: list[BlockAppend]) -> None:
        """Takes over the blocks that a step adds; before `find` is asked about that step."""
        loaded: list[int] = []
        for append in appends:
            end = append.start + len(append.block_ids)
            self._tables[append.slot, append.start : end] = append.block_ids
            self._num_blocks[append.slot] = end
            if append.start == 0:
                loaded.append(append.slot)
        if not loaded:
            return
        self._slots = []
        if self._anchor in loaded:
            self._anchor = None
        elif self._anchor is not None:
            rows = np.array(loaded)
            self._with_anchor[rows] = self._compare(rows, self._anchor)

    def find(self, batch: ScheduledBatch) -> int:
        """Tokens of the batch's common prefix, a multiple of the block size; 0 for a sequence alone.

        Only blocks count that are full and computed in every sequence before this step, so at least the step's own
        tokens come behind them.
        """
        slots = batch.slots
        if len(slots) == 1:
            return 0
        if slots != self._slots:
            if self._anchor not in slots:
                self._anchor = slots[0]
                self._with_anchor[:] = self._compare(np.arange(len(self._tables)), self._anchor)
            self._shared = int(self._with_anchor[slots].min())
            self._slots = slots.copy()
        if not self._shared:
            return 0
        return min(self._shared, min(batch.context_lens) // self._block_size) * self._block_size

    def _compare(self, rows: np.ndarray, anchor: int) -> np.ndarray:
        """Leading blocks that each row shares with the anchor. A block that they share may come behind one that they do
        not, where equal prefixes were computed side by side, so it is the first difference that counts."""
        num_blocks = int(self._num_blocks[anchor])
        same = self._tables[rows, :num_blocks] == self._tables[anchor, :num_blocks]
        shared = np.where(same.all(1), num_blocks, same.argmin(1))
        return np.minimum(shared, self._num_blocks[rows])
