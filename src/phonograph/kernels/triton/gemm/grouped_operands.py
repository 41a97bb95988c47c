"""Operands of the tensor cores from words of weights, without an exchange between threads (`gemm_grouped_small_m`).

A word of eight weights of 4 bits becomes four pairs of the model's type by one shift and one logical operation each:
the bits of a weight are put into the mantissa of a constant, which makes the number bias + weight. A word of four
weights in FP8 becomes two pairs: sign, exponent and mantissa are moved to their places in the model's type, which makes
the weight times a power of two, by which it is multiplied. A word of four integers of 8 bits becomes two pairs of
differences of two numbers, which are the integers less 128.

Shapes: r rows of eight outputs or of eight rows of the input; a unit has the columns of one product of the tensor
cores.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x4C004C00}
"""Twice the bits of a type's bias. An argument of kernels, because the compiler would not combine two constants of its
own with a word in one instruction."""
BIAS_OF_BFLOAT16, BIAS_OF_FLOAT16 = tl.constexpr(128), tl.constexpr(16)
BIAS_OF_INT8 = tl.constexpr(-128)
"""Number that `unpacked` adds to integers of 8 bits."""


@triton.jit
def read_words(row_ptrs, valid_rows, step, COUNT: tl.constexpr, WORDS: tl.constexpr, UNITS: tl.constexpr):
    """Load a step's words of the rows [8, r], as [8, units, r, 4 * WORDS]: four threads read them, WORDS each.

    A row has COUNT words.
    """
    unit = step * UNITS + tl.arange(0, UNITS)
    word = unit[:, None] * (4 * WORDS) + tl.arange(0, 4 * WORDS)[None, :]
    if WORDS > 1:
        # A thread reads no more of a row than it multiplies, instead of 16 bytes that it would pass on.
        word = tl.max_contiguous(word, [1, WORDS])
    mask = valid_rows[:, None, :, None] & (word < COUNT)[None, :, None, :]
    pointers = row_ptrs[:, None, :, None] + word[None, :, None, :]
    return tl.load(pointers, mask, other=0, eviction_policy="evict_first")


@triton.jit
def read_rows(row_ptrs, valid_rows, step, K: tl.constexpr, EIGHTS: tl.constexpr, UNITS: tl.constexpr):
    """Load a step's columns of the rows [8, r], as [8, units, r, EIGHTS, 32].

    Each of four threads has EIGHTS times eight columns in a row; the last dimension has eight columns of each thread.
    """
    at = tl.arange(0, 32)
    unit = step * UNITS + tl.arange(0, UNITS)
    within = tl.arange(0, EIGHTS)[:, None] * 8 + (at // 8 * (8 * EIGHTS) + at % 8)[None, :]
    column = unit[:, None, None] * (32 * EIGHTS) + within[None, :, :]
    mask = valid_rows[:, None, :, None, None] & (column < K)[None, :, None, :, :]
    return tl.load(row_ptrs[:, None, :, None, None] + column[None, :, None, :, :], mask, other=0.0)


@triton.jit
def read_groups(
    pointer,
    first,
    output_stride,
    group_at,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OUTPUT: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Load the scales or zeros of groups for OUTPUTS of a program's outputs from OUTPUT on, [units, outputs, 1].

    Sixteen at a time: so few are read in the layout that they are needed in, more would pass through shared memory.
    Those beyond the last output have its values.

    Args:
        pointer: of the first output and group.
        first: first output of the program; those from BLOCK_N on are N further.
        output_stride: of the scales.
        group_at: places of the units' groups, int64 [units, 1, 1].
        N: outputs.
        BLOCK_N: outputs of a program.
        OUTPUT: the first that is loaded.
        OUTPUTS: their number, 16 times a power of two.
    """
    if OUTPUTS > 16:
        HALF: tl.constexpr = OUTPUTS // 2
        low = read_groups(pointer, first, output_stride, group_at, N, BLOCK_N, OUTPUT, HALF)
        high = read_groups(pointer, first, output_stride, group_at, N, BLOCK_N, OUTPUT + HALF, HALF)
        values = tl.permute(tl.join(low, high), (0, 3, 1, 2))
        values = tl.reshape(values, (values.shape[0], OUTPUTS, 1))
    else:
        output = first + OUTPUT % BLOCK_N + tl.arange(0, OUTPUTS)[None, :, None]
        row = tl.minimum(output, N - 1) + OUTPUT // BLOCK_N * N
        values = tl.load(pointer + row.to(tl.int64) * output_stride + group_at)
    return values


@triton.jit
def _pair(words, magic, at: tl.constexpr, KIND: tl.constexpr):
    """Return weights `at` and `at + 4` of each word in the type KIND, plus the bias, in a new last dimension."""
    if tl.bfloat16 == KIND:
        bits = (words >> (4 * at)) & 0x000F000F | magic
    elif at < 2:
        bits = (words << (6 - 4 * at)) & 0x03C003C0 | magic
    else:
        bits = (words >> (4 * at - 6)) & 0x03C003C0 | magic
    return halves(bits, KIND)


@triton.jit
def _fp8_pair(words, at: tl.constexpr, KIND: tl.constexpr):
    """Return weights `at` and `at + 2` of each word in the type KIND, in a new last dimension."""
    bits = words << (8 - 8 * at)
    if tl.bfloat16 == KIND:
        # The exponent's bias is 127, of e4m3 7.
        moved = (bits & -0x7FFF8000) | ((bits >> 4) & 0x07F007F0)
        return halves(moved, KIND) * 2.0**120
    moved = (bits & -0x7FFF8000) | ((bits >> 1) & 0x3F803F80)
    return halves(moved, KIND) * 2.0**8


@triton.jit
def _int8_pair(words, magic, at: tl.constexpr, KIND: tl.constexpr):
    """Return weights `at` and `at + 2` of each word in the type KIND, less 128, in a new last dimension."""
    if tl.bfloat16 == KIND:
        low, high = bfloat16_terms(words, magic, at)
        values = halves(low, KIND) - halves(high, KIND)
    else:
        # The bits of 1024 + weight, where magic has the bits of 16.
        values = halves((words >> (8 * at)) & 0x00FF00FF | (magic + 0x18001800), KIND) - 1152.0
    return values


@triton.jit
def bfloat16_terms(words, magic, at: tl.constexpr):
    """Return the bits of two numbers in bfloat16 whose difference is a weight of 8 bits less 128.

    A mantissa has 7 bits, so that these are 128 + the weight's lower 7 bits, and 128 or 256 by its highest bit.
    """
    bits = words >> (8 * at)
    return (bits & 0x007F007F) | magic, (~bits & 0x00800080) | magic


@triton.jit
def halves(bits, KIND: tl.constexpr):
    """Return the lower and the upper half of each word as numbers, in a new last dimension."""
    low = (bits & 0xFFFF).to(tl.uint16).to(KIND, bitcast=True)
    high = ((bits >> 16) & 0xFFFF).to(tl.uint16).to(KIND, bitcast=True)
    return tl.join(low, high)


@triton.jit
def unpacked(words, magic, BITS: tl.constexpr, KIND: tl.constexpr, INT8: tl.constexpr = False):
    """Return the weights of each word in order, in new last dimensions of two; integers plus the bias.

    Weights of 8 bits are FP8, or integers with INT8.
    """
    if BITS == 4:
        even = tl.join(_pair(words, magic, 0, KIND), _pair(words, magic, 2, KIND))
        odd = tl.join(_pair(words, magic, 1, KIND), _pair(words, magic, 3, KIND))
        values = tl.join(even, odd)
    elif INT8:
        values = tl.join(_int8_pair(words, magic, 0, KIND), _int8_pair(words, magic, 1, KIND))
    else:
        values = tl.join(_fp8_pair(words, 0, KIND), _fp8_pair(words, 1, KIND))
    return values


@triton.jit
def in_order(values):
    """Return the weights [n, w, 2, 2, 2] of interleaved words in the order of the columns, in several dimensions."""
    values = tl.reshape(values, (values.shape[0], values.shape[1] // 4, 2, 2, 2, 2, 2))
    return tl.permute(values, (0, 1, 5, 6, 2, 3, 4))


@triton.jit
def weights(words, magic, BITS: tl.constexpr, KIND: tl.constexpr, INT8: tl.constexpr = False):
    """Return words of `read_words`, by `unpacked`, as a left operand [units, 8 r, k]."""
    UNITS: tl.constexpr = words.shape[1]
    R: tl.constexpr = words.shape[2]
    # Eights of columns that a thread has in a row.
    EIGHTS: tl.constexpr = words.shape[3] // BITS
    values = unpacked(words, magic, BITS, KIND, INT8)
    return _left(tl.reshape(values, (8, UNITS, R, 4, EIGHTS, 2, 2, 2)), BITS)


@triton.jit
def numbers(
    words,
    magic,
    zero,
    scale,
    BITS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    INT8: tl.constexpr = False,
):
    """Return the weights [n, k] of words [n, w] in the type KIND.

    Args:
        words: words of rows, of outputs one after another.
        magic: `MAGIC` of the type.
        zero: zeros plus the bias [n, 1], in KIND, or one number for all; of integers only, None for 0.
        scale: scales [n, 1] in KIND.
        BITS: of a weight.
        INTERLEAVED: the words are in the order of `kernels.torch.grouped.interleave`.
        KIND: type of the result.
        INT8: of `unpacked`.
    """
    values = unpacked(words, magic, BITS, KIND, INT8)
    if INTERLEAVED:
        values = in_order(values)
    values = tl.reshape(values, (words.shape[0], 32 // BITS * words.shape[1]))
    if zero is not None:
        # Differences of small integers are exact.
        values -= zero
    return values * scale


@triton.jit
def _left(values, BITS: tl.constexpr):
    """Return [8, units, r, 4, eights, 2, 2, 2], whose last dimensions are eight columns, as an operand [units, 8 r, k].

    The order of k is that in which the tensor cores want what each thread has: four numbers, which are two pairs, then
    the numbers of the next thread.
    """
    UNITS: tl.constexpr = values.shape[1]
    R: tl.constexpr = values.shape[2]
    EIGHTS: tl.constexpr = values.shape[4]
    if BITS == 4:
        return tl.reshape(tl.permute(values, (1, 2, 0, 4, 6, 3, 7, 5)), (UNITS, 8 * R, 32 * EIGHTS))
    return tl.reshape(tl.permute(values, (1, 2, 0, 4, 5, 3, 7, 6)), (UNITS, 8 * R, 32 * EIGHTS))


@triton.jit
def columns(rows, BITS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return rows of `read_rows` as a right operand [units, k, 8 r], in the order of `weights`.

    A thread has 32 columns of a unit of 128, four words in either order.
    """
    UNITS: tl.constexpr = rows.shape[1]
    R: tl.constexpr = rows.shape[2]
    EIGHTS: tl.constexpr = rows.shape[3]
    if INTERLEAVED:
        values = tl.permute(tl.reshape(rows, (8, UNITS, R, 2, 2, 4, 2, 2, 2)), (0, 1, 2, 5, 6, 7, 8, 3, 4))
        values = tl.reshape(values, (8, UNITS, R, 4, 4, 2, 2, 2))
    else:
        values = tl.permute(tl.reshape(rows, (8, UNITS, R, EIGHTS, 4, 2, 2, 2)), (0, 1, 2, 4, 3, 5, 6, 7))
    return tl.permute(_left(values, BITS), (0, 2, 1))
