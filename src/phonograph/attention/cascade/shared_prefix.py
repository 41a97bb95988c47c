"""Search for the prefix that all sequences of a batch have in the same blocks, for cascade attention.

Sequences share blocks only through the prefix cache, when they are admitted; later blocks belong to one sequence. So
the shared prefix of two slots stays the same until one of them is loaded again. Each slot is compared with one slot,
the anchor, when it is loaded, and a step takes a minimum. All slots are compared again only when the anchor is gone.
"""

from __future__ import annotations

import numpy as np

from phonograph.core.batch import BlockAppend, ScheduledBatch


class SharedPrefixes:
    """Host copy of the block tables, [R, N] by slot, with the leading blocks that each slot shares with the anchor."""

    def __init__(self, *, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._with_anchor = np.zeros(max_num_seqs, np.int64)
        self._anchor: int | None = None
        self._slots: list[int] = []
        self._shared = 0
        """Blocks that the slots of the previous step, `_slots`, have in common."""

    def update(self, appends: list[BlockAppend]) -> None:
        """Record the blocks that a step adds. Call it before `find` for that step."""
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
        """Return the tokens of the batch's common prefix, a multiple of the block size; 0 for a single sequence.

        Only full blocks count that every sequence had computed before this step, so each query is behind them.
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
        """Count the leading blocks that each row shares with the anchor, up to the first difference.

        Shared blocks behind a difference exist: equal prefixes may be computed side by side.
        """
        num_blocks = int(self._num_blocks[anchor])
        same = self._tables[rows, :num_blocks] == self._tables[anchor, :num_blocks]
        shared = np.where(same.all(1), num_blocks, same.argmin(1))
        return np.minimum(shared, self._num_blocks[rows])
