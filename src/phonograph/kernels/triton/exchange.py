"""Sums and maxima over warps in one exchange.

Where the values of a reduction lie in different warps, Triton's own passes them through shared memory a few at a time,
each read waiting for the write before it, and leaves a copy of the result in each warp: 9,000 cycles for 512 sums of
eight. A split wants its pair in one thread. So here all values of a sum come to one thread in a single exchange, some
400 cycles for those, and the sums are dealt out over all threads.
"""

# pyright: basic, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_of(x):
    """[n, w] added over w, a power of two."""
    if x.shape[1] > 1:
        left, right = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        total = sum_of(left + right)
    else:
        total = tl.reshape(x, (x.shape[0],))
    return total


@triton.jit
def greatest_of(x):
    """The greatest of w, a power of two, of [n, w]."""
    if x.shape[1] > 1:
        left, right = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        greatest = greatest_of(tl.maximum(left, right))
    else:
        greatest = tl.reshape(x, (x.shape[0],))
    return greatest
