"""Launch of matrix products by their plans (`choose`).

Quantized weights whose plan is torch are written out first. Kernels multiply columns in the order of the weights. If
the inputs have another order, the rows are copied to scratch in that order.

Shapes: M rows, N outputs, K inputs (`product`).
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

from typing import NamedTuple

import torch

from phonograph.kernels.fp8_activations import ScaledScratch
from phonograph.kernels.triton.elementwise import layers
from phonograph.kernels.triton.elementwise.fp8_rows import quantize_rows
from phonograph.kernels.triton.gemm import gemm_grouped_small_m, gemm_small_m, gemm_tiled, gemv
from phonograph.kernels.triton.gemm.dequantize import dequantize_into
from phonograph.kernels.triton.gemm.product import ADD, SILU, Product
from phonograph.kernels.triton.gemm.product_plan import (
    GemmGroupedSmallMConfig,
    GemmRingConfig,
    GemmRingSmallMConfig,
    GemmSmallMConfig,
    GemmTiledConfig,
    GemvConfig,
    GemvIntegerConfig,
    KernelConfig,
    ProductPlan,
)

_MAX_TILES = 16384
MAX_PARTIALS = 1 << 22
_MAX_SQUARES = 1 << 16


class GemmScratch(NamedTuple):
    """Scratch of products that follow one another on one stream: `Parts`, and sums of squares.

    Attributes:
        partials: partial sums, float32.
        arrived: counters of parts, int32.
        squares: sums of squares of deferred norms, float32.
        dequantized: room for the largest matrix that is written out, or for `MAX_GROUPED_ROWS` rows of its inputs.
        scaled: room for FP8 activations.
    """

    partials: torch.Tensor
    arrived: torch.Tensor
    squares: torch.Tensor
    dequantized: torch.Tensor | None = None
    scaled: ScaledScratch | None = None

    @classmethod
    def make(cls, device: torch.device) -> GemmScratch:
        """Make scratch of 16 MiB for partial sums and 256 KiB for sums of squares, with counters of zero."""
        return cls(
            torch.zeros(MAX_PARTIALS, dtype=torch.float32, device=device),
            torch.zeros(_MAX_TILES, dtype=torch.int32, device=device),
            torch.zeros(_MAX_SQUARES, dtype=torch.float32, device=device),
        )


def run(plan: ProductPlan, product: Product, scratch: GemmScratch) -> torch.Tensor | None:
    """Compute a product.

    With mode ADD `x` must not overlap `out`, and may be overwritten.

    Returns:
        None if `out` has the result, or, with mode ADD, a product in scratch that the caller adds to `out`.
    """
    if plan.fp8_rows:
        return _run_fp8(plan, product, scratch)
    if plan.kernel is not None:
        _launch(plan.kernel, product, scratch)
        return None
    x_MK, _, bias_N, out_MN, mode, norm, _ = product
    assert product.row_scales is None and norm is None and mode < SILU
    matrix_KN = _written_out(product, scratch).t()
    if mode == ADD:
        out_MN.addmm_(x_MK, matrix_KN)
        if bias_N is not None:
            out_MN.add_(bias_N)
    elif bias_N is None:
        torch.mm(x_MK, matrix_KN, out=out_MN)
    else:
        torch.addmm(bias_N, x_MK, matrix_KN, out=out_MN)
    return None


def _run_fp8(plan: ProductPlan, product: Product, scratch: GemmScratch) -> torch.Tensor | None:
    """Compute a product of rows and weights in FP8. The product of two numbers is exact."""
    x, weight, bias_N, out_MN, mode, _, _ = product
    assert scratch.scaled is not None
    if product.row_scales is None:
        x = scratch.scaled.rows(*product.rows.shape)
        quantize_rows(product.rows, x)
    if plan.kernel is not None:
        _launch(plan.kernel, product._replace(x=x), scratch)
        return None
    result_MN = scratch.scaled.product_like(out_MN) if mode == ADD else out_MN
    torch._scaled_mm(
        x.values_MK,
        weight.packed_OW.t(),
        x.scales_M1,
        weight.scales_OG.t(),
        bias_N,
        out_dtype=result_MN.dtype,
        use_fast_accum=True,
        out=result_MN,
    )
    return result_MN if mode == ADD else None


def _launch(kernel: KernelConfig, product: Product, scratch: GemmScratch) -> None:
    weight = product.grouped
    if weight is not None and weight.order_I is not None:
        assert scratch.dequantized is not None
        ordered_MK = scratch.dequantized[: product.rows.numel()].view(product.rows.shape)
        layers.gather_columns(product.rows, weight.order_I, ordered_MK)
        product = product._replace(x=ordered_MK)
    parts = scratch[:2]
    match _aligned(kernel, product):
        case GemvConfig() as config:
            gemv.launch(product, config)
        case GemmSmallMConfig() as config:
            gemm_small_m.launch(product, config)
        case GemmGroupedSmallMConfig() as config:
            gemm_grouped_small_m.launch(product, config)
        case GemmTiledConfig() as config:
            gemm_tiled.launch(product, config, parts)
        # Gluon is experimental: imported only where it runs.
        case GemmRingConfig() as config:
            from phonograph.kernels.triton.gemm.hopper import gemm_ring

            gemm_ring.launch(product, config, parts)
        case GemmRingSmallMConfig() as config:
            from phonograph.kernels.triton.gemm.hopper import gemm_ring_small_m

            gemm_ring_small_m.launch(product, config, parts)
        case GemvIntegerConfig() as config:
            from phonograph.kernels.triton.gemm.hopper import gemv_integer

            gemv_integer.launch(product, config, parts)


def _aligned(kernel: KernelConfig, product: Product) -> KernelConfig:
    """Return the kernel, or one that takes rows that do not begin at multiples of 16 bytes, if these do not."""
    aligned = gemm_tiled.rows_aligned(product.rows)
    if isinstance(kernel, GemmRingConfig) and not (aligned and gemm_tiled.rows_aligned(product.matrix)):
        assert product.row_scales is None, "FP8 rows lie in scratch, aligned"
        rows, block_n, block_k, splits, stages, _ = kernel
        return GemmTiledConfig(rows, block_n, block_k, splits, 4, min(3, stages), 256)
    if isinstance(kernel, GemmRingSmallMConfig | GemvIntegerConfig) and not aligned:
        return GemmGroupedSmallMConfig(8, 16, 8, 1, 1, 4)
    return kernel


def _written_out(product: Product, scratch: GemmScratch) -> torch.Tensor:
    """Return the weights [N, K], of a matrix in groups in scratch that the next product may overwrite."""
    weight = product.grouped
    if weight is None:
        return product.matrix
    assert scratch.dequantized is not None
    num_outputs, num_inputs = weight.scales_OG.shape[0], product.rows.shape[1]
    matrix_NK = scratch.dequantized[: num_outputs * num_inputs].view(num_outputs, num_inputs)
    dequantize_into(weight, matrix_NK)
    return matrix_NK
