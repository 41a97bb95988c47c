"""Mask of the logits of tokens that a grammar does not allow, in place.

Shapes: N rows of logits, V vocabulary, G masked rows, W words of a row's bitmask (32 tokens each).

Only banned tokens are written. A program tests the bits of 64 words:

    programs   | row 0: words 0-63 | row 0: words 64-127 | ... | row 1: words 0-63 | ...
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options

_WORDS = 64
"""Words of a program: 2048 tokens."""
_WARPS = 4


@triton.jit
def _mask_kernel(
    logits, stride, rows, bitmask, num_words, V: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    pdl_begin(PDL)
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry).to(tl.int64)
    if row < 0:
        return
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(bitmask + entry * num_words + words, mask=words < num_words, other=-1)
    tokens = words[:, None] * 32 + tl.arange(0, 32)[None, :]
    banned = ((bits[:, None] >> tl.arange(0, 32)[None, :]) & 1) == 0
    # Only banned tokens are written: nearly all between the strings of JSON, hardly any inside a string.
    nothing = tl.full((WORDS, 32), float("-inf"), logits.dtype.element_ty)
    tl.store(logits + row * stride + tokens, nothing, mask=banned & (tokens < V))


def mask_logits(logits_NV: torch.Tensor, rows_G: torch.Tensor, bitmask_GW: torch.Tensor) -> None:
    """Write -inf over the tokens whose bit is not set, in the listed rows.

    Args:
        logits_NV: bfloat16, float16 or float32; rows contiguous
        rows_G: int32; entries below 0 are skipped
        bitmask_GW: int32, contiguous; token t is bit t % 32 of word t // 32
    """
    vocab_size, (num_rows, num_words) = logits_NV.shape[1], bitmask_GW.shape
    assert logits_NV.stride(1) == 1 and bitmask_GW.is_contiguous() and num_words * 32 >= vocab_size
    assert rows_G.shape == (num_rows,)
    _mask_kernel[(num_rows, triton.cdiv(num_words, _WORDS))](
        logits_NV,
        logits_NV.stride(0),
        rows_G,
        bitmask_GW,
        num_words,
        V=vocab_size,
        WORDS=_WORDS,
        **pdl_options(),
        num_warps=_WARPS,
    )
