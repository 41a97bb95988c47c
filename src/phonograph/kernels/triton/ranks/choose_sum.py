"""Choice of the kernel that sums rows over ranks, by their number and size.

On CPUs gloo sums. On GPUs a one-shot sum over peer memory sends all rows of a rank to each
other rank, and takes one trip. NCCL sends less from three ranks on, and takes many trips. With two ranks both send the
same, and one-shot sums of as many rows at a time as the buffer takes are always faster.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

_MIB = 1 << 20
_MAX_BYTES = {2: 16 * _MIB, 3: 1 * _MIB, 4: 1 * _MIB}
"""Bytes of a rank's rows up to which a one-shot sum is chosen, by the number of ranks. For two it is what a sum takes
at a time, measured on two H200; the others are not measured yet."""
_MAX_BYTES_OF_MORE = _MIB // 2
MAX_WIDTH = 16384
"""Widest row: a program has a whole one in its registers."""


class SumChoice(NamedTuple):
    """Sums of some numbers of rows.

    Attributes:
        kernel: "one-shot" is the kernel over peer memory.
        min_rows: fewest rows.
        max_rows: most rows; None for no limit.
        reason: reason for the kernel.
    """

    kernel: Literal["gloo", "nccl", "one-shot"]
    min_rows: int
    max_rows: int | None
    reason: str

    @property
    def rows(self) -> str:
        """Range of the rows, such as "1 to 512" or "513 and more"."""
        return f"{self.min_rows} and more" if self.max_rows is None else f"{self.min_rows} to {self.max_rows}"


def choose_sums(
    width: int, itemsize: int, num_ranks: int, *, most_rows: int, on_cpu: bool, batch_invariant: bool
) -> tuple[SumChoice, ...]:
    """Return the sums by rows, fewest rows first, for GPUs that reach each other's memory or for a CPU.

    Args:
        width: numbers of a row.
        itemsize: bytes of a number.
        num_ranks: number of ranks.
        most_rows: rows of the largest step.
        on_cpu: the ranks run on a CPU.
        batch_invariant: one kernel sums all rows, if it can.
    """
    if on_cpu:
        return (SumChoice("gloo", 1, None, "the ranks run on a CPU"),)
    if width > MAX_WIDTH:
        return (SumChoice("nccl", 1, None, f"rows of {width} numbers are wider than {MAX_WIDTH}"),)
    most = _MAX_BYTES.get(num_ranks, _MAX_BYTES_OF_MORE)
    rows = min(most // (width * itemsize), most_rows)
    reason = "one trip over peer memory is the fastest"
    if num_ranks > 2:
        reason += f" up to {most >> 10} KiB"
    if batch_invariant:
        reason = "batch_invariant asks for one kernel"
    if batch_invariant or num_ranks == 2:
        rest = SumChoice("one-shot", rows + 1, None, f"{reason}, which sums {rows} rows at a time")
    else:
        rest = SumChoice("nccl", rows + 1, None, "NCCL sends less, in several trips")
    return SumChoice("one-shot", 1, rows, reason), *([rest] if rows < most_rows else [])
