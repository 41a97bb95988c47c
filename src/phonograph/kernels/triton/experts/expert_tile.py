"""Tiles of experts' weights as operands of the tensor cores, in every format. Tiles of FP4 are made here.

A word of FP4 has eight codes of one row, in the order of `grouped.interleave` and `fp4.spread`: one shift and one
logical operation bring the bits of two codes to their places in two numbers of bfloat16, which are the codes times
2^-126. Their product with the scale, whose exponent has `fp4.BIAS`, is exact. There is no exchange between threads:
words come through shared memory as they are, and each thread makes the numbers that it multiplies.

    word w of four    | half: columns 8p + 2w + 1, p = 0..3      | half: columns 8p + 2w, p = 0..3
    bits of a half    | s0 s3 e3 s1 | e3 m3 s2 e0 | e0 m0 e1 e1 | m1 e2 e2 m2 |     of codes 0..3

Shapes: n rows of weights, k inputs, w words of a row.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.torch import fp4
from phonograph.kernels.triton.gemm.gemm_tiled import weight_tile
from phonograph.kernels.triton.gemm.grouped_operands import halves, in_order

BIAS, FACTOR = tl.constexpr(fp4.BIAS), tl.constexpr(fp4.FACTOR)


@triton.jit
def expert_tile(
    weight_ptr,
    weight_stride,
    groups,
    first,
    start,
    rows_left,
    n,
    k,
    SHAPE: tl.constexpr,
    KIND: tl.constexpr,
    FP4: tl.constexpr,
):
    """Load weights [n, k]; arguments as of `weight_tile`. FP4 lacks the factor of `whole_sums`."""
    if FP4:
        row = (first + tl.minimum(n, rows_left - 1)).to(tl.int64)[:, None]
        scales_ptrs = groups[0] + row * groups[3]
        tile = _fp4_tile(weight_ptr, scales_ptrs, groups[4], row, start, SHAPE.K, SHAPE.BLOCK_K, KIND)
    else:
        tile = weight_tile(None, weight_ptr, weight_stride, groups, first, start, rows_left, n, k, SHAPE, KIND)
    return tile


@triton.jit
def whole_sums(sums, KIND: tl.constexpr, FP4: tl.constexpr):
    """Return sums of products with tiles of `expert_tile`, times the factor that these lack."""
    if FP4 and tl.bfloat16 == KIND:
        sums *= FACTOR
    return sums


@triton.jit
def _fp4_tile(
    words_ptr, scales_ptrs, scale_stride, row, start, K: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr
):
    """Load FP4 at rows `row` [n, 1] and the columns of a tile from `start` on, as numbers [n, BLOCK_K] of KIND.

    Args:
        words_ptr: words of K // 8 a row, in the order of `fp4.in_blocks`. Their number is a constant so that the
            compiler knows that 16 bytes may be read at once.
        scales_ptrs: words of exponents of the rows [n, 1].
        scale_stride: from one of them to that of the next 128 columns.
        row: int64, from a multiple of 8 on.
        start: a multiple of BLOCK_K.
        K: columns of a row, a multiple of 64.
        BLOCK_K: a multiple of 128.
        KIND: type of the result.
    """
    word = start // 8 + tl.arange(0, BLOCK_K // 8)[None, :]
    words_ptrs = words_ptr + (row // 8 * K + row % 8 * 8) + (word // 8 * 64 + word % 8)
    scale_word = start // 128 + tl.arange(0, BLOCK_K // 128)[None, :]
    scales_ptrs += scale_word.to(tl.int64) * scale_stride
    if K % BLOCK_K == 0:
        words = tl.load(words_ptrs)
        exponents = tl.load(scales_ptrs)
    else:
        words = tl.load(words_ptrs, word < K // 8, other=0)
        exponents = tl.load(scales_ptrs, scale_word < (K + 127) // 128, other=0)
    N: tl.constexpr = words.shape[0]
    # Operations of which none has a number of a column: past one, the compiler would not bring words into the order of
    # the tensor cores, and would exchange numbers.
    even = tl.join(power_of_two(exponents & 255, KIND), power_of_two((exponents >> 16) & 255, KIND))
    odd = tl.join(power_of_two((exponents >> 8) & 255, KIND), power_of_two((exponents >> 24) & 255, KIND))
    scale = tl.broadcast_to(tl.reshape(tl.join(even, odd), (N, BLOCK_K // 32, 1)), (N, BLOCK_K // 32, 4))
    scale = tl.reshape(scale, (N, BLOCK_K // 8, 1))
    return tl.reshape(in_order(fp4_numbers(words, scale, KIND)), (N, BLOCK_K))


@triton.jit
def fp4_numbers(words, scale, KIND: tl.constexpr):
    """Return the codes of each word times its scale, in new last dimensions of two, as `unpacked` orders them.

    Args:
        words: int32.
        scale: of KIND, with a new last dimension of 1.
        KIND: type of the result, which lacks the factor of `whole_sums`.
    """
    even = tl.join(_pair(words, 0, KIND) * scale, _pair(words, 2, KIND) * scale)
    # Two products become one instruction. For code 3 this needs a sum, which is in the instruction too.
    odd = tl.join(_pair(words, 1, KIND) * scale, _pair(words, 3, KIND) * scale + 0.0)
    return tl.join(even, odd)


@triton.jit
def power_of_two(exponent, KIND: tl.constexpr):
    """Return the factor of codes with a stored exponent, int32."""
    if tl.bfloat16 == KIND:
        value = (exponent << 7).to(tl.uint16).to(KIND, bitcast=True)
    else:
        # 2^-127 has no exponent in float32, and one bit below it.
        value = tl.maximum((exponent - BIAS) << 23, 0x400000).to(tl.float32, bitcast=True).to(KIND)
    return value


@triton.jit
def fp4_bits(words, at: tl.constexpr):
    """Return the bits in bfloat16 of the codes `at` of both halves of each word, times 2^-126."""
    if at == 3:
        bits = ((words << 1) & -0x7FFF8000) | ((words >> 5) & 0x01000100) | ((words >> 4) & 0x00C000C0)
    else:
        bits = (words << (3 * at)) & -0x7E3F7E40
    return bits


@triton.jit
def _pair(words, at: tl.constexpr, KIND: tl.constexpr):
    """Return the codes `at` of both halves of each word in the type KIND, in a new last dimension.

    In bfloat16 they are times 2^-126.
    """
    bits = fp4_bits(words, at)
    if tl.bfloat16 == KIND:
        values = halves(bits, KIND)
    else:
        # An exponent of float16 has 10 bits below it, and is 14 larger than that of a code.
        values = halves((bits & -0x7FFF8000) | ((bits & 0x01C001C0) << 3), KIND) * 2.0**14
    return values
