"""Operands of the tensor cores' products of integers, from a row in 16 bits and from words of weights of 4 bits.

A product takes signed bytes. A weight becomes the byte 16 (weight - 8): one shift and one logical operation for the
four weights in the lower halves of a word's bytes, one operation for those in the upper halves.

Each 128 columns of the row have a scale, by which their numbers are integers of 16 bits, and these are two bytes,
256 high + low, in two columns of the right operand. This rounds by 2**-16 of the largest of the 128 numbers; bfloat16
rounds each number by 2**-9 of itself. The sums of products are exact.

The row's bytes lie in shared memory in pieces: 64 bytes of high ones, then 64 of low ones, for half of the words of a
unit of 128 columns. A thread reads 16 bytes at a time, which belong to two of its four words. The tensor cores take
eight columns where a row has two, so that the threads of the others read the pieces that follow, and their sums are not
used. For this the pieces of four halves of a unit, of two steps, lie one after another, then the next unit's.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from phonograph.kernels.triton.gemm.hopper.gemm_ring_parts import UNIT
from phonograph.kernels.triton.launch.gluon import powers

PIECES = gl.constexpr(4)
"""Consecutive pieces of a unit."""
_LARGEST = gl.constexpr(32512.0)
"""Largest integer of a row, 127 * 256: its high byte is still one when the low one is rounded up to the next."""
_MAGIC = gl.constexpr(12582912.0)
"""1.5 * 2**23: added to a small number, it leaves the nearest integer in the lower bits of the sum."""


@gluon.constexpr_function
def words_layout(warps_n, warps_k, outputs, words):
    """Return the layout of a tile's words and of their bytes: four words of a unit a thread, of outputs 8 apart."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [8, 0, 0]]
    registers += [[one, 0, 0] for one in powers(16 * warps_n, outputs)]
    registers += [[0, one, 0] for one in powers(16 * warps_k, words)]
    lanes = [[0, 4, 0], [0, 8, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[one, 0, 0] for one in powers(16, 16 * warps_n)] + [[0, one, 0] for one in powers(16, 16 * warps_k)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [outputs, words, 4])


@gluon.constexpr_function
def sums_layout(warps_n, warps_k, units, outputs):
    """Return the layout of sums [units, n, 4], in which a thread has both bytes of a row summed."""
    registers = [[0, 8, 0]] + [[0, one, 0] for one in powers(16 * warps_n, outputs)]
    registers += [[one, 0, 0] for one in powers(warps_k, units)]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, one, 0] for one in powers(16, 16 * warps_n)] + [[one, 0, 0] for one in powers(1, warps_k)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [units, outputs, 4])


@gluon.constexpr_function
def _pieces_layout(warps_n, warps_k, units):
    """Return the layout of pieces [units, 8, 64]: 16 bytes a thread."""
    registers = [[0, 0, one] for one in powers(1, 16)] + [[one, 0, 0] for one in powers(warps_k, units)]
    lanes = [[0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, 0, 0] for _ in powers(1, warps_n)] + [[one, 0, 0] for one in powers(1, warps_k)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [units, 8, 64])


@gluon.jit
def _reinterpreted(values, KIND: gl.constexpr):
    """Return the same bits as a type of the same size."""
    return values.to(KIND, bitcast=True)


@gluon.jit
def _larger_halves(one, other):
    """Return the larger of two lower and of two upper halves of words, as numbers without a sign."""
    return gl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [one, other], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _halves(words, KIND: gl.constexpr):
    """Return the numbers of type KIND in the lower and in the upper halves of words, in float32."""
    if gl.bfloat16 == KIND:
        low = _reinterpreted(words << 16, gl.float32)
        high = _reinterpreted(words & -65536, gl.float32)
    else:
        low = _reinterpreted(words.to(gl.int16), gl.float16).to(gl.float32)
        high = _reinterpreted((words >> 16).to(gl.int16), gl.float16).to(gl.float32)
    return low, high


@gluon.jit
def _largest(words, KIND: gl.constexpr):
    """Return the largest absolute value of the halves of words [groups, w] of type KIND, in float32, [groups].

    By its bits, infinity is larger than all numbers, and what is not a number is larger still.
    """
    bits = gl.reduce(words & 0x7FFF7FFF, 1, _larger_halves)
    low, _ = _halves(gl.maximum(bits & 0xFFFF, bits >> 16), KIND)
    return low


@gluon.jit
def _bytes_of(one, two, three, four):
    """Return the high and the low bytes of four integers of 16 bits, both signed, as words of four bytes."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d;
        prmt.b32 a, $2, $3, 0x0040;
        prmt.b32 b, $4, $5, 0x0040;
        prmt.b32 $1, a, b, 0x5410;
        add.s32 a, $2, 128;
        add.s32 b, $3, 128;
        add.s32 c, $4, 128;
        add.s32 d, $5, 128;
        prmt.b32 a, a, b, 0x0051;
        prmt.b32 c, c, d, 0x0051;
        prmt.b32 $0, a, c, 0x5410;
        }
        """,
        "=&r,=&r,r,r,r,r",
        [one, two, three, four],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _signed_bytes(words):
    """Return 16 (weight - 8) of the lower and of the upper weights of each byte of words [n, w, 4 times the same]."""
    low = gl.inline_asm_elementwise(
        "{ .reg .b32 moved; shl.b32 moved, $1, 4; lop3.b32 $0, moved, 0xF0F0F0F0, 0x80808080, 0x6A; }",
        "=r,r,r,r,r",
        [words],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )
    high = gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0xF0F0F0F0, 0x80808080, 0x6A;",
        "=r,r,r,r,r",
        [words],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )
    return low, high


@gluon.jit
def _split_far(values):
    """Return the first and the second 16 columns of each 32, from pairs of columns [groups, 64].

    Their weights lie in the same words, in neighbouring bytes.
    """
    GROUPS: gl.constexpr = values.shape[0]
    near, far = gl.split(values.reshape((GROUPS, 4, 2, 8)).permute((0, 1, 3, 2)))
    return near.reshape((GROUPS, 32)), far.reshape((GROUPS, 32))


@gluon.jit
def put_row(pieces, scales, sums, x_ptr, column, end, WARPS: gl.constexpr, KIND: gl.constexpr):
    """Write columns of a row as bytes to shared memory, with their scales and sums.

    An infinite number, or what is not a number, leaves an infinite scale or one that is not a number, and so results
    that are not finite.

    Args:
        pieces: room for the bytes.
        scales: 1/16 of the scale of each 128 columns, [turns, units].
        sums: 16 times their sums of integers, like `scales`; None if no weights have zeros.
        x_ptr: the row, in pairs of columns.
        column: first pair.
        end: pair after the last.
        WARPS: of the program.
        KIND: type of the row.
    """
    TURNS: gl.constexpr = scales.shape[0]
    UNITS: gl.constexpr = scales.shape[1]
    GROUPS: gl.constexpr = TURNS * UNITS
    # A thread has 32 columns, which one thread multiplies by an output's four words.
    READ: gl.constexpr = gl.BlockedLayout([16], [32], [WARPS], [0])
    k = column + gl.arange(0, GROUPS * 64, layout=READ)
    words = gl.load(x_ptr + k, mask=k < end, other=0).reshape((GROUPS, 64))
    largest = _largest(words, KIND)
    factor = (_LARGEST / gl.maximum(largest, 1e-30))[:, None]
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales._reinterpret(gl.float32, [GROUPS], FLAT).store(largest * (1 / (16 * _LARGEST)))
    low, high = _halves(words, KIND)
    low, high = low * factor + _MAGIC, high * factor + _MAGIC
    if sums is not None:
        total = gl.sum((low - _MAGIC) + (high - _MAGIC), 1) * 16
        sums._reinterpret(gl.float32, [GROUPS], FLAT).store(total)
    one, two = _split_far(_reinterpreted(low, gl.int32))
    three, four = _split_far(_reinterpreted(high, gl.int32))
    high, low = _bytes_of(one, two, three, four)
    # Pairs of turns, turns, units, four threads, halves of a byte, words of a thread in twos, high and low.
    both = gl.join(high, low).reshape((TURNS // 2, 2, UNITS, 4, 2, 2, 2, 2)).permute((0, 2, 1, 5, 7, 3, 4, 6))
    pieces._reinterpret(gl.int32, [64 * GROUPS], FLAT).store(both.reshape((64 * GROUPS,)))


@gluon.jit
def _columns(pieces, half, UNITS: gl.constexpr, WARPS_N: gl.constexpr, WARPS_K: gl.constexpr):
    """Return the bytes for half of each unit's words, [units, 8, 64]; `half` counts two for each step."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    piece = pieces.index(half // PIECES * (UNITS * PIECES) + half % PIECES)
    return piece._reinterpret(gl.int8, [UNITS, 8, 64], LAYOUT).load(_pieces_layout(WARPS_N, WARPS_K, UNITS))


@gluon.jit
def right(pieces, turn, UNITS: gl.constexpr, WARPS_N: gl.constexpr, WARPS_K: gl.constexpr, OPERAND: gl.constexpr):
    """Return a step's columns as a right operand [units, k, 8], in the order of `left`."""
    first = _columns(pieces, 2 * turn, UNITS, WARPS_N, WARPS_K)
    second = _columns(pieces, 2 * turn + 1, UNITS, WARPS_N, WARPS_K)
    values = gl.join(first, second).reshape((UNITS, 8, 4, 2, 2, 4, 2)).permute((0, 6, 3, 4, 2, 5, 1))
    return gl.convert_layout(values.reshape((UNITS, UNIT, 8)), OPERAND, assert_trivial=True)


@gluon.jit
def left(words, UNITS: gl.constexpr, OPERAND: gl.constexpr):
    """Return the weights of a tile's words [n, w] as a left operand [units, n, k]: registers in order."""
    N: gl.constexpr = words.shape[0]
    low, high = _signed_bytes(words[:, :, None].broadcast_to((N, 16 * UNITS, 4)))
    values = gl.join(low, high).reshape((N, UNITS, 4, 2, 2, 4, 2)).permute((1, 0, 3, 6, 4, 2, 5))
    return gl.convert_layout(values.reshape((UNITS, N, UNIT)), OPERAND, assert_trivial=True)


@gluon.jit
def multiply(weights, row, SUMS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return weights @ row of both bytes together, in float32, [units, n, 4]: the sums, then three without meaning."""
    UNITS: gl.constexpr = weights.shape[0]
    N: gl.constexpr = weights.shape[1]
    both = mma_v2(weights, row, gl.zeros([UNITS, N, 8], gl.int32, LAYOUT))
    high, low = gl.split(both.reshape((UNITS, N, 4, 2)))
    return gl.convert_layout(high * 256 + low, SUMS, assert_trivial=True).to(gl.float32)
