"""Matrix products for 64 to 256 rows, cut into equal ranges of work (Stream-K: Osama et al., 2023).

At so many rows a product takes as long to compute as its weights take to read, and both only if every processor has
work until the end. Tiles as large as that needs are few: gate and up of an 8B model have 224 of 128 outputs, which 132
processors take in two turns, the second two thirds full. So the steps of all tiles are laid end to end, and each
program, one a multiprocessor, takes an equal range.

Of a tile that is cut, the program with its end adds up what those before it have left. It comes to that tile last, and
they to theirs first, since every program goes through its range backwards: nobody waits long. Sums are added in the
order of the programs, so results do not depend on timing. A program that waits keeps its multiprocessor, so all must be
on the device at once; see `span` for why they are.

Shapes: M rows, N outputs, K inputs, I intermediate size. Sums are float32.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from phonograph.kernels.triton.pdl import pdl_usable
from phonograph.kernels.triton.tiles import finish_tile, num_processors, prefetch_rows


class StreamConfig(NamedTuple):
    """Tiles of block_n outputs (with a gated activation, of as many gates and as many ups) by `rows` padded rows, of
    which a step takes block_k inputs; `programs` at most, and no more than multiprocessors.

    rows:     a power of two from 16, or one and a half of one, where a tile is two products
    prefetch: columns that a program asks the L2 cache for before it waits for its input.
    """

    rows: int
    block_n: int
    block_k: int
    programs: int
    num_warps: int
    num_stages: int
    prefetch: int


def num_partials(config: StreamConfig, *, pairs: bool) -> int:
    """Partial sums that programs may leave for others."""
    return config.programs * config.block_n * config.rows * (1 + pairs)


def _fetchable(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can fetch tiles of it: rows begin at multiples of 16 bytes."""
    return matrix.stride(1) == 1 and matrix.stride(0) * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0


def stream_product(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    *,
    mode: int,
    config: StreamConfig,
    partials: torch.Tensor,
    ready: torch.Tensor,
) -> None:
    """out = x @ weight^T + bias (mode 0), out += that (1), or of gates and ups, in this order, silu(gate) * up (2).

    Rows of `x`, at most `config.rows`, and of `weight` begin at multiples of 16 bytes.

    partials: float32, `num_partials` of them; ready: int32, one for each program, zero between launches
    """
    num_rows, num_inputs = x_MK.shape
    num_outputs = out_MN.shape[1]
    rows, block_n, block_k, programs, num_warps, num_stages, prefetch = config
    assert num_rows <= rows and weight_NK.shape == (num_outputs * (1 + (mode == 2)), num_inputs)
    assert _fetchable(x_MK) and _fetchable(weight_NK)
    assert partials.numel() >= num_partials(config, pairs=mode == 2) and ready.numel() >= programs
    # Each has a step at least: of one without, nobody would ever hear. The interpreter runs them in order.
    num_steps = triton.cdiv(num_outputs, block_n) * triton.cdiv(num_inputs, block_k)
    programs = min(programs, num_steps, num_processors(x_MK.device, without_gpu=programs))
    main = 1 << (rows.bit_length() - 1)
    pdl = pdl_usable()

    def row_tiles(size: int) -> TensorDescriptor:
        return TensorDescriptor(x_MK, list(x_MK.shape), [x_MK.stride(0), 1], [size, block_k])

    _stream_kernel[(programs,)](
        row_tiles(main),
        row_tiles(rows - main) if rows > main else None,
        TensorDescriptor(weight_NK, list(weight_NK.shape), [weight_NK.stride(0), 1], [block_n, block_k]),
        weight_NK,
        bias_N,
        out_MN,
        partials,
        ready,
        num_rows,
        weight_NK.stride(0),
        out_MN.stride(0),
        N=num_outputs,
        K=num_inputs,
        ROWS=main,
        MORE=rows - main,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PROGRAMS=programs,
        PREFETCH=prefetch,
        MODE=mode,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=num_warps,
        num_stages=num_stages,
    )


@triton.jit(do_not_specialize=["M"])
def _stream_kernel(
    x_desc,
    more_desc,
    weight_desc,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    ready_ptr,
    M,
    weight_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PREFETCH: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl_cuda.gdc_launch_dependents()
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TOTAL: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * STEPS
    PARTIALS: tl.constexpr = BLOCK_N * (ROWS + MORE) * (2 if MODE == 2 else 1)
    # Rows behind the first ROWS, whose sums are never made where there are none.
    REST: tl.constexpr = MORE if MORE > 0 else 16
    program = tl.program_id(0)
    begin = program * TOTAL // PROGRAMS
    position = (program + 1) * TOTAL // PROGRAMS
    if PDL:
        if PREFETCH > 0 and position > begin:
            tile = (position - 1) // STEPS
            first_k = tl.maximum(begin - tile * STEPS, 0) * BLOCK_K
            element_bytes: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
            start = weight_ptr + (tile * BLOCK_N).to(tl.int64) * weight_stride + first_k
            count = tl.minimum(BLOCK_N, N - tile * BLOCK_N)
            num_bytes = tl.minimum(PREFETCH, K - first_k) * element_bytes
            prefetch_rows(start, weight_stride * element_bytes, count, num_bytes)
            if MODE == 2:
                prefetch_rows(
                    start + weight_stride.to(tl.int64) * N, weight_stride * element_bytes, count, num_bytes
                )  # fmt: skip
        tl_cuda.gdc_wait()

    while position > begin:
        tile = (position - 1) // STEPS
        first = tile * BLOCK_N
        end = position - tile * STEPS
        start = tl.maximum(begin - tile * STEPS, 0)
        sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        up_sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        more_sums = tl.zeros((BLOCK_N, REST), tl.float32)
        more_up_sums = tl.zeros((BLOCK_N, REST), tl.float32)
        for step in range(start, end):
            weight = weight_desc.load([first, step * BLOCK_K])
            x = x_desc.load([0, step * BLOCK_K]).trans()
            sums = tl.dot(weight, x, sums, input_precision="ieee")
            if MORE > 0:
                more = more_desc.load([ROWS, step * BLOCK_K]).trans()
                more_sums = tl.dot(weight, more, more_sums, input_precision="ieee")
            if MODE == 2:
                up = weight_desc.load([first + N, step * BLOCK_K])
                up_sums = tl.dot(up, x, up_sums, input_precision="ieee")
                if MORE > 0:
                    more_up_sums = tl.dot(up, more, more_up_sums, input_precision="ieee")

        if end < STEPS:
            own = partial_ptr + program * PARTIALS
            _leave(sums, up_sums, own, BLOCK_N, ROWS, MODE)
            if MORE > 0:
                _leave(more_sums, more_up_sums, own + PARTIALS // (ROWS + MORE) * ROWS, BLOCK_N, MORE, MODE)
            # All of the program's stores come before its sign.
            tl.debug_barrier()
            tl.atomic_xchg(ready_ptr + program, 1, sem="release", scope="gpu")
        else:
            # From the program on that the tile begins in.
            for other in range(((tile * STEPS + 1) * PROGRAMS - 1) // TOTAL, program):
                there = tl.atomic_add(ready_ptr + other, 0, sem="acquire", scope="gpu")
                while there == 0:
                    there = tl.atomic_add(ready_ptr + other, 0, sem="acquire", scope="gpu")
                left = partial_ptr + other * PARTIALS
                sums, up_sums = _with_what_was_left(sums, up_sums, left, BLOCK_N, ROWS, MODE)
                if MORE > 0:
                    left += PARTIALS // (ROWS + MORE) * ROWS
                    more_sums, more_up_sums = _with_what_was_left(more_sums, more_up_sums, left, BLOCK_N, MORE, MODE)
                tl.store(ready_ptr + other, 0)
            n = tl.arange(0, BLOCK_N)
            m = tl.arange(0, ROWS)
            finish_tile(sums, up_sums, bias_ptr, out_ptr, out_stride, first, n, m, M, N, MODE)
            if MORE > 0:
                m = ROWS + tl.arange(0, MORE)
                finish_tile(more_sums, more_up_sums, bias_ptr, out_ptr, out_stride, first, n, m, M, N, MODE)
        position = tile * STEPS + start


@triton.jit
def _leave(sums, up_sums, pointer, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, MODE: tl.constexpr):
    """Writes sums for whoever finishes their tile."""
    pointers = pointer + tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(pointers, sums)
    if MODE == 2:
        tl.store(pointers + BLOCK_N * ROWS, up_sums)


@triton.jit
def _with_what_was_left(sums, up_sums, pointer, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, MODE: tl.constexpr):
    """Sums with what `_leave` wrote, read past the L1 cache, which may hold what lay there before."""
    pointers = pointer + tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    sums += tl.load(pointers, cache_modifier=".cg")
    if MODE == 2:
        up_sums += tl.load(pointers + BLOCK_N * ROWS, cache_modifier=".cg")
    return sums, up_sums
