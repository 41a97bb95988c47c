"""Weights of 4 or 8 bits in groups, written out in the type of the products.

Shapes: I inputs, O outputs, G groups of inputs, W words of 32 bits of an output's weights. The layout is that of
`kernels.torch.grouped`.

Algorithm: a program takes BLOCK_O outputs and BLOCK_W words, shifts the values out of each word, subtracts the zero,
multiplies by the group's scale, adds the offset, and stores the columns in the order of the inputs.

            W ->  program 0,0     program 0,1
    16 O    |    [ 512 columns ][ 512 columns ]  ->  out [O, I]
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.torch.grouped import Grouped

_OUTPUTS = 16
_COLUMNS = 512


def dequantize_into(weight: Grouped, out_OI: torch.Tensor) -> None:
    """Write the weights, their columns in the order of the inputs.

    Args:
        weight: the weights.
        out_OI: the result, contiguous; scales are in its type or in float32.
    """
    outputs, inputs = out_OI.shape
    num_words = weight.packed_OW.shape[1]
    assert weight.scales_OG.dtype in (out_OI.dtype, torch.float32)
    block_words = _COLUMNS * weight.bits // (8 if weight.is_fp8() else 32)
    assert out_OI.is_contiguous() and weight.has_equal_strides()
    # Without programmatic dependent launch: the product before may still read the memory that is written here.
    _dequantize_kernel[(triton.cdiv(outputs, _OUTPUTS), triton.cdiv(num_words, block_words))](
        weight.packed_OW,
        weight.scales_OG,
        weight.zeros_OG,
        weight.order_I,
        weight.offsets_OG,
        out_OI,
        outputs,
        *weight.scales_OG.stride(),
        INPUTS=inputs,
        WORDS=num_words,
        GROUPS=weight.scales_OG.shape[1],
        GROUP=weight.group,
        BITS=weight.bits,
        IS_FP8=weight.is_fp8(),
        INTERLEAVED=weight.interleaved,
        BLOCK_O=_OUTPUTS,
        BLOCK_W=block_words,
        num_warps=4,
    )


@triton.jit
def _dequantize_kernel(
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    order_ptr,
    offsets_ptr,
    out_ptr,
    outputs,
    output_stride,
    group_stride,
    INPUTS: tl.constexpr,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    COUNT: tl.constexpr = 1 if IS_FP8 else 32 // BITS
    output = (tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    word = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    valid_o = output < outputs
    packed = tl.load(
        packed_ptr + output[:, None] * WORDS + word[None, :],
        valid_o[:, None] & (word < WORDS)[None, :],
        other=0.0 if IS_FP8 else 0,
    )
    place = tl.arange(0, COUNT)
    column = word[:, None] * COUNT + place[None, :]
    # Words of one group read its scale once for all of their values.
    group = tl.minimum((word[:, None] * COUNT if GROUP % COUNT == 0 else column) // GROUP, GROUPS - 1)
    at = output[:, None, None] * output_stride + group.to(tl.int64)[None, :, :] * group_stride
    valid = valid_o[:, None, None] & (word < WORDS)[None, :, None]
    scale = tl.load(scales_ptr + at, valid, other=0.0).to(tl.float32)
    if IS_FP8:
        values = packed[:, :, None].to(tl.float32)
    else:
        integers = (packed[:, :, None] >> (place * BITS)[None, None, :]) & ((1 << BITS) - 1)
        if zeros_ptr is not None:
            integers -= tl.load(zeros_ptr + at, valid, other=0).to(tl.int32)
        else:
            integers -= 1 << (BITS - 1)
        values = integers.to(tl.float32)
    weight = values * scale
    if offsets_ptr is not None:
        weight += tl.load(offsets_ptr + at, valid, other=0.0).to(tl.float32)
    if INTERLEAVED:
        weight = tl.reshape(weight, (BLOCK_O, BLOCK_W // 4, 4, 2, 4))
        weight = tl.permute(weight, (0, 1, 4, 2, 3))
    weight = tl.reshape(weight, (BLOCK_O, BLOCK_W * COUNT)).to(out_ptr.dtype.element_ty)
    column = tl.program_id(1) * BLOCK_W * COUNT + tl.arange(0, BLOCK_W * COUNT)
    valid_columns = valid_o[:, None] & (column < INPUTS)[None, :]
    if order_ptr is not None:
        column = tl.load(order_ptr + column, column < INPUTS, other=0)
    tl.store(out_ptr + output[:, None] * INPUTS + column[None, :], weight, valid_columns)
