"""Matrix products for few rows (2 to 256), where reading the weights is all that takes time.

The library's kernels are made for square products: at few rows they leave a fifth of the memory bandwidth unused on
narrow layers, and they cannot begin before the kernel before has ended. Here the sizes decide (`product_rules`) who
computes a product: one kernel for one row (`gemv`), one for few (`few_rows`), one for more on Hopper (`ring`), one for
what is left (`row_tiles`), or torch.

The norm between two products needs no kernel of its own: the root mean square is a factor of a whole row, so the
product that makes a row leaves it times the norm's weights, and the sums of its squares by tile (`RowSquares`), and the
product that takes the row multiplies its sums by the factor at its end.

Shapes: M rows, N outputs, K inputs, I intermediate size. Weights lie [outputs, inputs], rows contiguous. Sums are
float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from phonograph.kernels.triton.elementwise import layers
from phonograph.kernels.triton.gemm import gemm_small_m as few_rows
from phonograph.kernels.triton.gemm import gemm_tiled as row_tiles
from phonograph.kernels.triton.gemm import gemv
from phonograph.kernels.triton.gemm.deferred_norm import NextNorm, RowSquares
from phonograph.kernels.triton.gemm.gemm_small_m import FewRowsConfig
from phonograph.kernels.triton.gemm.gemm_tiled import LinearConfig, rows_aligned
from phonograph.kernels.triton.gemm.tuning import (
    HEAD,
    ProductConfig,
    RingConfig,
    choose,
    choose_silu,
    rows_class,
)

_STORE, _ADD, _SILU = 0, 1, 2
_MAX_TILES = 16384
MAX_PARTIALS = 1 << 22
_MAX_SQUARES = 1 << 16
# Of them in a row: each program that takes the row reads them all.
_MAX_SQUARE_TILES = 256


class LinearScratch(NamedTuple):
    """Where programs that share a tile leave partial sums and count who has arrived, and where sums of squares lie.
    Products that share it must follow one another on one stream; counters are zero between them."""

    partials: torch.Tensor
    arrived: torch.Tensor
    squares: torch.Tensor


def make_scratch(device: torch.device) -> LinearScratch:
    """16 MiB for partial sums, zeroed counters, 256 KiB for sums of squares."""
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
    """out = x @ weight^T + bias; with `squares`, of x divided by its rows' root mean squares (see `linear_add_norm`).

    `scratch` from `make_scratch`: without it the inputs of a tile are not split. `config`: instead of what is chosen
    by the sizes, for measurements and for `BATCH_INVARIANT`.
    """
    if config is None and len(x_MK) == 1 and out_MN.shape[1] < HEAD:
        gemv.gemv(x_MK, weight_NK, bias_N, out_MN)
        return
    config = config or _choose_for(x_MK, out_MN)
    if config is not None:
        _launch(x_MK, weight_NK, bias_N, out_MN, _STORE, config, scratch, squares=squares)
        return
    assert squares is None, "`takes_squares` is to be asked first"
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
    """hidden += x @ weight^T + bias, in place. `x` must not overlap `hidden`."""
    if config is None and len(x_MK) == 1:
        gemv.gemv_add(x_MK, weight_NK, bias_N, hidden_MN)
        return
    config = config or _choose_for(x_MK, hidden_MN)
    if config is not None:
        _launch(x_MK, weight_NK, bias_N, hidden_MN, _ADD, config, scratch)
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
    """hidden += x @ weight^T + bias, in place, then normed = rms_norm(hidden) with the norm's weights and `eps`.

    defer: the product that takes `normed` can divide by the root mean square itself (`takes_squares`). What is returned
    is for it then, unless None, where `normed` is complete already.
    """
    num_rows, num_outputs = hidden_MN.shape
    config = config or (_choose_for(x_MK, hidden_MN) if num_rows > 1 else None)
    if defer and config is not None and scratch is not None:
        tiles = -(-num_outputs // config.block_n)
        if num_rows <= config.rows and tiles <= _MAX_SQUARE_TILES:
            sums = scratch.squares[: tiles * config.rows].view(tiles, config.rows)
            norm = NextNorm(norm_weight_N, normed_MN, RowSquares(sums, eps))
            _launch(x_MK, weight_NK, bias_N, hidden_MN, _ADD, config, scratch, norm=norm)
            return norm.squares
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
    """out = silu(gate) * up with (gate, up) = x @ gate_up^T + bias; the rows of the gates come first. For `squares`
    see `linear`.

    Returns False, having done nothing, where the product is torch's to compute: then there is no such fusion.
    """
    if config is None and x_MK.dtype != torch.float32:
        config = choose_silu(rows_class(len(x_MK)), out_MI.shape[1], x_MK.shape[1])
    if config is None:
        return False
    _launch(x_MK, gate_up_2IK, bias_2I, out_MI, _SILU, config, scratch, squares=squares)
    return True


def _choose_for(x_MK: torch.Tensor, out_MN: torch.Tensor) -> ProductConfig | None:
    if x_MK.dtype == torch.float32:
        return None
    num_rows, num_inputs = x_MK.shape
    return choose(rows_class(num_rows), out_MN.shape[1], num_inputs)


def _launch(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    mode: int,
    config: ProductConfig,
    scratch: LinearScratch | None,
    *,
    squares: RowSquares | None = None,
    norm: NextNorm | None = None,
) -> None:
    """squares: of the input"""
    if isinstance(config, FewRowsConfig):
        few_rows.launch(x_MK, weight_NK, bias_N, out_MN, mode, config, squares=squares, norm=norm)
        return
    num_rows, num_inputs = x_MK.shape
    num_outputs = out_MN.shape[1]
    assert weight_NK.shape[1] == num_inputs and weight_NK.stride(1) == 1 and x_MK.stride(1) == 1
    rows, block_n, block_k, splits = config[:4]
    tiles = -(-num_outputs // block_n) * -(-num_rows // rows)
    if scratch is None or mode == _SILU or tiles > _MAX_TILES or tiles * splits * block_n * rows > MAX_PARTIALS:
        splits = 1
    parts = scratch[:2] if scratch is not None and splits > 1 else None
    if isinstance(config, RingConfig):
        if rows_aligned(weight_NK) and rows_aligned(x_MK):
            # Gluon is experimental: imported only where it is to run.
            from phonograph.kernels.triton.gemm import gemm_ring as ring

            config = config._replace(splits=splits)
            ring.launch(x_MK, weight_NK, bias_N, out_MN, mode, config, parts, squares=squares, norm=norm)
            return
        config = LinearConfig(rows, block_n, block_k, splits, 4, min(3, config.stages), 256)
    config = config._replace(splits=splits)
    row_tiles.launch(x_MK, weight_NK, bias_N, out_MN, mode, config, parts, squares=squares, norm=norm)
