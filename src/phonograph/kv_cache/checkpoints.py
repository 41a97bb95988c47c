"""Checkpoints of states: what the prefix cache keeps for layers that have no keys.

A checkpoint is the state of a sequence after some tokens, under the digest of everything before its end, which is that
of the last block. A prefix can be used if its blocks are cached and there is a checkpoint at its end.

One kernel of a step reads and writes checkpoints, and rows run at the same time. Therefore a checkpoint that is written
can be found from the next step on only, and one that is read is not evicted within the step. Steps run in order.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class CheckpointCounts(NamedTuple):
    """Counters since the start.

    Attributes:
        hits: checkpoints from which a request started.
        evictions: checkpoints whose place another one took.
    """

    hits: int = 0
    evictions: int = 0


class CheckpointPool:
    """Rows 0 .. num_checkpoints - 1, each empty or with the state of a digest. The oldest are evicted first."""

    def __init__(self, num_checkpoints: int) -> None:
        self.num_checkpoints = num_checkpoints
        self._empty = list(range(num_checkpoints - 1, -1, -1))
        self._rows: OrderedDict[bytes, int] = OrderedDict()
        self._written: dict[bytes, int] = {}
        self._read: set[bytes] = set()
        self._num_hits = self._num_evictions = 0

    @property
    def counts(self) -> CheckpointCounts:
        return CheckpointCounts(self._num_hits, self._num_evictions)

    @property
    def num_used(self) -> int:
        """Number of checkpoints that can be found, or will be after the step."""
        return len(self._rows) + len(self._written)

    def has(self, digest: bytes) -> bool:
        """Return True if there is a checkpoint that can be read."""
        return digest in self._rows

    def read(self, digest: bytes) -> int:
        """Return the row of a checkpoint that `has` found. It stays until the end of the step."""
        self._rows.move_to_end(digest)
        self._read.add(digest)
        self._num_hits += 1
        return self._rows[digest]

    def write(self, digest: bytes) -> int | None:
        """Return a row for a new checkpoint; None if there is one already, or none can be evicted in this step."""
        if digest in self._rows:
            self._rows.move_to_end(digest)
            return None
        if digest in self._written:
            return None
        if self._empty:
            row = self._empty.pop()
        else:
            oldest = next((one for one in self._rows if one not in self._read), None)
            if oldest is None:
                return None
            row = self._rows.pop(oldest)
            self._num_evictions += 1
        self._written[digest] = row
        return row

    def end_step(self) -> None:
        """Make the checkpoints that were written findable. The step that writes them is scheduled."""
        self._rows.update(self._written)
        self._written.clear()
        self._read.clear()

    def remove(self, digest: bytes) -> None:
        """Remove the checkpoint of a digest, if there is one."""
        row = self._rows.pop(digest, None)
        if row is not None:
            self._empty.append(row)

    def forget(self) -> None:
        """Remove all checkpoints. Those that a step in flight writes can be overwritten: steps run in order."""
        self._empty += [*self._rows.values(), *self._written.values()]
        self._rows.clear()
        self._written.clear()
        self._read.clear()
