"""Matrix products of 1 to 256 rows, where reading the weights takes most of the time.

Library kernels are made for square products: at few rows they leave a fifth of the memory bandwidth unused on narrow
layers, and they cannot begin before the kernel before has ended. `tuning` chooses a kernel by the sizes: `gemv` for one
row, `gemm_small_m` for few, `gemm_ring` for more on Hopper, `gemm_tiled` for the rest, or torch.

Weights are a matrix [outputs, inputs] in the type of the rows, or in groups (`Grouped`). Those have a kernel for few
rows, `gemm_grouped_small_m`, large layers of 4 bits on Hopper `gemm_ring_small_m`, and go through `gemm_ring` or
`gemm_tiled` for more. FP8 with one scale an output is multiplied by FP8 activations from a number of rows on
(`scaled_products`), if the scratch has room for them. Products of more than `MAX_GROUPED_ROWS` rows, and of other
groups, write the weights out first, for torch. Kernels multiply columns in the order of the weights. If the inputs have
another order, the rows are copied to scratch in that order.

Shapes are those of `product`; I is the intermediate size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from phonograph.kernels.scaled_products import Rows, ScaledScratch, max_16_bit_rows
from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.elementwise import layers
from phonograph.kernels.triton.elementwise.fp8_rows import quantize_rows
from phonograph.kernels.triton.gemm import gemm_grouped_small_m, gemm_scaled, gemm_small_m, gemm_tiled
from phonograph.kernels.triton.gemm.dequantize import dequantize_into
from phonograph.kernels.triton.gemm.gemm_grouped_small_m import GroupedRowsConfig
from phonograph.kernels.triton.gemm.gemm_small_m import FewRowsConfig
from phonograph.kernels.triton.gemm.gemm_tiled import LinearConfig, rows_aligned
from phonograph.kernels.triton.gemm.gemv import gemv
from phonograph.kernels.triton.gemm.product import (
    ADD,
    MAX_SQUARE_TILES,
    SILU,
    STORE,
    NextNorm,
    Product,
    RowSquares,
)
from phonograph.kernels.triton.gemm.tuning import (
    HEAD,
    FewRowsRingConfig,
    IntegerRowConfig,
    ProductConfig,
    RingConfig,
    choose,
    choose_scaled,
    choose_silu,
    rows_class,
)
from phonograph.kernels.triton.gemm.tuning_grouped import choose_grouped
from phonograph.kernels.triton.launch.pdl import gluon_usable

Matrix = torch.Tensor | Grouped
"""Weights of a product: [outputs, inputs], or in groups."""

_MAX_TILES = 16384
MAX_PARTIALS = 1 << 22
_MAX_SQUARES = 1 << 16


class LinearScratch(NamedTuple):
    """Scratch of products that follow one another on one stream: `Parts`, and sums of squares.

    Attributes:
        partials: partial sums, float32.
        arrived: counters of parts, int32.
        squares: sums of squares, float32.
        dequantized: room for the numbers of the largest matrix in groups that is written out, and for
            `MAX_GROUPED_ROWS` rows of its inputs.
        scaled: room for FP8 activations; None leaves all activations in 16 bits.
    """

    partials: torch.Tensor
    arrived: torch.Tensor
    squares: torch.Tensor
    dequantized: torch.Tensor | None = None
    scaled: ScaledScratch | None = None


def make_scratch(device: torch.device) -> LinearScratch:
    """Make scratch of 16 MiB for partial sums and 256 KiB for sums of squares, with counters of zero."""
    return LinearScratch(
        torch.zeros(MAX_PARTIALS, dtype=torch.float32, device=device),
        torch.zeros(_MAX_TILES, dtype=torch.int32, device=device),
        torch.zeros(_MAX_SQUARES, dtype=torch.float32, device=device),
    )


def linear(
    x_MK: Rows,
    weight_NK: Matrix,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    *,
    squares: RowSquares | None = None,
    scratch: LinearScratch | None = None,
    config: ProductConfig | None = None,
) -> None:
    """Compute out = x @ weight^T + bias.

    `squares` is the deferred division of the rows of `x`, where `takes_squares` allows it. Without `scratch` the inputs
    of a tile are not split. `config` replaces the choice by the sizes, for measurements and for `BATCH_INVARIANT`.
    """
    if config is None and _scaled(x_MK, weight_NK, bias_N, out_MN, scratch) is not None:
        return
    assert isinstance(x_MK, torch.Tensor)
    if config is None and len(x_MK) == 1 and out_MN.shape[1] < HEAD and isinstance(weight_NK, torch.Tensor):
        gemv(x_MK, weight_NK, bias_N, out_MN)
        return
    config = config or _choose_for(x_MK, weight_NK, out_MN)
    if config is not None:
        _launch(Product(x_MK, _tensor(weight_NK), bias_N, out_MN, squares=squares), weight_NK, config, scratch)
        return
    assert squares is None, "torch takes no deferred division; see `takes_squares`"
    matrix_KN = _written_out(weight_NK, x_MK.shape[1], scratch).t()
    if bias_N is None:
        torch.mm(x_MK, matrix_KN, out=out_MN)
    else:
        torch.addmm(bias_N, x_MK, matrix_KN, out=out_MN)


def linear_add(
    x_MK: Rows,
    weight_NK: Matrix,
    bias_N: torch.Tensor | None,
    hidden_MN: torch.Tensor,
    *,
    scratch: LinearScratch | None = None,
    config: ProductConfig | None = None,
) -> None:
    """Compute hidden += x @ weight^T + bias, in place. `x` must not overlap `hidden`, and may be overwritten."""
    if config is None:
        product_MN = _scaled(x_MK, weight_NK, bias_N, hidden_MN, scratch, mode=ADD)
        if product_MN is not None:
            if product_MN is not hidden_MN:
                hidden_MN.add_(product_MN)
            return
    assert isinstance(x_MK, torch.Tensor)
    if config is None and len(x_MK) == 1 and isinstance(weight_NK, torch.Tensor):
        gemv(x_MK, weight_NK, bias_N, hidden_MN, mode=ADD)
        return
    config = config or _choose_for(x_MK, weight_NK, hidden_MN)
    if config is not None:
        _launch(Product(x_MK, _tensor(weight_NK), bias_N, hidden_MN, ADD), weight_NK, config, scratch)
    else:
        hidden_MN.addmm_(x_MK, _written_out(weight_NK, x_MK.shape[1], scratch).t())
        if bias_N is not None:
            hidden_MN.add_(bias_N)


def linear_add_norm(
    x_MK: Rows,
    weight_NK: Matrix,
    bias_N: torch.Tensor | None,
    hidden_MN: torch.Tensor,
    norm_weight_N: torch.Tensor,
    eps: float,
    normed_MN: Rows,
    *,
    defer: bool,
    scratch: LinearScratch | None = None,
    config: ProductConfig | None = None,
) -> RowSquares | None:
    """Compute hidden += x @ weight^T + bias, in place, then normed = rms_norm(hidden) with the norm's weights.

    `defer` allows to leave the norm's division to the product that takes `normed` (`takes_squares`).

    Returns:
        The deferred division, or None if `normed` is complete.
    """
    num_rows, num_outputs = hidden_MN.shape
    if config is None:
        product_MN = _scaled(x_MK, weight_NK, bias_N, hidden_MN, scratch, mode=ADD)
        if product_MN is hidden_MN:
            layers.rms_norm(hidden_MN, norm_weight_N, eps, normed_MN)
            return None
        if product_MN is not None:
            layers.add_and_norm(product_MN, hidden_MN, norm_weight_N, eps, normed_MN)
            return None
    assert isinstance(x_MK, torch.Tensor)
    if config is None and (num_rows > 1 or isinstance(weight_NK, Grouped)):
        config = _choose_for(x_MK, weight_NK, hidden_MN)
    if defer and config is not None and scratch is not None:
        tiles = -(-num_outputs // config.block_n)
        if num_rows <= config.rows and tiles <= MAX_SQUARE_TILES:
            assert isinstance(normed_MN, torch.Tensor)
            sums = scratch.squares[: tiles * config.rows].view(tiles, config.rows)
            squares = RowSquares(sums, eps)
            norm = NextNorm(norm_weight_N, normed_MN, squares)
            product = Product(x_MK, _tensor(weight_NK), bias_N, hidden_MN, ADD, norm=norm)
            _launch(product, weight_NK, config, scratch)
            return squares
    linear_add(x_MK, weight_NK, bias_N, hidden_MN, scratch=scratch, config=config)
    layers.rms_norm(hidden_MN, norm_weight_N, eps, normed_MN)
    return None


def linear_silu(
    x_MK: Rows,
    gate_up_2IK: Matrix,
    bias_2I: torch.Tensor | None,
    out_MI: torch.Tensor,
    *,
    squares: RowSquares | None = None,
    scratch: LinearScratch | None = None,
    config: ProductConfig | None = None,
) -> bool:
    """Compute out = silu(gate) * up with (gate, up) = x @ gate_up^T + bias; the rows of the gates come first.

    Returns:
        False, with nothing computed, where torch is to compute the product, which has no such fusion.
    """
    if config is None and takes_fp8_rows(len(out_MI), gate_up_2IK, scratch):
        return _scaled(x_MK, gate_up_2IK, bias_2I, out_MI, scratch, mode=SILU) is not None
    assert isinstance(x_MK, torch.Tensor)
    if config is None:
        config = _choose_for(x_MK, gate_up_2IK, out_MI, silu=True)
    if config is None:
        return False
    _launch(Product(x_MK, _tensor(gate_up_2IK), bias_2I, out_MI, SILU, squares), gate_up_2IK, config, scratch)
    return True


def takes_squares(num_rows: int, num_outputs: int, num_inputs: int, weight: Matrix, dtype: torch.dtype) -> bool:
    """Return True if `linear` takes rows with a deferred division.

    Not in float16, where a row times its norm's weights could overflow without the division. From 17 rows on a kernel
    for the norm costs less than reading the squares in every program. One row of a dense product has its norm inside.
    """
    if dtype != torch.bfloat16 or num_rows > 16 or (num_rows == 1 and isinstance(weight, torch.Tensor)):
        return False
    return _choose(weight, rows_class(num_rows), num_outputs, num_inputs, dtype) is not None


def takes_fp8_rows(num_rows: int, weight: Matrix, scratch: LinearScratch | None) -> bool:
    """Return True if products of so many rows with `weight` have FP8 activations. They take `Fp8Rows` as well."""
    if scratch is None or scratch.scaled is None or not isinstance(weight, Grouped):
        return False
    return has_fp8_rows(num_rows, weight)


def has_fp8_rows(num_rows: int, weight: Grouped) -> bool:
    """Return True if so many rows times `weight` are rounded to FP8, where there is room for that."""
    return num_rows > max_16_bit_rows(gluon_usable()) and gemm_scaled.takes(weight)


def _scaled(
    x: Rows,
    weight: Matrix,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    scratch: LinearScratch | None,
    *,
    mode: int = STORE,
) -> torch.Tensor | None:
    """Compute a product that has FP8 activations, by a kernel of ours or by torch.

    Returns:
        `out` with the result of the mode, or, to be added to it, x @ weight^T + bias in scratch. None, with nothing
        computed, if the activations stay in 16 bits, or if torch is to compute a gated product.
    """
    if not takes_fp8_rows(len(out_MN), weight, scratch):
        return None
    assert scratch is not None and scratch.scaled is not None and isinstance(weight, Grouped)
    (num_rows, num_outputs), num_inputs = out_MN.shape, weight.packed_OW.shape[1]
    config = choose_scaled(rows_class(num_rows), num_outputs, num_inputs, mode == SILU)
    if config is None and mode == SILU:
        return None
    if isinstance(x, torch.Tensor):
        rows = scratch.scaled.rows(*x.shape)
        quantize_rows(x, rows)
        x = rows
    if config is None:
        out_MN = scratch.scaled.product_like(out_MN) if mode == ADD else out_MN
        return gemm_scaled.scaled_product(x, weight, bias_N, out_MN)
    product = Product(x.values_MK, weight.packed_OW, bias_N, out_MN, mode)
    _launch(product, weight, config, scratch, x.scales_M1)
    return out_MN


def _choose_for(
    x_MK: torch.Tensor, weight_NK: Matrix, out_MN: torch.Tensor, *, silu: bool = False
) -> ProductConfig | None:
    one = len(x_MK) == 1 and isinstance(weight_NK, Grouped)
    rows = 1 if one else rows_class(len(x_MK))
    return _choose(weight_NK, rows, out_MN.shape[1], x_MK.shape[1], x_MK.dtype, silu=silu)


def _choose(
    weight_NK: Matrix, rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, *, silu: bool = False
) -> ProductConfig | None:
    if dtype == torch.float32:
        return None
    if isinstance(weight_NK, torch.Tensor):
        return (choose_silu if silu else choose)(rows, num_outputs, num_inputs)
    if not gemm_grouped_small_m.takes(weight_NK, dtype):
        return None
    bits, group, interleaved = weight_NK.bits, weight_NK.group, weight_NK.interleaved
    return choose_grouped(rows, num_outputs, num_inputs, bits, group, silu, interleaved=interleaved)


def _tensor(weight: Matrix) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.packed_OW


def _written_out(weight: Matrix, num_inputs: int, scratch: LinearScratch | None) -> torch.Tensor:
    """Return the weights [N, K], of a matrix in groups in scratch that the next product may overwrite."""
    if isinstance(weight, torch.Tensor):
        return weight
    assert scratch is not None and scratch.dequantized is not None
    num_outputs = weight.scales_OG.shape[0]
    matrix_NK = scratch.dequantized[: num_outputs * num_inputs].view(num_outputs, num_inputs)
    dequantize_into(weight, matrix_NK)
    return matrix_NK


def _in_order(x_MK: torch.Tensor, order_K: torch.Tensor, scratch: LinearScratch | None) -> torch.Tensor:
    """Return the rows with columns in an order, in scratch that the next product may overwrite."""
    assert scratch is not None and scratch.dequantized is not None
    ordered_MK = scratch.dequantized[: x_MK.numel()].view(x_MK.shape)
    layers.gather_columns(x_MK, order_K, ordered_MK)
    return ordered_MK


def _launch(
    product: Product,
    weight: Matrix,
    config: ProductConfig,
    scratch: LinearScratch | None,
    row_scales_M1: torch.Tensor | None = None,
) -> None:
    grouped = weight if isinstance(weight, Grouped) else None
    if grouped is not None and grouped.order_I is not None:
        product = product._replace(x_MK=_in_order(product.x_MK, grouped.order_I, scratch))
    if isinstance(config, FewRowsRingConfig | IntegerRowConfig) and not rows_aligned(product.x_MK):
        config = GroupedRowsConfig(config.rows, 16, 8, 1, 1, 4)
    if isinstance(config, GroupedRowsConfig):
        assert grouped is not None
        gemm_grouped_small_m.launch(product, grouped, config)
        return
    if isinstance(config, FewRowsConfig):
        gemm_small_m.launch(product, config)
        return
    x_MK, weight_NK, _, out_MN, mode, _, _ = product
    assert grouped is not None or weight_NK.shape[1] == x_MK.shape[1]
    assert weight_NK.stride(1) == 1 and x_MK.stride(1) == 1
    rows, block_n, block_k, splits = config[:4]
    tiles = -(-out_MN.shape[1] // block_n) * -(-len(x_MK) // rows)
    if scratch is None or mode == SILU or tiles > _MAX_TILES or tiles * splits * block_n * rows > MAX_PARTIALS:
        splits = 1
    parts = scratch[:2] if scratch is not None and splits > 1 else None
    if isinstance(config, FewRowsRingConfig):
        assert grouped is not None
        # Gluon is experimental: imported only where it is to run.
        from phonograph.kernels.triton.gemm.hopper import gemm_ring_small_m

        gemm_ring_small_m.launch(product, grouped, config._replace(splits=splits), parts)
        return
    if isinstance(config, IntegerRowConfig):
        assert grouped is not None
        from phonograph.kernels.triton.gemm.hopper import gemv_integer

        gemv_integer.launch(product, grouped, config._replace(splits=splits), parts)
        return
    if isinstance(config, RingConfig):
        if rows_aligned(weight_NK) and rows_aligned(x_MK):
            from phonograph.kernels.triton.gemm.hopper import gemm_ring

            gemm_ring.launch(product, config._replace(splits=splits), parts, grouped, row_scales_M1)
            return
        assert row_scales_M1 is None
        config = LinearConfig(rows, block_n, block_k, splits, 4, min(3, config.stages), 256)
    gemm_tiled.launch(product, config._replace(splits=splits), parts, grouped)
