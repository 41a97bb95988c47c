"""Conversion of FP8 keys and values to float16, which holds all of them exactly.

Shapes: M rows of queries, N keys, D head size.

1. Hopper converts two FP8 values to float16 in one instruction. bfloat16 takes one more for each value, at a quarter of
   the speed, so bfloat16 queries become float16 rows with a power of two each.
2. Products need the values of neighbouring keys in one register, but the cache has neighbouring elements of a head
   there, and the instructions that transpose tiles from shared memory move 16 bits.
3. So pairs of elements are moved as one and split in registers. The even and the odd elements are two products.

    cache, one key   | d0 d1 | d2 d3 | ...    bytes, moved in pairs
    even product     | d0      d2      ...    float16, first of `pairs_apart`
    odd product      |    d1      d3   ...    float16, second
"""

# pyright: basic, reportGeneralTypeIssues=false
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@functools.cache
def fp8_in_one_instruction() -> bool:
    """Return True if the current device converts two E4M3 values to float16 at once."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@triton.jit
def pairs_apart(pairs, E5M2: tl.constexpr, ONE_INSTRUCTION: tl.constexpr):
    """Split int16 words of two FP8 values into the first values (the low bytes) and the second, in float16."""
    if E5M2:
        # The upper half of a float16.
        first = (pairs << 8).to(tl.int16).to(tl.float16, bitcast=True)
        second = (pairs & -256).to(tl.int16).to(tl.float16, bitcast=True)
    elif ONE_INSTRUCTION:
        # Two instructions a value. The compiler would take four, to mask and shift each byte.
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b16 a, b;
            .reg .b32 x, y;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 x, a;
            cvt.rn.f16x2.e4m3x2 y, b;
            prmt.b32 $0, x, y, 0x5410;
            prmt.b32 $1, x, y, 0x7632;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        first = pairs.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return first, second


@triton.jit
def rows_in_float16(x_MD):
    """Split bfloat16 [M, D] into float16 rows and powers of two [M] in float32: x = rows * powers[:, None].

    Elements 2^26 times smaller than the greatest of their row lose digits, and may become 0.
    """
    # Rows are scaled to between 2^12 and 2^13; their sums of products with FP8 keys stay far below float32's limit.
    exponent_M = tl.max(tl.abs(x_MD.to(tl.float32)), 1).to(tl.int32, bitcast=True) >> 23
    exponent_M = tl.maximum(exponent_M, 13)
    inverse_M = ((254 + 12 - exponent_M) << 23).to(tl.float32, bitcast=True)
    power_M = ((exponent_M - 12) << 23).to(tl.float32, bitcast=True)
    return (x_MD.to(tl.float32) * inverse_M[:, None]).to(tl.float16), power_M


@triton.jit
def at_width_of(x, DTYPE: tl.constexpr):
    """Convert FP8 values, exactly, and others, to a wider type."""
    if x.dtype.primitive_bitwidth == 8:
        # Two instructions at full speed are faster than one at a quarter of it.
        return x.to(tl.float16).to(tl.float32).to(DTYPE)
    return x.to(DTYPE)
