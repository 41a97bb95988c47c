"""Copies between pinned host memory and the device by a kernel, over the bus.

A step's upload and its tokens are a few hundred bytes. A copy engine is no faster for them, and the device idles while
the stream passes from the kernels to the engine and back. A program copies 1024 words:

    programs   | words 0-1023 | words 1024-2047 | ...

In the middle of a step one program sends results to a row that the step's upload names, and marks it with a tag:

    row        | words | more words | tag |      the tag is written last
"""

# pyright: basic, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options
from phonograph.kernels.triton.step.step_layout import EARLY_ROW

_BLOCK = 1024
_EARLY_ROW = tl.constexpr(EARLY_ROW)


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


def send_words(
    staging: torch.Tensor, source: torch.Tensor, target_DW: torch.Tensor, *, more: torch.Tensor | None = None
) -> None:
    """Copy int32 words to a row of pinned memory that the host reads while the step goes on.

    The last word of the row becomes the tag when all others have arrived. A step without a tag sends nothing.

    Args:
        staging: upload of the step; its header has the row and the tag.
        source: int32 words [N].
        target_DW: int32 [D, W], with W = N + M + 1.
        more: int32 words [M] that follow `source`, at most 1024.
    """
    num_words, num_more = source.shape[0], 0 if more is None else more.shape[0]
    assert target_DW.shape[1] == num_words + num_more + 1
    _send_kernel[(1,)](
        staging,
        source,
        num_words,
        source if more is None else more,
        num_more,
        target_DW,
        BLOCK=_BLOCK,
        FENCE=not knobs.runtime.interpret,
        **pdl_options(),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["staging", "source", "num_words", "more", "num_more", "target"])
def _send_kernel(
    staging, source, num_words, more, num_more, target, BLOCK: tl.constexpr, FENCE: tl.constexpr, PDL: tl.constexpr
):
    pdl_begin(PDL)
    tag = tl.load(staging + _EARLY_ROW + 1)
    if tag == 0:
        return
    row = target + tl.load(staging + _EARLY_ROW) * (num_words + num_more + 1)
    for start in range(0, num_words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        tl.store(row + word, tl.load(source + word, word < num_words), word < num_words)
    word = tl.arange(0, BLOCK)
    tl.store(row + num_words + word, tl.load(more + word, word < num_more), word < num_more)
    # After the barrier the fence of one thread covers the writes of all.
    tl.debug_barrier()
    if FENCE:
        tl.inline_asm_elementwise("fence.acq_rel.sys; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(row + num_words + num_more, tag)
