"""Launch of a product's kernel, in Triton or in Gluon, with the arguments that its parameters name.

A parameter's name means the same in all kernels. Constants in capitals are sizes of the product, or fields of the
kernel's configuration: BLOCK_N is `block_n`. Shapes: see `product`.
"""

# pyright: basic
from __future__ import annotations

from typing import Any

from phonograph.kernels.triton.gemm.grouped_operands import MAGIC
from phonograph.kernels.triton.gemm.product import SILU, Norm, Parts, Product
from phonograph.kernels.triton.gemm.product_plan import KernelConfig, cdiv
from phonograph.kernels.triton.launch.pdl import pdl_options

_OPTIONS = "num_warps", "num_stages", "maxnreg"
_DENSE = {"scales_ptr": None, "zeros_ptr": None, "offsets_ptr": None, "output_stride": 0, "group_stride": 0, "magic": 0}
_DENSE |= {"BITS": 0, "GROUP": 0, "INTERLEAVED": False, "INT8": False}
_NO_NEXT_NORM = {"norm_ptr": None, "normed_ptr": None, "normed_stride": 0, "new_squares_ptr": None}


def launch_product(
    kernel: Any, product: Product, config: KernelConfig, parts: Parts | None = None, **others: Any
) -> None:
    """Launch a program for each tile of the result and each split of the inputs.

    Args:
        kernel: the kernel.
        product: the product.
        config: the tiles.
        parts: scratch; if it is too small, or with a gated activation, inputs are not split.
        others: arguments that only this kernel has, or that replace the usual ones, and options of Triton.
    """
    names, tiles = kernel.arg_names, config._asdict()
    x_MK, matrix, out_MN, mode = product.rows, product.matrix, product.out_MN, product.mode
    (num_rows, num_inputs), num_outputs, rows = x_MK.shape, out_MN.shape[1], tiles.get("rows", 1)
    num_tiles, splits = cdiv(num_outputs, config.block_n) * cdiv(num_rows, rows), tiles.get("splits", 1)
    if splits > 1 and (mode >= SILU or not _has_room(parts, num_tiles, splits * config.block_n * rows)):
        splits = 1
    assert x_MK.stride(1) == matrix.stride(1) == out_MN.stride(1) == 1
    # Another kernel, without the code for parts.
    partials, arrived = parts if parts is not None and splits > 1 else (None, None)
    arguments = {
        **tiles,
        **{name.upper(): value for name, value in tiles.items()},
        "SPLITS": splits,
        **_group_arguments(product),
        **_norm_arguments(product, rows),
        "x_ptr": x_MK,
        "weight_ptr": matrix,
        "row_scales_ptr": product.row_scales,
        "bias_ptr": product.bias_N,
        "out_ptr": out_MN,
        "partial_ptr": partials,
        "arrived_ptr": arrived,
        "M": num_rows,
        "x_stride": x_MK.stride(0),
        "weight_stride": matrix.stride(0),
        "out_stride": out_MN.stride(0),
        "N": num_outputs,
        "K": num_inputs,
        "MODE": mode,
        **others,
    }
    # A norm or weights in groups would be ignored without their parameters.
    assert product.norm is None or "norm_ptr" in names
    assert product.next_norm is None or "normed_ptr" in names
    assert product.grouped is None or "scales_ptr" in names
    given = {name: arguments[name] for name in (*names, *_OPTIONS) if name in arguments}
    kernel[num_tiles, splits](**given, **pdl_options())


def _has_room(parts: Parts | None, num_tiles: int, tile_size: int) -> bool:
    """Return True if scratch has room for the partial sums of tiles of a size, and a counter for each."""
    return parts is not None and num_tiles <= parts[1].numel() and num_tiles * tile_size <= parts[0].numel()


def _group_arguments(product: Product) -> dict[str, Any]:
    weight = product.grouped
    if weight is None:
        return _DENSE
    assert weight.has_equal_strides()
    output_stride, group_stride = weight.scales_OG.stride()
    return {
        "scales_ptr": weight.scales_OG,
        "zeros_ptr": weight.zeros_OG,
        "offsets_ptr": weight.offsets_OG,
        "output_stride": output_stride,
        "group_stride": group_stride,
        "magic": MAGIC.get(product.rows.dtype, 0),
        "BITS": weight.bits,
        "GROUP": weight.group,
        "INTERLEAVED": weight.interleaved,
        "INT8": weight.is_int8(),
    }


def _norm_arguments(product: Product, rows: int) -> dict[str, Any]:
    """Return the arguments for the norm of the rows, and for the next norm, of tiles of `rows` rows."""
    norm, following = product.norm, product.next_norm
    if isinstance(norm, Norm):
        return {"norm_ptr": norm.weight_K, "eps": norm.eps}
    found = {"squares_ptr": None, "SQUARE_TILES": 0, "eps": 0.0}
    if norm is not None:
        assert norm.sums.shape[1] == rows
        found = {"squares_ptr": norm.sums, "SQUARE_TILES": len(norm.sums), "eps": norm.eps}
    if following is None:
        return {**found, **_NO_NEXT_NORM}
    found |= {"norm_ptr": following.weight_N, "normed_ptr": following.normed_MN}
    return found | {"normed_stride": following.normed_MN.stride(0), "new_squares_ptr": following.squares.sums}
