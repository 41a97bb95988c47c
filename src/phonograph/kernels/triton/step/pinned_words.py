"""Copies between pinned host memory and the device by a kernel, over the bus.

A step's upload and its tokens are a few hundred bytes. A copy engine is no faster for them, and the device idles while
the stream passes from the kernels to the engine and back. A program copies 1024 words:

    programs   | words 0-1023 | words 1024-2047 | ...
"""

# pyright: basic, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def copy_words(source: torch.Tensor, target: torch.Tensor, num_words: int, *, more: torch.Tensor | None = None) -> None:
    """Copy the first int32 words of `source` to `target` on the current stream; either may be pinned host memory.

    Args:
        source: int32 words.
        target: int32 words.
        num_words: words to copy.
        more: up to 1024 words, copied to the end of `target`.
    """
    num_more = 0 if more is None else more.shape[0]
    first_more = target.shape[0] - num_more
    grid = (triton.cdiv(num_words, _BLOCK),)
    _copy_kernel[grid](
        source, target, num_words, source if more is None else more, first_more, num_more, BLOCK=_BLOCK, num_warps=4
    )


# Unspecialised, so that one compiled kernel serves all copies, and none is left to be compiled in a step.
@triton.jit(do_not_specialize=["source", "target", "num_words", "more", "first_more", "num_more"])
def _copy_kernel(source, target, num_words, more, first_more, num_more, BLOCK: tl.constexpr):
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + word, tl.load(source + word, word < num_words), word < num_words)
    if tl.program_id(0) == 0:
        tl.store(target + first_more + word, tl.load(more + word, word < num_more), word < num_more)
