"""Choice of the kernel that sums rows over ranks, by their number and size.

A one-shot sum over peer memory sends all rows of a rank to each other rank, and takes one trip. NCCL sends less from
three ranks on, and takes many trips. With two ranks both send the same.
"""

from __future__ import annotations

from typing import NamedTuple

_MIB = 1 << 20
_MAX_BYTES = {2: 4 * _MIB, 3: 1 * _MIB, 4: 1 * _MIB}
"""Bytes of a rank's rows up to which a one-shot sum is chosen, by the number of ranks."""
_MAX_BYTES_OF_MORE = _MIB // 2
MAX_WIDTH = 16384
"""Widest row: a program has a whole one in its registers."""


class SumKernel(NamedTuple):
    """Rows that one-shot sums take, from 1 on, with the reason. NCCL sums the others; 0 for none."""

    max_rows: int
    reason: str


def choose_sum(width: int, itemsize: int, num_ranks: int) -> SumKernel:
    """Return the number of rows up to which the one-shot kernel sums, for GPUs that reach each other's memory.

    Args:
        width: numbers of a row.
        itemsize: bytes of a number.
        num_ranks: number of ranks.
    """
    if width > MAX_WIDTH:
        return SumKernel(0, f"rows of {width} numbers are wider than {MAX_WIDTH}")
    most = _MAX_BYTES.get(num_ranks, _MAX_BYTES_OF_MORE)
    rows = most // (width * itemsize)
    return SumKernel(rows, f"up to {rows} rows over peer memory in one trip, of {most >> 10} KiB at most, else by NCCL")
