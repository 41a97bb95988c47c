"""What attention of prefills for Hopper is made of: where keys lie in the cache, a tile's rows, masks, a ring's places.

Shapes: M rows, N keys of a piece (of one block), D head size.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportRedeclaration=false
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from phonograph.kernels.triton.cache_matrix import TILE, CacheMatrix

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
INFINITY = gl.constexpr(float("inf"))


def describe(kv_cache: torch.Tensor, matrix: CacheMatrix) -> TensorDescriptor:
    """The cache for the copy engine: tiles of TILE keys of one head."""
    head_size = kv_cache.shape[-1]
    kind = gl.bfloat16 if kv_cache.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([TILE, head_size], kind)
    return TensorDescriptor(kv_cache, [matrix.rows, matrix.columns], [matrix.columns, 1], [TILE, head_size], layout)


@gluon.jit
def place_of(
    block,
    key,
    kv_head,
    blocks_of_heads,
    HEAD_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEADS_OUTSIDE: gl.constexpr,
):
    """Row and column of a key in the cache as a matrix. blocks_of_heads: heads, where each has a block's rows."""
    if HEADS_OUTSIDE:
        row = (block * blocks_of_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
        column = 0
    else:
        row = block * BLOCK_SIZE + key % BLOCK_SIZE
        column = kv_head * HEAD_SIZE
    return row, column


@gluon.jit
def load_rows(
    query_THD,
    stride_token,
    query_start,
    query_len,
    kv_head,
    first_row,
    GROUP: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """A tile's rows, which are (token, query head of the KV head), [M, D]; zeros for those behind the query."""
    row_M = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, LAYOUT))
    token_M = row_M // GROUP
    head_M = kv_head * GROUP + row_M % GROUP
    query = query_THD + query_start.to(gl.int64) * stride_token
    pointers = query + (token_M * stride_token + head_M * HEAD_SIZE)[:, None] + dim[None, :]
    return gl.load(pointers, mask=(token_M < query_len)[:, None], other=0.0)


@gluon.jit
def masked(logits_MN, first_key, position_M, low, high, LEFT: gl.constexpr, RIGHT: gl.constexpr, LAYOUT: gl.constexpr):
    """Of a piece: minus infinity for keys that are not there or not seen."""
    N: gl.constexpr = logits_MN.shape[1]
    key_N = (first_key + gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT)))[None, :]
    seen = (key_N >= low) & (key_N < high)
    if LEFT >= 0:
        seen = seen & (key_N >= position_M[:, None] - LEFT)
    if RIGHT >= 0:
        seen = seen & (key_N <= position_M[:, None] + RIGHT)
    return gl.where(seen, logits_MN, -INFINITY)


@gluon.jit
def clear(piece, first_key, low, high):
    """Zeros for values of keys that are not there: slots that nobody wrote may hold NaN, which no weight takes away.
    Products read them behind a fence and a barrier."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SIZE: gl.constexpr = piece.type.shape[0]
    key_N = (first_key + gl.arange(0, SIZE, layout=gl.SliceLayout(1, LAYOUT)))[:, None]
    piece.store(gl.where((key_N >= low) & (key_N < high), piece.load(LAYOUT), 0.0))


@gluon.jit
def free(empty, at):
    """A tile's place, once all warps are past reading it."""
    gl.thread_barrier()
    mbarrier.arrive(empty.index(at), count=1)
