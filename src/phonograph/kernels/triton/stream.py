"""What a step of a large model does between two attention launches, in one launch: for up to 64 rows, on Hopper.

The products are those of `span`, and so are the barriers between them. There a program holds the weights of its next
product in registers, which is most of a small model's product; here a product takes tens of microseconds, and what is
lost is that memory stands still while programs meet: four launches a layer drain and start again, some 3 us each.

So weights have a warp of their own. It asks the copy engine for tile after tile of a program's share, of one product
after another, into a ring in shared memory, and waits for nothing but room in the ring: 180 KB a multiprocessor, which
is what memory delivers in 5 us. A second warp brings the rows, a tile of them for each tile of weights; it waits at the
barriers. The others multiply. Uneven shares matter little: whoever has more takes more of the bandwidth, whoever has
less is at work on the next product's weights.

A unit is a tile of 64 outputs over a share of the inputs; of gate and up it is a tile of each. Programs that share a
tile wait for one another, and each adds all parts of its share of the rows, in a fixed order. Norms are divided by at
the end of the product that takes them, as in `span`.

Everything that a program waits for comes from programs that are on the device: see `span`. Written in Gluon, Triton's
language for warps with different work, which its interpreter does not run: without a Hopper GPU tests compile it, and
run it on threads (`tests/support/gluon_on_threads.py`).

Shapes: as in `span`.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportRedeclaration=false
from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from phonograph.kernels.triton.hopper import (
    before,
    behind,
    let_next_kernel_start,
    make_barriers,
    order_for_copy_engine,
    wait_for_kernel_before,
    wait_for_other_sign,
)
from phonograph.kernels.triton.linear import LinearScratch
from phonograph.kernels.triton.pdl import pdl_usable
from phonograph.kernels.triton.span_plan import (
    STREAM_TILE,
    SpanSizes,
    StreamConfig,
    make_stream_plan,
    num_products,
    plan_value,
    product_value,
)

_TILE = gl.constexpr(STREAM_TILE)
_WARPS = gl.constexpr(4)


def run_stream(
    matrices: list[torch.Tensor],
    biases: tuple[torch.Tensor | None, ...],
    norms: tuple[torch.Tensor | None, ...],
    rows: tuple[torch.Tensor, ...],
    eps: float,
    *,
    scratch: LinearScratch,
    config: StreamConfig,
    num_programs: int,
) -> None:
    """What `span.run_span` does, in this way.

    Args:
        matrices: O, gate and up, down and, but for the last layer, QKV; bfloat16, rows at multiples of 16 bytes
        biases: of the four; norms: the weights of the two
        rows: attended, hidden, normed, inner, qkv; at most `config.rows`, the inputs at multiples of 16 bytes
        num_programs: all of which the device runs at once
    """
    attended, hidden, normed, inner, qkv = rows
    sizes = SpanSizes(*(one.shape[1] for one in (attended, hidden, inner, qkv)))
    plan = make_stream_plan(sizes, config, last=len(matrices) == 3)
    assert len(hidden) <= config.rows and hidden.dtype == torch.bfloat16
    # A program must not wait for its own next unit.
    assert max(config.splits) <= num_programs, "as many programs as share a tile"
    assert plan.num_partials <= scratch.partials.numel() and plan.num_squares <= scratch.squares.numel()
    weight_layout, row_layout = (
        gl.NVMMASharedLayout.get_default_for([height, config.block_k], gl.bfloat16)
        for height in (STREAM_TILE, config.rows)
    )
    weights = [TensorDescriptor.from_tensor(one, [STREAM_TILE, config.block_k], weight_layout) for one in matrices]
    inputs = [
        TensorDescriptor.from_tensor(one, [config.rows, config.block_k], row_layout)
        for one in (attended, normed, inner)
    ]
    pdl = pdl_usable()
    _stream_kernel[(num_programs,)](
        # Of the last layer nothing reads the fourth.
        *weights,
        *weights[: 4 - len(weights)],
        *inputs,
        (hidden, normed, inner, qkv),
        tuple(one.stride(0) for one in (hidden, normed, inner, qkv)),
        biases,
        norms,
        scratch.squares,
        scratch.barrier,
        scratch.partials,
        scratch.signs,
        len(hidden),
        eps,
        PLAN=plan,
        PROGRAMS=num_programs,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=_WARPS.value,
        # Of each thread before the warps that multiply take over what the others leave.
        maxnreg=128,
    )


@gluon.jit
def _arrival(number, COUNT: gl.constexpr):
    """Of one of COUNT: 2^31 in all, so that the last one turns the counter's sign (see `span`)."""
    return gl.where(number == 0, 0x7FFFFFFF - (COUNT - 2), 1)


@gluon.jit
def _arrive(barrier_ptr, PROGRAMS: gl.constexpr):
    """Lets the others know that all that the program has written is there."""
    order_for_copy_engine()
    gl.thread_barrier()
    gl.atomic_add(barrier_ptr, _arrival(gl.program_id(0), PROGRAMS), sem="release", scope="gpu")


@gluon.jit
def _share(unit, PLAN: gl.constexpr, PRODUCT: gl.constexpr):
    """Of a unit its tile, which part of the inputs, and that part's first step and the one behind its last."""
    splits: gl.constexpr = product_value(PLAN, PRODUCT, "splits")
    steps: gl.constexpr = product_value(PLAN, PRODUCT, "steps")
    part = unit % splits
    return unit // splits, part, part * steps // splits, (part + 1) * steps // splits


@gluon.jit
def _load_product(
    descriptor,
    ring,
    full,
    empty,
    place,
    PLAN: gl.constexpr,
    PRODUCT: gl.constexpr,
    PROGRAMS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Has the copy engine bring the program's tiles of weights (or of rows, where ROWS) in the order of their use."""
    STAGES: gl.constexpr = ring.type.shape[0]
    block_k: gl.constexpr = ring.type.shape[2]
    # The ups follow the gates.
    HALVES: gl.constexpr = 2 if PRODUCT == 1 and not ROWS else 1
    APART: gl.constexpr = product_value(PLAN, PRODUCT, "outputs")
    at, turn = place
    for unit in range(gl.program_id(0), product_value(PLAN, PRODUCT, "units"), PROGRAMS):
        tile, _, first, end = _share(unit, PLAN, PRODUCT)
        for step in range(first, end):
            for half in gl.static_range(HALVES):
                row = 0 if ROWS else tile * _TILE + half * APART
                mbarrier.wait(empty.index(at), turn ^ 1)
                mbarrier.expect(full.index(at), descriptor.block_type.nbytes)
                tma.async_copy_global_to_shared(descriptor, [row, step * block_k], full.index(at), ring.index(at))
                at, turn = behind(at, turn, STAGES)
    return at, turn


@gluon.jit
def _load_weights(descriptors, ring, full, empty, PLAN: gl.constexpr, PROGRAMS: gl.constexpr):
    place = (0, 0)
    for product in gl.static_range(num_products(PLAN)):
        place = _load_product(descriptors[product], ring, full, empty, place, PLAN, product, PROGRAMS, False)


@gluon.jit
def _load_rows(
    descriptors, ring, full, empty, ready, known, PLAN: gl.constexpr, PROGRAMS: gl.constexpr, PDL: gl.constexpr
):
    place = (0, 0)
    # The copy engine reads a descriptor when it first meets it, which is better done now than behind each barrier. What
    # it brings is of no use.
    mbarrier.expect(known, 3 * descriptors[0].block_type.nbytes)
    for source in gl.static_range(3):
        tma.async_copy_global_to_shared(descriptors[source], [0, 0], known, ring.index(0))
    mbarrier.wait(known, 0)
    if PDL:
        wait_for_kernel_before()
    for product in gl.static_range(num_products(PLAN)):
        # One for each product: a program without units could run ahead, and a parity would be missed.
        if product > 0:
            mbarrier.wait(ready.index(product - 1), 0)
        order_for_copy_engine()
        source = descriptors[1 if product == 3 else product]
        place = _load_product(source, ring, full, empty, place, PLAN, product, PROGRAMS, True)


@gluon.jit
def _multiply(rings, places, first, end, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """A unit's sums [tile, rows], and of gates those of their ups; where it leaves the rings.

    A product is under way while the next tile is waited for, and places are free once the product behind it has begun.
    """
    weights, weights_full, weights_empty, rows, rows_full, rows_empty = rings
    at, turn, row_at, row_turn = places
    shape: gl.constexpr = [weights.type.shape[1], rows.type.shape[1]]
    sums = warpgroup_mma_init(gl.zeros(shape, gl.float32, LAYOUT))
    ups = warpgroup_mma_init(gl.zeros(shape, gl.float32, LAYOUT))
    for step in range(first, end):
        row_read = before(row_at, rows.type.shape[0])
        mbarrier.wait(rows_full.index(row_at), row_turn)
        x = rows.index(row_at).permute((1, 0))
        for half in gl.static_range(1 + GATED):
            mbarrier.wait(weights_full.index(at), turn)
            if half == 1 or not GATED:
                sums = warpgroup_mma_init(warpgroup_mma_wait(0, deps=(sums,)))
            else:
                ups = warpgroup_mma_init(warpgroup_mma_wait(0, deps=(ups,)))
            if half == 0:
                sums = warpgroup_mma(weights.index(at), x, sums, is_async=True)
            else:
                ups = warpgroup_mma(weights.index(at), x, ups, is_async=True)
            # All warps have waited for what is before it.
            gl.thread_barrier()
            read = before(at, weights.type.shape[0])
            mbarrier.arrive(weights_empty.index(read), count=1, pred=(step > first) | (half > 0))
            if half == 0:
                mbarrier.arrive(rows_empty.index(row_read), count=1, pred=step > first)
            at, turn = behind(at, turn, weights.type.shape[0])
        row_at, row_turn = behind(row_at, row_turn, rows.type.shape[0])
    sums = warpgroup_mma_wait(0, deps=(sums,))
    ups = warpgroup_mma_wait(0, deps=(ups,))
    gl.thread_barrier()
    mbarrier.arrive(weights_empty.index(before(at, weights.type.shape[0])), count=1)
    mbarrier.arrive(rows_empty.index(before(row_at, rows.type.shape[0])), count=1)
    return sums, ups, (at, turn, row_at, row_turn)


@gluon.jit
def _finish(
    sums,
    ups,
    first_output,
    first_row,
    residual,
    tensors,
    M,
    eps,
    PLAN: gl.constexpr,
    PRODUCT: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """What comes behind the sums [tile, r] of r rows, and is written. ups: of gates."""
    row_ptrs, row_strides, bias_ptrs, norm_ptrs, squares_ptr, barrier_ptr, partials_ptr, counters_ptr = tensors
    TARGET: gl.constexpr = _target(PRODUCT)
    bias_ptr, norm_ptr = bias_ptrs[PRODUCT], norm_ptrs[PRODUCT // 2]
    ADD: gl.constexpr = PRODUCT % 2 == 0
    GATED: gl.constexpr = PRODUCT == 1
    N: gl.constexpr = product_value(PLAN, PRODUCT, "outputs")
    ROWS: gl.constexpr = plan_value(PLAN, "rows")
    n, m, mask = _places(first_output, first_row, M, PLAN, PRODUCT, sums.shape[1], LAYOUT)
    if not ADD:
        factor = _norm_factor(first_row, squares_ptr, eps, PLAN, PRODUCT, sums.shape[1])
        factor = gl.convert_layout(factor, gl.SliceLayout(0, LAYOUT))[None, :]
        sums *= factor
        if GATED:
            ups *= factor
    if bias_ptr is not None:
        sums += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        if GATED:
            ups += gl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    if ADD:
        sums += residual.to(gl.float32)
    if GATED:
        sums = sums / (1.0 + gl.exp(-sums)) * ups
    rounded = sums.to(gl.bfloat16)
    gl.store(_pointers(row_ptrs[TARGET], row_strides[TARGET], m, n), rounded, mask=mask)
    if ADD and num_products(PLAN) > PRODUCT + 1:
        value = gl.where(mask, rounded.to(gl.float32), 0.0)
        gl.store(squares_ptr + first_output // _TILE * ROWS + m, gl.sum(value * value, 0))
        value *= gl.load(norm_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        gl.store(_pointers(row_ptrs[1], row_strides[1], m, n), value.to(gl.bfloat16), mask=mask)


@gluon.jit
def _places(
    first_output, first_row, M, PLAN: gl.constexpr, PRODUCT: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr
):
    """Outputs, rows, and whether both are there."""
    n = first_output + gl.arange(0, _TILE, layout=gl.SliceLayout(1, LAYOUT))
    m = first_row + gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    return n, m, (n < product_value(PLAN, PRODUCT, "outputs"))[:, None] & (m < M)[None, :]


@gluon.constexpr_function
def _target(product):
    """Of hidden, normed, inner and qkv, what a product writes."""
    return 0 if product % 2 == 0 else product // 2 + 2


@gluon.jit
def _pointers(rows_ptr, stride, m, n):
    """To outputs n of rows m, [n, m]."""
    return rows_ptr + m.to(gl.int64)[None, :] * stride + n[:, None]


@gluon.jit
def _residual(
    tensors,
    first_output,
    first_row,
    M,
    PLAN: gl.constexpr,
    PRODUCT: gl.constexpr,
    COUNT: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    n, m, mask = _places(first_output, first_row, M, PLAN, PRODUCT, COUNT, LAYOUT)
    return gl.load(_pointers(tensors[0][0], tensors[1][0], m, n), mask=mask, other=0.0, cache_modifier=".cg")


@gluon.jit
def _add_parts(part_ptrs, SPLITS: gl.constexpr, APART: gl.constexpr):
    sums = gl.load(part_ptrs, cache_modifier=".cg")
    for other in gl.static_range(1, SPLITS):
        sums += gl.load(part_ptrs + other * APART, cache_modifier=".cg")
    return sums


@gluon.jit
def _norm_factor(first_row, squares_ptr, eps, PLAN: gl.constexpr, PRODUCT: gl.constexpr, COUNT: gl.constexpr):
    """One over the root mean square of each of the rows."""
    ROWS: gl.constexpr = plan_value(PLAN, "rows")
    tiles: gl.constexpr = product_value(PLAN, PRODUCT - 1, "tiles")
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [_WARPS, 1], [1, 0])
    tile = gl.arange(0, triton.next_power_of_2(tiles), layout=gl.SliceLayout(1, LAYOUT))[:, None]
    m = first_row + gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    squares = gl.load(squares_ptr + tile * ROWS + m, mask=(tile < tiles) & (m < ROWS), other=0.0, cache_modifier=".cg")
    return gl.rsqrt(gl.sum(squares, 0) / product_value(PLAN, PRODUCT, "inputs") + eps)


@gluon.jit
def _run_product(
    rings,
    places,
    ready,
    tensors,
    M,
    eps,
    PLAN: gl.constexpr,
    PRODUCT: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Waits for its input, multiplies, and arrives at the barrier behind it."""
    row_ptrs, row_strides, bias_ptrs, norm_ptrs, squares_ptr, barrier_ptr, partials_ptr, counters_ptr = tensors
    # O and down add to the residual stream and leave a norm, gate-up and QKV take one.
    ADD: gl.constexpr = PRODUCT % 2 == 0
    GATED: gl.constexpr = PRODUCT == 1
    splits: gl.constexpr = product_value(PLAN, PRODUCT, "splits")
    ROWS: gl.constexpr = plan_value(PLAN, "rows")
    COUNT: gl.constexpr = ROWS // splits
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[_WARPS, 1], instr_shape=[16, ROWS, 16])
    # Outputs lie in a row in memory.
    BLOCKED: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, _WARPS], [0, 1])
    LAYOUT: gl.constexpr = MMA if splits == 1 else BLOCKED
    if PRODUCT > 0:
        wait_for_other_sign(barrier_ptr, 0 if PRODUCT % 2 == 1 else -1)
        mbarrier.arrive(ready.index(PRODUCT - 1), count=1)
    for unit in range(gl.program_id(0), product_value(PLAN, PRODUCT, "units"), PROGRAMS):
        tile, part, first, end = _share(unit, PLAN, PRODUCT)
        first_output, first_row = tile * _TILE, part * COUNT
        residual = 0.0
        if ADD:
            residual = _residual(tensors, first_output, first_row, M, PLAN, PRODUCT, COUNT, LAYOUT)
        sums, ups, places = _multiply(rings, places, first, end, GATED, MMA)
        if splits > 1:
            # Each adds the parts of its share of the rows, always in the same order.
            plane: gl.constexpr = _TILE * ROWS
            apart: gl.constexpr = plane * (1 + GATED)
            tile_ptr = partials_ptr + tile * (splits * apart)
            output = gl.arange(0, _TILE, layout=gl.SliceLayout(1, MMA))[:, None]
            row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA))[None, :]
            own_ptrs = tile_ptr + part * apart + row * _TILE + output
            gl.store(own_ptrs, sums)
            if GATED:
                gl.store(own_ptrs + plane, ups)
            gl.thread_barrier()
            # Of a tile's programs too the last one turns the sign; what it was is known to who arrives.
            known = gl.atomic_add(counters_ptr + tile, _arrival(part, splits), sem="acq_rel", scope="gpu")
            wait_for_other_sign(counters_ptr + tile, known)
            output = gl.arange(0, _TILE, layout=gl.SliceLayout(1, BLOCKED))[:, None]
            row = first_row + gl.arange(0, COUNT, layout=gl.SliceLayout(0, BLOCKED))[None, :]
            part_ptrs = tile_ptr + row * _TILE + output
            sums = _add_parts(part_ptrs, splits, apart)
            ups = sums
            if GATED:
                ups = _add_parts(part_ptrs + plane, splits, apart)
        _finish(sums, ups, first_output, first_row, residual, tensors, M, eps, PLAN, PRODUCT, LAYOUT)
    if num_products(PLAN) > PRODUCT + 1:
        _arrive(barrier_ptr, PROGRAMS)
    return places


@gluon.jit
def _run(rings, ready, tensors, M, eps, PLAN: gl.constexpr, PROGRAMS: gl.constexpr, PDL: gl.constexpr):
    """What those warps do that multiply."""
    if PDL:
        wait_for_kernel_before()
    places = (0, 0, 0, 0)
    for product in gl.static_range(num_products(PLAN)):
        places = _run_product(rings, places, ready, tensors, M, eps, PLAN, product, PROGRAMS)
    if num_products(PLAN) == 4:
        # An odd number of turns so far. No one waits for this one.
        gl.atomic_add(tensors[5], _arrival(gl.program_id(0), PROGRAMS), sem="relaxed", scope="gpu")


@gluon.jit(do_not_specialize=["M"])
def _stream_kernel(
    output_weights,
    gate_up_weights,
    down_weights,
    qkv_weights,
    attended,
    normed,
    inner,
    row_ptrs,
    row_strides,
    bias_ptrs,
    norm_ptrs,
    squares_ptr,
    barrier_ptr,
    partials_ptr,
    counters_ptr,
    M,
    eps,
    PLAN: gl.constexpr,
    PROGRAMS: gl.constexpr,
    PDL: gl.constexpr,
):
    """row_ptrs: hidden, normed, inner, qkv; descriptors of what the copy engine reads."""
    if PDL:
        let_next_kernel_start()
    W: gl.constexpr = plan_value(PLAN, "weight_stages")
    X: gl.constexpr = plan_value(PLAN, "row_stages")
    block_k: gl.constexpr = output_weights.block_type.shape[1]
    weights = gl.allocate_shared_memory(
        gl.bfloat16, [W, output_weights.block_type.shape[0], block_k], output_weights.layout
    )
    rows = gl.allocate_shared_memory(gl.bfloat16, [X, attended.block_type.shape[0], block_k], attended.layout)
    weights_full, weights_empty = make_barriers(W, 1), make_barriers(W, 1)
    rows_full, rows_empty = make_barriers(X, 1), make_barriers(X, 1)
    ready, known = make_barriers(3, 1), make_barriers(1, 1)
    fence_async_shared()
    rings = (weights, weights_full, weights_empty, rows, rows_full, rows_empty)
    tensors = (row_ptrs, row_strides, bias_ptrs, norm_ptrs, squares_ptr, barrier_ptr, partials_ptr, counters_ptr)
    matrices = (output_weights, gate_up_weights, down_weights, qkv_weights)
    gl.warp_specialize(
        [
            (_run, (rings, ready, tensors, M, eps, PLAN, PROGRAMS, PDL)),
            (_load_weights, (matrices, weights, weights_full, weights_empty, PLAN, PROGRAMS)),
            (
                _load_rows,
                ((attended, normed, inner), rows, rows_full, rows_empty, ready, known.index(0), PLAN, PROGRAMS, PDL),
            ),
        ],
        [1, 1],
        [24, 24],
    )
