"""Counts of the pairs of each expert, added to the counts of earlier steps.

Each pair adds 1 to the counter of its expert. Sums of integers are exact in any order.

    pairs      | 2 | 0 | 2 | 3 | -1 | -1 |      -1 is padding
    counters   | +1, 0, +2, +1 |

Shapes: T tokens, k experts of a token, X experts.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options

_BLOCK = 256


def count_pairs(experts_Tk: torch.Tensor, load_X: torch.Tensor, *, shared: bool = False) -> None:
    """Add the pairs of a step to the counters.

    Args:
        experts_Tk: int32, experts of each token; -1 for padding.
        load_X: int64, counters.
        shared: there are pairs of a shared expert X, which are not counted.
    """
    assert experts_Tk.is_contiguous() and load_X.dtype == torch.int64
    pairs = experts_Tk.numel()
    _count_kernel[(triton.cdiv(pairs, _BLOCK),)](
        experts_Tk, load_X, pairs, END=len(load_X) if shared else None, BLOCK=_BLOCK, **pdl_options(), num_warps=4
    )


@triton.jit(do_not_specialize=["P"])
def _count_kernel(experts_ptr, load_ptr, P, END: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_begin(PDL)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + pair, pair < P, other=-1)
    one = tl.full((BLOCK,), 1, tl.int64)
    counters = load_ptr + expert
    counted = expert >= 0
    if END is not None:
        counted = counted & (expert < END)
    tl.atomic_add(counters, one, counted, sem="relaxed")
