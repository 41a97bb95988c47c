"""Matrix products of 1 to 256 rows, where reading the weights takes most of the time.

Library kernels are made for square products: at few rows they leave a fifth of the memory bandwidth unused on narrow
layers, and they cannot begin before the kernel before has ended. `tuning` chooses a kernel by the sizes: `gemv` for one
row, `gemm_small_m` for few, `gemm_ring` for more on Hopper, `gemm_tiled` for the rest, or torch.

Shapes are those of `product`; I is the intermediate size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from phonograph.kernels.triton.elementwise import layers
from phonograph.kernels.triton.gemm import gemm_small_m, gemm_tiled
from phonograph.kernels.triton.gemm.gemm_small_m import FewRowsConfig
from phonograph.kernels.triton.gemm.gemm_tiled import LinearConfig, rows_aligned
from phonograph.kernels.triton.gemm.gemv import gemv
from phonograph.kernels.triton.gemm.product import ADD, SILU, NextNorm, Product, RowSquares
from phonograph.kernels.triton.gemm.tuning import (
    HEAD,
    ProductConfig,
    RingConfig,
    choose,
    choose_silu,
    rows_class,
)

_MAX_TILES = 16384
MAX_PARTIALS = 1 << 22
_MAX_SQUARES = 1 << 16
_MAX_SQUARE_TILES = 256
"""Sums of squares of a row, all of which each program that takes the row reads."""


class LinearScratch(NamedTuple):
    """Scratch of products that follow one another on one stream: `Parts`, and sums of squares."""

    partials: torch.Tensor
    arrived: torch.Tensor
    squares: torch.Tensor


def make_scratch(device: torch.device) -> LinearScratch:
    """Make scratch of 16 MiB for partial sums and 256 KiB for sums of squares, with counters of zero."""
    return LinearScratch(
        torch.zeros(MAX_PARTIALS, dtype=torch.float32, device=device),
        torch.zeros(_MAX_TILES, dtype=torch.int32, device=device),
        torch.zeros(_MAX_SQUARES, dtype=torch.float32, device=device),
    )


def linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
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
    if config is None and len(x_MK) == 1 and out_MN.shape[1] < HEAD:
        gemv(x_MK, weight_NK, bias_N, out_MN)
        return
    config = config or _choose_for(x_MK, out_MN)
    if config is not None:
        _launch(Product(x_MK, weight_NK, bias_N, out_MN, squares=squares), config, scratch)
        return
    assert squares is None, "torch takes no deferred division; see `takes_squares`"
    if bias_N is None:
        torch.mm(x_MK, weight_NK.t(), out=out_MN)
    else:
        torch.addmm(bias_N, x_MK, weight_NK.t(), out=out_MN)


def linear_add(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    hidden_MN: torch.Tensor,
    *,
    scratch: LinearScratch | None = None,
    config: ProductConfig | None = None,
) -> None:
    """Compute hidden += x @ weight^T + bias, in place. `x` must not overlap `hidden`."""
    if config is None and len(x_MK) == 1:
        gemv(x_MK, weight_NK, bias_N, hidden_MN, mode=ADD)
        return
    config = config or _choose_for(x_MK, hidden_MN)
    if config is not None:
        _launch(Product(x_MK, weight_NK, bias_N, hidden_MN, ADD), config, scratch)
    else:
        hidden_MN.addmm_(x_MK, weight_NK.t())
        if bias_N is not None:
            hidden_MN.add_(bias_N)


def linear_add_norm(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    hidden_MN: torch.Tensor,
    norm_weight_N: torch.Tensor,
    eps: float,
    normed_MN: torch.Tensor,
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
    config = config or (_choose_for(x_MK, hidden_MN) if num_rows > 1 else None)
    if defer and config is not None and scratch is not None:
        tiles = -(-num_outputs // config.block_n)
        if num_rows <= config.rows and tiles <= _MAX_SQUARE_TILES:
            sums = scratch.squares[: tiles * config.rows].view(tiles, config.rows)
            squares = RowSquares(sums, eps)
            norm = NextNorm(norm_weight_N, normed_MN, squares)
            _launch(Product(x_MK, weight_NK, bias_N, hidden_MN, ADD, norm=norm), config, scratch)
            return squares
    linear_add(x_MK, weight_NK, bias_N, hidden_MN, scratch=scratch, config=config)
    layers.rms_norm(hidden_MN, norm_weight_N, eps, normed_MN)
    return None


def linear_silu(
    x_MK: torch.Tensor,
    gate_up_2IK: torch.Tensor,
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
    if config is None and x_MK.dtype != torch.float32:
        config = choose_silu(rows_class(len(x_MK)), out_MI.shape[1], x_MK.shape[1])
    if config is None:
        return False
    _launch(Product(x_MK, gate_up_2IK, bias_2I, out_MI, SILU, squares), config, scratch)
    return True


def _choose_for(x_MK: torch.Tensor, out_MN: torch.Tensor) -> ProductConfig | None:
    if x_MK.dtype == torch.float32:
        return None
    num_rows, num_inputs = x_MK.shape
    return choose(rows_class(num_rows), out_MN.shape[1], num_inputs)


def _launch(product: Product, config: ProductConfig, scratch: LinearScratch | None) -> None:
    if isinstance(config, FewRowsConfig):
        gemm_small_m.launch(product, config)
        return
    x_MK, weight_NK, _, out_MN, mode, _, _ = product
    assert weight_NK.shape[1] == x_MK.shape[1] and weight_NK.stride(1) == 1 and x_MK.stride(1) == 1
    rows, block_n, block_k, splits = config[:4]
    tiles = -(-out_MN.shape[1] // block_n) * -(-len(x_MK) // rows)
    if scratch is None or mode == SILU or tiles > _MAX_TILES or tiles * splits * block_n * rows > MAX_PARTIALS:
        splits = 1
    parts = scratch[:2] if scratch is not None and splits > 1 else None
    if isinstance(config, RingConfig):
        if rows_aligned(weight_NK) and rows_aligned(x_MK):
            # Gluon is experimental: imported only where it is to run.
            from phonograph.kernels.triton.gemm import gemm_ring

            gemm_ring.launch(product, config._replace(splits=splits), parts)
            return
        config = LinearConfig(rows, block_n, block_k, splits, 4, min(3, config.stages), 256)
    gemm_tiled.launch(product, config._replace(splits=splits), parts)
