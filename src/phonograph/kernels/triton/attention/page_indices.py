"""Page numbers of a batch laid end to end, made from its block table, for libraries with paged KV caches.

Shapes: R sequences, N blocks of the longest sequence.

A kernel makes them at the head of a step, because the step's block table is known in time only on the device. Each
program sums the pages of the sequences before its own, which is faster than a scan in a separate launch.

    programs   | (seq 0, part 0) (seq 0, part 1) | (seq 1, part 0) ...    a part takes every PARTS-th 1024 pages
    out        | pages of sequence 0             | pages of sequence 1 | ...
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_MAX_PARTS = 8
"""Upper bound of the programs of a sequence."""


def page_indices(block_table_RN: torch.Tensor, seq_lens_R: torch.Tensor, out: torch.Tensor, *, page_size: int) -> None:
    """Write ceil(seq_len / page_size) entries of each row of the block table to `out`, row after row.

    Sequences without keys have no pages. All int32; entries after the last page stay as they are.
    """
    num_reqs, max_pages = block_table_RN.shape
    if num_reqs == 0:
        return
    assert block_table_RN.stride(1) == 1
    parts = min(_MAX_PARTS, triton.cdiv(max_pages, _BLOCK))
    _indices_kernel[(num_reqs, parts)](
        block_table_RN,
        seq_lens_R,
        out,
        block_table_RN.stride(0),
        page_size=page_size,
        PARTS=parts,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _indices_kernel(
    block_table,
    seq_lens,
    out,
    stride,
    page_size: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    start = tl.zeros((), tl.int32)
    for first in range(0, row, BLOCK):
        lens = tl.load(seq_lens + first + lane, mask=first + lane < row, other=0)
        start += tl.sum((lens + page_size - 1) // page_size)
    pages = (tl.load(seq_lens + row) + page_size - 1) // page_size
    for first in range(tl.program_id(1) * BLOCK, pages, PARTS * BLOCK):
        valid = first + lane < pages
        page = tl.load(block_table + row.to(tl.int64) * stride + first + lane, mask=valid)
        tl.store(out + start + first + lane, page, mask=valid)
