"""Products of experts with few rows each and weights of FP4, whose words stay in registers.

A tile is some outputs of one item, as in `expert_products`, and its warps share the inputs, as in
`gemm_grouped_small_m`: tensor cores of registers take 8 rows, where those of shared memory work for 64 outputs as long
as for many rows. A thread reads 16 bytes of a row, which are four words of one group of 32 inputs, and the group's
exponent.

    K ->        unit 0    unit 1    ...      | next step
    16 outputs  [ warp 0 ][ warp 1 ][ ... ]  | [ warp 0 ]      words and exponents of AHEAD steps are in registers
    x           [ 128 columns ][ ...    ]                      sums are added over the warps at the end

Shapes: those of `expert_products`; r rows of eight outputs or eight rows; a unit has 128 inputs.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.triton.experts.expert_results import write_results
from phonograph.kernels.triton.experts.expert_tile import fp4_numbers, power_of_two, whole_sums
from phonograph.kernels.triton.gemm.gemm_epilogue import add_warps
from phonograph.kernels.triton.launch.pdl import pdl_begin


@triton.jit
def _read_words(row_ptrs, valid_row, step, UNITS: tl.constexpr, COUNT: tl.constexpr):
    """Load the words of a step's units for the rows [8, r], as [8, units, r, 16]. COUNT is the words of a row."""
    unit = step * UNITS + tl.arange(0, UNITS)[:, None]
    word = tl.arange(0, 16)[None, :]
    # A thread reads no more of a row than it multiplies, instead of 32 bytes that it would pass on.
    place = tl.max_contiguous(unit * 128 + (word // 8 * 64 + word % 8), [1, 4])
    mask = valid_row[:, None, :, None] & (unit * 16 + word < COUNT)[None, :, None, :]
    return tl.load(row_ptrs[:, None, :, None] + place[None, :, None, :], mask, other=0, eviction_policy="evict_first")


@triton.jit
def _read_exponents(row_ptrs, unit_stride, step, UNITS: tl.constexpr, LAST: tl.constexpr):
    """Load the exponents of a step's units for the rows [8, r], as [8, units, r, 4]; LAST is the last unit."""
    unit = tl.minimum(step * UNITS + tl.arange(0, UNITS), LAST).to(tl.int64)
    byte = unit[:, None] * (4 * unit_stride) + tl.arange(0, 4)[None, :]
    pointers = row_ptrs[:, None, :, None] + byte[None, :, None, :]
    # A thread reads one byte, that of its words: the compiler would read four, and exchange them.
    return tl.load(tl.multiple_of(pointers, [1, 1, 1, 1]))


@triton.jit
def _fp4_operand(words, exponents, KIND: tl.constexpr):
    """Return words [8, units, r, 16] as a left operand [units, 8 r, 128]."""
    UNITS: tl.constexpr = words.shape[1]
    R: tl.constexpr = words.shape[2]
    scale = power_of_two(exponents.to(tl.int32), KIND)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, :, :, None], (8, UNITS, R, 4, 4)), (8, UNITS, R, 16, 1))
    # Dimensions of two after that of the threads: pair of words, word, half, pair of codes, code.
    values = tl.reshape(fp4_numbers(words, scale, KIND), (8, UNITS, R, 4, 2, 2, 2, 2, 2))
    return tl.reshape(tl.permute(values, (1, 2, 0, 4, 7, 5, 3, 8, 6)), (UNITS, 8 * R, 128))


@triton.jit
def _read_rows(row_ptrs, step, K: tl.constexpr, UNITS: tl.constexpr):
    """Load a step's columns of the rows [8, r] as a right operand [units, 128, 8 r], in the order of `_fp4_operand`.

    Each of four threads has the 32 columns of a group, 16 bytes for each code of its words. In that order the registers
    of two words lie side by side in one operand. Columns after the last repeat others, because their weights are 0.
    """
    R: tl.constexpr = row_ptrs.shape[1]
    code = tl.arange(0, 4)[:, None]
    at = tl.arange(0, 32)[None, :]
    unit = step * UNITS + tl.arange(0, UNITS)[:, None, None]
    group = tl.minimum(unit * 4 + at // 8, K // 32 - 1)
    column = tl.max_contiguous(group * 32 + (code * 8 + at % 8), [1, 1, 8])
    rows = tl.load(row_ptrs[:, None, :, None, None] + column[None, :, None, :, :])
    values = tl.reshape(rows, (8, UNITS, R, 2, 2, 4, 2, 2, 2))
    values = tl.permute(values, (1, 2, 0, 6, 3, 7, 5, 4, 8))
    return tl.permute(tl.reshape(values, (UNITS, 8 * R, 128)), (0, 2, 1))


@triton.jit
def tile_places(
    weight_ptr, exponents_ptr, first, weight_row, strides, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Return where the weights of OUTPUTS rows are, [8, r]: BLOCK_N from `first` on, then their ups if there are more.

    Args:
        weight_ptr: words of all experts.
        exponents_ptr: their exponents.
        first: a multiple of 8.
        weight_row: first row of the expert, int64. The rows of the ups follow the N rows of the gates.
        strides: of exponents, from one row to the next and from one unit to the next.
        N: outputs of an expert.
        K: inputs.
        BLOCK_N: outputs of the tile.
        OUTPUTS: rows of the tile.
    """
    eights = tl.arange(0, OUTPUTS // 8)[None, :]
    row = first + tl.arange(0, 8)[:, None] + eights % (BLOCK_N // 8) * 8
    rows = weight_row + tl.minimum(row, N - 1) + eights // (BLOCK_N // 8) * N
    return row_places(weight_ptr, exponents_ptr, rows, row < N, strides, K)


@triton.jit
def row_places(weight_ptr, exponents_ptr, rows, valid_row, strides, K: tl.constexpr):
    """Return where the weights of rows [8, r] are, each eight of them a block: pointers, and which of them exist."""
    word_ptrs = weight_ptr + (rows // 8 * K + tl.arange(0, 8)[:, None] * 8)
    byte_ptrs = exponents_ptr.to(tl.pointer_type(tl.uint8)) + rows * (4 * strides[0])
    return word_ptrs, byte_ptrs, valid_row, strides[1]


@triton.jit
def first_weights(places, K: tl.constexpr, UNITS: tl.constexpr, AHEAD: tl.constexpr):
    """Load the words and exponents of the first AHEAD steps, for `multiply`."""
    word_ptrs, byte_ptrs, valid_row, unit_stride = places
    words = ()
    exponents = ()
    for step in tl.static_range(AHEAD):
        words += (_read_words(word_ptrs, valid_row, step, UNITS, K // 8),)
        exponents += (_read_exponents(byte_ptrs, unit_stride, step, UNITS, (K + 127) // 128 - 1),)
    return words, exponents


@triton.jit
def multiply(x_ptrs, places, weights, K: tl.constexpr, UNITS: tl.constexpr, AHEAD: tl.constexpr, KIND: tl.constexpr):
    """Return the products [units, outputs, rows] of rows of weights with rows of x, by unit of a step.

    Args:
        x_ptrs: first columns of the rows of x [8, r].
        places: of the rows of weights.
        weights: of `first_weights`.
        K: inputs.
        UNITS: units of a step.
        AHEAD: steps whose words are in registers.
        KIND: type of x.
    """
    LAST: tl.constexpr = (K + 127) // 128 - 1
    TURNS: tl.constexpr = (LAST + UNITS * AHEAD) // (UNITS * AHEAD)
    word_ptrs, byte_ptrs, valid_row, unit_stride = places
    words, exponents = weights
    sums = tl.zeros((UNITS, 8 * word_ptrs.shape[1], 8 * x_ptrs.shape[1]), tl.float32)
    # One stage: Triton's own pipeline would bring the operands through shared memory.
    for turn in tl.range(TURNS, num_stages=1):
        for place in tl.static_range(AHEAD):
            now = turn * AHEAD + place
            right = _read_rows(x_ptrs, now, K, UNITS)
            sums = tl.dot(_fp4_operand(words[place], exponents[place], KIND), right, sums, input_precision="ieee")
            next_words = _read_words(word_ptrs, valid_row, now + AHEAD, UNITS, K // 8)
            words = words[:place] + (next_words,) + words[place + 1 :]
            values = _read_exponents(byte_ptrs, unit_stride, now + AHEAD, UNITS, LAST)
            exponents = exponents[:place] + (values,) + exponents[place + 1 :]
    return sums


@triton.jit
def expert_few_rows_kernel(
    x_ptr,
    weight_ptr,
    exponents_ptr,
    bias_ptr,
    out_ptr,
    weights_ptr,
    pairs_ptr,
    items_ptr,
    num_items_ptr,
    x_stride,
    output_stride,
    unit_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
    num_warps: tl.constexpr,
):
    GATED: tl.constexpr = MODE >= 2 and MODE < 5
    KIND: tl.constexpr = x_ptr.dtype.element_ty
    # With a gated activation the rows of the ups follow the rows of the gates.
    OUTPUTS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    column_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    m_eight = tl.arange(0, 8)[:, None] + 8 * tl.arange(0, ROWS // 8)[None, :]
    m = tl.arange(0, ROWS)
    pdl_begin(PDL)
    tile = tl.program_id(0)
    item = items_ptr + tile // column_tiles * 3
    expert = tl.load(item).to(tl.int64)
    start = tl.load(item + 1)
    count = tl.load(item + 2)
    # Later than the item, which may be none: both come from memory at once.
    if tile >= tl.load(num_items_ptr) * column_tiles:
        return
    first = tile % column_tiles * BLOCK_N
    weight_row = expert * (2 * N if GATED else N)
    strides = output_stride, unit_stride
    places = tile_places(weight_ptr, exponents_ptr, first, weight_row, strides, N, K, BLOCK_N, OUTPUTS)
    weights = first_weights(places, K, UNITS, AHEAD)
    # Places after the item's last have its row, whose results are not stored.
    x_row = start + tl.minimum(m_eight, count - 1)
    if MODE >= 2:
        x_row = tl.load(pairs_ptr + x_row) // TOP_K
    x_ptrs = x_ptr + x_row.to(tl.int64) * x_stride
    sums = multiply(x_ptrs, places, weights, K, UNITS, AHEAD, KIND)
    total = whole_sums(add_warps(sums, UNITS, num_warps), KIND, True)
    up = None
    if GATED:
        total, up = tl.split(tl.permute(tl.reshape(total, (2, BLOCK_N, ROWS)), (1, 2, 0)))
    else:
        total = tl.reshape(total, (BLOCK_N, ROWS))
    pair = tl.load(pairs_ptr + start + m, m < count, other=0)
    write_results(
        total, up, bias_ptr, weights_ptr, out_ptr, out_stride, weight_row + first, (start, count, pair), first, N, MODE
    )
