"""Embeddings of tokens in each layer: their numbers for all layers, and the gates of one layer.

Shapes: T tokens, L layers, P numbers of an embedding in a layer, X = L * P, V rows of the table. P is a constant of the
model, so it is compiled in. The arithmetic, with its roundings, is that of transformers' Gemma 4.

    for all layers   | token 0, layer 0 | token 0, layer 1 | ...    a program an embedding, because of its norm
    gates            | row 0 | row 1 | ...                          a program a row
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.elementwise.layers import gelu_slope, normal, weighted
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options


def add_table(
    projected_TX: torch.Tensor,
    input_ids_T: torch.Tensor,
    table_VX: torch.Tensor,
    norm_P: torch.Tensor,
    eps: float,
    factors: tuple[float, float, float],
) -> None:
    """Compute projected = (found * table[input_ids] + rms_norm(projection * projected)) * both, in place.

    Args:
        projected_TX: projections of the tokens' embeddings; rows of this and of the table at any stride.
        input_ids_T: int32 or int64.
        table_VX: embeddings of each token in all layers.
        norm_P: weights of the norm of each layer's numbers.
        eps: of the norm.
        factors: found, projection and both.
    """
    num_tokens, width = projected_TX.shape
    size = len(norm_P)
    found, projection, both = factors
    block = triton.next_power_of_2(size)
    _add_table_kernel[(num_tokens, width // size)](
        projected_TX, input_ids_T, table_VX, norm_P, eps, projected_TX.stride(0), table_VX.stride(0), FOUND=found,
        PROJECTION=projection, BOTH=both, SIZE=size, BLOCK=block, **pdl_options(), num_warps=max(1, block // 256),
    )  # fmt: skip


def gate_embedding(gate_TP: torch.Tensor, embeddings_TX: torch.Tensor, layer: int, rows_T: torch.Tensor | None) -> None:
    """Compute gate = gelu(gate) * embedding of the layer, in place.

    Args:
        gate_TP: gates; rows at any stride.
        embeddings_TX: embeddings in all layers, likewise.
        layer: index of the layer.
        rows_T: int64, the row of `embeddings_TX` that belongs to each row of gates; None if the rows are the same.
    """
    num_rows, size = gate_TP.shape
    block = triton.next_power_of_2(size)
    _gate_kernel[(num_rows,)](
        gate_TP, embeddings_TX, rows_T, layer * size, gate_TP.stride(0), embeddings_TX.stride(0), SIZE=size,
        BLOCK=block, **pdl_options(), num_warps=max(1, block // 256),
    )  # fmt: skip


@triton.jit
def _add_table_kernel(
    projected_ptr,
    ids_ptr,
    table_ptr,
    norm_ptr,
    eps,
    projected_stride,
    table_stride,
    FOUND: tl.constexpr,
    PROJECTION: tl.constexpr,
    BOTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < SIZE
    first = tl.program_id(1) * SIZE
    weight = tl.load(norm_ptr + column, valid, other=0.0)  # a constant, so before the wait
    pdl_begin(PDL)
    row = tl.load(ids_ptr + token).to(tl.int64)
    pointer = projected_ptr + token * projected_stride + first + column
    x = tl.load(pointer, valid, other=0.0)
    found = tl.load(table_ptr + row * table_stride + first + column, valid, other=0.0)
    dtype = x.dtype
    wide = (x.to(tl.float32) * PROJECTION).to(dtype).to(tl.float32)
    normed = weighted(normal(wide, eps, SIZE), weight, dtype).to(tl.float32)
    found = (found.to(tl.float32) * FOUND).to(dtype).to(tl.float32)
    out = (normed + found).to(dtype).to(tl.float32) * BOTH
    tl.store(pointer, out.to(dtype), valid)


@triton.jit(do_not_specialize=["first"])
def _gate_kernel(
    gate_ptr,
    embeddings_ptr,
    rows_ptr,
    first,
    gate_stride,
    embeddings_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < SIZE
    source = row
    if rows_ptr is not None:
        source = tl.load(rows_ptr + row)
    gate = tl.load(gate_ptr + row * gate_stride + column, valid, other=0.0)
    embedding = tl.load(embeddings_ptr + source * embeddings_stride + first + column, valid, other=0.0)
    wide = gate.to(tl.float32)
    # The activation is rounded before the product, as torch does it.
    out = (wide / (1.0 + tl.exp(-gelu_slope(wide)))).to(gate.dtype) * embedding
    tl.store(gate_ptr + row * gate_stride + column, out, valid)
