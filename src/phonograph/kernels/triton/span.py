"""What a step of a small model does between two attention launches, in one launch: for up to 16 rows.

The attention's output goes through four products: O, added into the residual stream; gate and up, with the activation;
down, added; the next layer's QKV. In a small model each is over before memory has got going: an H200 reads a layer's
weights in a third of the time that four launches take, each of which drains, starts, asks for its input and adds its
parts. Here the programs stay, one a multiprocessor, and meet at a barrier after each product. While a program waits
there, the weights of its next product are on their way into its registers.

Whoever waits at a barrier keeps its multiprocessor, so all programs must be on the device at once, and they are: a
multiprocessor has room for one when the kernels before have left it, which they do without waiting for this one; and
the kernel behind starts only when all programs of this one have begun, since each lets it start with its first
instruction. What must not be is two such kernels on two streams at a time.

The barrier's counter is zero when a launch begins and when it has ended. Arrivals at a barrier add up to 2^31, so the
last one turns the counter's sign and leaves the other bits zero. Nothing has to be reset, and where the number of
barriers is odd, a last arrival that no one waits for turns the sign back. What was written before a barrier is read
past the L1 cache behind it.

Within a product:
- A program sums over all inputs of its few outputs, so that nothing is added over programs. Its inputs are dealt to its
  warps: a tile is a batch of products, one or more for each warp, which are added at the end.
- Operands go from memory to the tensor cores with no exchange between threads. Those want a thread to hold pairs of
  columns that lie eight apart, memory wants it to read 16 bytes in a row; but to a sum over columns their order does
  not matter, so each thread gives the eight that it read for those that are expected of it, of the rows and of the
  weights alike. The side of 16 of the tensor cores' tile is for the weights, the side of 8 for the rows; where a tile
  has eight rows of weights it is the other way round.
- Norms have no kernel either: the product that makes a row leaves it times the norm's weights, and the sums of its
  squares by tile, and the product that takes it divides by the root mean square at its end (as in `linear`).

Shapes: M rows, E hidden size, Q attention outputs, I intermediate size, F outputs of QKV; of a product N outputs and K
inputs. Weights lie [outputs, inputs], rows contiguous. Sums are float32.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from phonograph.kernels.triton.linear import LinearScratch
from phonograph.kernels.triton.pdl import pdl_usable
from phonograph.kernels.triton.signs import UNTIL_OTHER_SIGN
from phonograph.kernels.triton.span_plan import (
    SpanConfig,
    SpanSizes,
    StreamConfig,
    asked_until,
    make_plan,
    num_products,
    plan_value,
    product_of,
    product_value,
)


class SpanWeights(NamedTuple):
    """From a layer's O to the next layer's QKV; after the last layer next_norm and qkv are None."""

    output_EQ: torch.Tensor
    output_bias_E: torch.Tensor | None
    mlp_norm_E: torch.Tensor
    gate_up_2IE: torch.Tensor
    gate_up_bias_2I: torch.Tensor | None
    down_EI: torch.Tensor
    down_bias_E: torch.Tensor | None
    next_norm_E: torch.Tensor | None
    qkv_FE: torch.Tensor | None
    qkv_bias_F: torch.Tensor | None


def run_span(
    weights: SpanWeights,
    attended_MQ: torch.Tensor,
    hidden_ME: torch.Tensor,
    normed_ME: torch.Tensor,
    inner_MI: torch.Tensor,
    qkv_MF: torch.Tensor,
    eps: float,
    *,
    scratch: LinearScratch,
    config: SpanConfig | StreamConfig,
    num_programs: int | None = None,
) -> None:
    """hidden += O(attended); inner = silu(gate) * up of its norm; hidden += down(inner); qkv = QKV of its next norm.

    `normed` is for norms on their way; `qkv` is left alone after the last layer. `qkv` and `attended` may overlap
    `inner`. num_programs: by default, and at most, one for each multiprocessor.
    """
    rows = (attended_MQ, hidden_ME, normed_ME, inner_MI, qkv_MF)
    matrices = [weights.output_EQ, weights.gate_up_2IE, weights.down_EI]
    if weights.qkv_FE is not None:
        matrices.append(weights.qkv_FE)
    processors = _num_processors(hidden_ME.device)
    num_programs = num_programs or processors
    assert num_programs <= processors, "programs that wait for one another must all be on the device"
    biases = weights.output_bias_E, weights.gate_up_bias_2I, weights.down_bias_E, weights.qkv_bias_F
    norms = weights.mlp_norm_E, weights.next_norm_E
    if isinstance(config, StreamConfig):
        # Here, since it imports what not every Triton has.
        from phonograph.kernels.triton.stream import run_stream

        run_stream(matrices, biases, norms, rows, eps, scratch=scratch, config=config, num_programs=num_programs)
        return
    sizes = SpanSizes(*(one.shape[1] for one in (attended_MQ, hidden_ME, inner_MI, qkv_MF)))
    plan = make_plan(sizes, config, num_programs, last=weights.qkv_FE is None)
    assert len(hidden_ME) <= config.rows and all(one.stride(1) == 1 for one in (*matrices, *rows))
    assert max(plan.products[0].tiles, plan.products[2].tiles) * config.rows <= scratch.squares.numel()
    pdl = pdl_usable()
    _span_kernel[(num_programs,)](
        rows,
        tuple(one.stride(0) for one in rows),
        tuple(matrices),
        tuple(one.stride(0) for one in matrices),
        biases,
        norms,
        scratch.squares,
        scratch.barrier,
        len(hidden_ME),
        eps,
        PLAN=plan,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=config.num_warps,
    )


@functools.cache
def _num_processors(device: torch.device) -> int:
    """Programs that are on the device at once; the interpreter runs one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _own_tiles(PLAN: tl.constexpr, PRODUCT: tl.constexpr):
    """The program's first tile and the one behind its last: neighbours, so that their outputs are contiguous."""
    tiles: tl.constexpr = product_value(PLAN, PRODUCT, "tiles")
    programs: tl.constexpr = plan_value(PLAN, "num_programs")
    program = tl.program_id(0)
    return program * tiles // programs, (program + 1) * tiles // programs


@triton.jit
def _read(row_ptrs, valid_rows, start: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, CACHE: tl.constexpr):
    """Columns from `start` of the rows [8, r], as [8, block_k / 32, r, 32]: four threads read 64 bytes of a row, eight
    rows go to a warp, and the warps take turns. (The order of the dimensions is what makes the compiler do so.)"""
    column = start + tl.arange(0, BLOCK_K // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = valid_rows[:, None, :, None]
    if start + BLOCK_K > K:
        mask = mask & (column < K)[None, :, None, :]
    return tl.load(row_ptrs[:, None, :, None] + column[None, :, None, :], mask, other=0.0, cache_modifier=CACHE)


@triton.jit
def _read_weights(weight_ptrs, weight_strides, PLAN: tl.constexpr, PIECE: tl.constexpr):
    """A step's columns of a tile's rows of weights, in eights: of gate and up the ups follow the gates."""
    product: tl.constexpr = product_of(PLAN, PIECE)
    steps: tl.constexpr = product_value(PLAN, product, "steps")
    block_n: tl.constexpr = product_value(PLAN, product, "block_n")
    block_k: tl.constexpr = product_value(PLAN, product, "block_k")
    N: tl.constexpr = product_value(PLAN, product, "outputs")
    at: tl.constexpr = PIECE - product_value(PLAN, product, "first")
    eights: tl.constexpr = block_n // 8
    first, end = _own_tiles(PLAN, product)
    eight = tl.arange(0, 2 * eights if product == 1 else eights)[None, :]
    row = (first + at // steps) * block_n + tl.arange(0, 8)[:, None] + eight % eights * 8
    valid = row < tl.minimum(end * block_n, N)
    row_ptrs = weight_ptrs[product] + (row + eight // eights * N).to(tl.int64) * weight_strides[product]
    return _read(row_ptrs, valid, at % steps * block_k, product_value(PLAN, product, "inputs"), block_k, "")


@triton.jit
def _ask(weights, weight_ptrs, weight_strides, PLAN: tl.constexpr, UNTIL: tl.constexpr):
    """`weights`, the pieces asked for so far, and those up to UNTIL."""
    for piece in tl.static_range(len(weights), UNTIL):
        weights += (_read_weights(weight_ptrs, weight_strides, PLAN, piece),)
    return weights


@triton.jit
def _deal(tile, BATCH: tl.constexpr, WIDTH: tl.constexpr):
    """What `_read` returned, as [batch, 8 r, k]. Of 32 columns each thread has eight in a row; they become those
    groups of `WIDTH` that it has in the tensor cores' operand."""
    steps: tl.constexpr = tile.shape[1] // BATCH
    r: tl.constexpr = tile.shape[2]
    tile = tl.reshape(tile, (8, steps, BATCH, r, 4, 8 // WIDTH, WIDTH))
    return tl.reshape(tl.permute(tile, (2, 3, 0, 1, 5, 4, 6)), (BATCH, 8 * r, steps * 32))


@triton.jit
def _add_products(sums, weight, x, BATCH: tl.constexpr):
    """sums + weight x^T, [batch, weight rows, rows]; with eight rows of weights sums + x weight^T, [batch, 16, 8]."""
    if weight.shape[2] > 1:
        left = _deal(weight, BATCH, 2)
        right = _deal(x, BATCH, 2)
    elif x.shape[2] == 2:
        left = _deal(x, BATCH, 2)
        right = _deal(weight, BATCH, 2)
    else:
        left = _deal(x, BATCH, 4)
        left = tl.permute(tl.join(left, tl.zeros_like(left)), (0, 3, 1, 2))
        left = tl.reshape(left, (BATCH, 16, left.shape[3]))
        right = _deal(weight, BATCH, 4)
    return tl.dot(left, tl.permute(right, (0, 2, 1)), sums, input_precision="ieee")


@triton.jit
def _add_own(sums, ROWS: tl.constexpr, WARPS: tl.constexpr, EIGHT: tl.constexpr):
    """The sums that a warp keeps, added: [warps, weight rows, rows]; with eight rows of weights [warps, rows, 8]."""
    if EIGHT and ROWS == 8:
        sums, _ = tl.split(tl.permute(tl.reshape(sums, (sums.shape[0], 2, 8, 8)), (0, 2, 3, 1)))
    own: tl.constexpr = sums.shape[0] // WARPS
    if own > 1:
        sums = tl.sum(tl.reshape(sums, (own, WARPS, sums.shape[1], sums.shape[2])), 0)
    return sums


@triton.jit
def _add_halves(x):
    """[n, w] added over w, a power of two.

    Where the values of a sum lie in different warps, Triton's own passes them through shared memory a few at a time,
    each read waiting for the write before it, and leaves a copy of the result in each warp: 9,000 cycles for 512 sums
    of eight. A split wants its pair in one thread. So here all values of a sum come to one thread in a single exchange,
    some 400 cycles for those, and the sums are dealt out over all threads.
    """
    if x.shape[1] > 1:
        left, right = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        total = _add_halves(left + right)
    else:
        total = tl.reshape(x, (x.shape[0],))
    return total


@triton.jit
def _add_warps(sums, TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PAIRS: tl.constexpr):
    """Of `TILES` (1, 2 or 4) tiles what `_add_own` returned, added over the warps: [rows, outputs], of pairs [rows,
    outputs, 2]. All in one exchange, since each takes its time. Where tiles are missing the last one stands in."""
    last: tl.constexpr = len(sums) - 1
    if TILES == 1:
        total = sums[0]
    elif TILES == 2:
        total = tl.permute(tl.join(sums[0], sums[last]), (0, 3, 1, 2))
    else:
        pairs = tl.join(sums[0], sums[min(1, last)]), tl.join(sums[min(2, last)], sums[last])
        total = tl.permute(tl.join(pairs[0], pairs[1]), (0, 4, 3, 1, 2))
    warps: tl.constexpr = sums[0].shape[0]
    total = _add_halves(tl.permute(tl.reshape(total, (warps, total.numel // warps)), (1, 0)))
    total = tl.reshape(total, (TILES, sums[0].shape[1], sums[0].shape[2]))
    if BLOCK_N == 8 and not PAIRS:
        total = tl.permute(total, (1, 0, 2))
    else:
        total = tl.permute(tl.reshape(total, (TILES, 1 + PAIRS, BLOCK_N, ROWS)), (3, 0, 2, 1))
    return tl.reshape(total, (ROWS, TILES * BLOCK_N, 2) if PAIRS else (ROWS, TILES * BLOCK_N))


@triton.jit
def _add_tiles(squares, WARPS: tl.constexpr):
    """[tiles, rows] added over the tiles."""
    if squares.shape[0] >= WARPS:
        squares = tl.sum(tl.reshape(squares, (WARPS, squares.shape[0] // WARPS, squares.shape[1])), 1)
    return _add_halves(tl.permute(squares, (1, 0)))


@triton.jit
def _arrive(barrier_ptr, PROGRAMS: tl.constexpr):
    """Lets the others know that all that the program has written is there."""
    tl.debug_barrier()
    tl.atomic_add(barrier_ptr, _arrival(PROGRAMS), sem="release", scope="gpu")


@triton.jit
def _arrival(PROGRAMS: tl.constexpr):
    """2^31 in all."""
    return tl.where(tl.program_id(0) == 0, 0x7FFFFFFF - (PROGRAMS - 2), 1)


@triton.jit
def _wait(barrier_ptr, TURNED: tl.constexpr):
    """Waits until the counter's sign is set (or is not). One thread asks; what it saw holds for all behind the
    program's own barrier."""
    tl.inline_asm_elementwise(
        UNTIL_OTHER_SIGN,
        "=r,l,r",
        [barrier_ptr, 0 if TURNED else -1],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


@triton.jit
def _run_product(
    weights,
    row_ptrs,
    row_strides,
    weight_ptrs,
    weight_strides,
    bias_ptrs,
    norm_ptrs,
    squares_ptr,
    barrier_ptr,
    M,
    eps,
    PLAN: tl.constexpr,
    PRODUCT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Waits for its input, multiplies, and arrives at the barrier behind it; returns `weights` with the next ones."""
    # O and down add to the residual stream and leave a norm, gate-up (in pairs) and QKV take one.
    ADD: tl.constexpr = PRODUCT % 2 == 0
    PAIRS: tl.constexpr = PRODUCT == 1
    SOURCE: tl.constexpr = 2 if PRODUCT % 2 == 1 else 3 * PRODUCT // 2
    TARGET: tl.constexpr = 1 if PRODUCT % 2 == 0 else 2 + (PRODUCT + 1) // 2
    N: tl.constexpr = product_value(PLAN, PRODUCT, "outputs")
    K: tl.constexpr = product_value(PLAN, PRODUCT, "inputs")
    block_n: tl.constexpr = product_value(PLAN, PRODUCT, "block_n")
    block_k: tl.constexpr = product_value(PLAN, PRODUCT, "block_k")
    batch: tl.constexpr = product_value(PLAN, PRODUCT, "batch")
    rounds: tl.constexpr = product_value(PLAN, PRODUCT, "rounds")
    steps: tl.constexpr = product_value(PLAN, PRODUCT, "steps")
    held: tl.constexpr = product_value(PLAN, PRODUCT, "held")
    first_piece: tl.constexpr = product_value(PLAN, PRODUCT, "first")
    pieces: tl.constexpr = rounds * steps
    ROWS: tl.constexpr = plan_value(PLAN, "rows")
    WARPS: tl.constexpr = plan_value(PLAN, "num_warps")
    PROGRAMS: tl.constexpr = plan_value(PLAN, "num_programs")
    EIGHT: tl.constexpr = block_n == 8 and not PAIRS
    # Tiles whose sums are added together at the end.
    GROUP: tl.constexpr = min(4, triton.next_power_of_2(rounds))
    groups: tl.constexpr = (rounds + GROUP - 1) // GROUP
    first, end = _own_tiles(PLAN, PRODUCT)
    end_n = tl.minimum(end * block_n, N)
    m = tl.arange(0, ROWS)
    n = first * block_n + tl.arange(0, GROUP * block_n)
    x_row = tl.arange(0, 8)[:, None] + 8 * tl.arange(0, ROWS // 8)[None, :]
    x_ptrs = row_ptrs[SOURCE] + x_row.to(tl.int64) * row_strides[SOURCE]
    out_ptrs = row_ptrs[TARGET] + m.to(tl.int64)[:, None] * row_strides[TARGET] + n[None, :]
    bias_ptr = bias_ptrs[PRODUCT]
    norm_ptr = norm_ptrs[PRODUCT // 2] if ADD else None

    biases = ()
    up_biases = ()
    norms = ()
    for group in tl.static_range(groups):
        column = n + group * GROUP * block_n
        if bias_ptr is not None:
            biases += (tl.load(bias_ptr + column, column < end_n, other=0.0),)
            if PAIRS:
                up_biases += (tl.load(bias_ptr + N + column, column < end_n, other=0.0),)
        if norm_ptr is not None:
            norms += (tl.load(norm_ptr + column, column < end_n, other=0.0),)
    if PRODUCT == 0:
        if PDL:
            tl_cuda.gdc_wait()
    elif PROGRAMS > 1:
        _wait(barrier_ptr, PRODUCT % 2 == 1)

    if not ADD:
        square_tiles: tl.constexpr = product_value(PLAN, PRODUCT - 1, "tiles")
        square_tile = tl.arange(0, triton.next_power_of_2(square_tiles))[:, None]
        square_ptrs = squares_ptr + square_tile * ROWS + m[None, :]
        squares = tl.load(square_ptrs, square_tile < square_tiles, other=0.0, cache_modifier=".cg")
    residuals = ()
    if ADD:
        for group in tl.static_range(groups):
            mask = (m < M)[:, None] & (n + group * GROUP * block_n < end_n)[None, :]
            residuals += (tl.load(out_ptrs + group * GROUP * block_n, mask, other=0.0, cache_modifier=".cg"),)
    xs = ()
    for step in tl.static_range(held):
        xs += (_read(x_ptrs, x_row < M, step * block_k, K, block_k, ".cg"),)

    tile_sums = ()
    for at in tl.static_range(pieces):
        if PDL and (
            at == 0 or held < steps or asked_until(PLAN, first_piece + at) > asked_until(PLAN, first_piece + at - 1)
        ):
            # Long done, but the assembler moves no load past it. It would load a few registers at a time otherwise, to
            # do with less of them, and wait for memory each time.
            tl_cuda.gdc_launch_dependents()
        if not ADD and at == 0:
            # While the input is on its way.
            factor = tl.rsqrt(_add_tiles(squares, WARPS) / K + eps)[:, None]
        if at % steps == 0:
            sums = tl.zeros((batch, 16, 8) if EIGHT else (batch, (1 + PAIRS) * block_n, ROWS), tl.float32)
        sums = _add_products(sums, weights[first_piece + at], xs[at % steps if held == steps else at], batch)
        if held < steps and at + held < pieces:
            xs += (_read(x_ptrs, x_row < M, (at + held) % steps * block_k, K, block_k, ".cg"),)
        if at + 1 < pieces:
            weights = _ask(weights, weight_ptrs, weight_strides, PLAN, asked_until(PLAN, first_piece + at + 1))
        if at % steps == steps - 1:
            tile_sums += (_add_own(sums, ROWS, WARPS, EIGHT),)

    for group in tl.static_range(groups):
        result = _add_warps(tile_sums[group * GROUP : (group + 1) * GROUP], GROUP, ROWS, block_n, PAIRS)
        if PAIRS:
            result, up = tl.split(result)
        if not ADD:
            result *= factor
            if PAIRS:
                up *= factor
        if bias_ptr is not None:
            result += biases[group].to(tl.float32)[None, :]
            if PAIRS:
                up += up_biases[group].to(tl.float32)[None, :]
        if ADD:
            result += residuals[group].to(tl.float32)
        if PAIRS:
            result = result * tl.sigmoid(result) * up
        mask = (m < M)[:, None] & (n + group * GROUP * block_n < end_n)[None, :]
        rounded = result.to(row_ptrs[TARGET].dtype.element_ty)
        tl.store(out_ptrs + group * GROUP * block_n, rounded, mask)
        if norm_ptr is not None:
            value = tl.where(mask, rounded.to(tl.float32), 0.0)
            tile = first + group * GROUP + tl.arange(0, GROUP)
            new_squares = tl.sum(tl.reshape(value * value, (ROWS, GROUP, block_n)), 2)
            tl.store(squares_ptr + tile[None, :] * ROWS + m[:, None], new_squares, (tile < end)[None, :])
            value *= norms[group].to(tl.float32)[None, :]
            normed_ptrs = row_ptrs[2] + m.to(tl.int64)[:, None] * row_strides[2] + n[None, :] + group * GROUP * block_n
            tl.store(normed_ptrs, value.to(row_ptrs[2].dtype.element_ty), mask)

    if PROGRAMS > 1 and num_products(PLAN) > PRODUCT + 1:
        _arrive(barrier_ptr, PROGRAMS)
    # Not sooner: an arrival makes sure that all before it is done, loads too.
    return _ask(weights, weight_ptrs, weight_strides, PLAN, asked_until(PLAN, first_piece + pieces))


@triton.jit(do_not_specialize=["M"])
def _span_kernel(
    row_ptrs,
    row_strides,
    weight_ptrs,
    weight_strides,
    bias_ptrs,
    norm_ptrs,
    squares_ptr,
    barrier_ptr,
    M,
    eps,
    PLAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """row_ptrs: attended, hidden, normed, inner, qkv; weight_ptrs: of O, gate and up, down, QKV."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    # Constants of the model: asked for before the wait.
    weights = _ask((), weight_ptrs, weight_strides, PLAN, asked_until(PLAN, 0))
    for product in tl.static_range(num_products(PLAN)):
        weights = _run_product(
            weights,
            row_ptrs,
            row_strides,
            weight_ptrs,
            weight_strides,
            bias_ptrs,
            norm_ptrs,
            squares_ptr,
            barrier_ptr,
            M,
            eps,
            PLAN,
            product,
            PDL,
        )
    if plan_value(PLAN, "num_programs") > 1 and num_products(PLAN) == 4:
        # An odd number of turns so far. No one waits for this one.
        tl.atomic_add(barrier_ptr, _arrival(plan_value(PLAN, "num_programs")), sem="relaxed", scope="gpu")
