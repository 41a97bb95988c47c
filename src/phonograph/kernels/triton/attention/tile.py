"""Parts of an attention tile that the kernels for short and for long queries share.

Shapes: T tokens, H query heads; M rows of a tile, N keys, D columns (the head size, rounded up to a power of two).

A row is (token, query head of one KV head), heads innermost, so that keys are read once for all rows. The softmax is
online (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022) and in base 2: logits, LSE and sinks are
multiplied by log2(e). For each tile of keys:

    logits [M, N] = `score`(Q K^T), -inf outside `in_window`
    weights, decay, sum, max = `softmax_step`(logits)
    acc [M, D] = acc * decay + weights V
    at the end: `add_sink`, `normalize`, then `store_rows`, or a partial result that `merge_parts` weighs by its LSE
"""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def token_and_head(row_M, kv_head, GROUP: tl.constexpr):
    """Return the token of each row in its query, and its query head."""
    return row_M // GROUP, kv_head * GROUP + row_M % GROUP


@triton.jit
def score(logits_MN, factor, softcap, slope_M, key_N, position_M, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Apply scale, softcap and ALiBi to products of queries and keys.

    Returns the logits and a factor that is left to apply: base-2 logits are their product. `slope_M` is in base 2.
    """
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        exp_MN = tl.exp2(logits_MN * (factor * (2 * LOG2_E) / softcap))
        logits_MN = softcap * LOG2_E * (1.0 - 2.0 / (exp_MN + 1.0))
        unit = 1.0
    else:
        unit = factor * LOG2_E
    if ALIBI:
        logits_MN = logits_MN * unit + slope_M[:, None] * (key_N[None, :] - position_M[:, None]).to(tl.float32)
        unit = 1.0
    return logits_MN, unit


@triton.jit
def in_window(seen, key_N, position_M, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Restrict a mask to the keys that each row sees: LEFT before and RIGHT after its position, below 0 for all."""
    if LEFT >= 0:
        seen = seen & (key_N[None, :] >= position_M[:, None] - LEFT)
    if RIGHT >= 0:
        seen = seen & (key_N[None, :] <= position_M[:, None] + RIGHT)
    return seen


@triton.jit
def softmax_step(logits_MN, unit, sum_M, max_M, MASKED: tl.constexpr):
    """Add a tile of base-2 logits, `logits_MN * unit`, to the online softmax.

    Returns the weights, the factor of earlier sums, the new sum of weights and the new maximum. With MASKED a row may
    have no key so far.
    """
    new_max_M = tl.maximum(max_M, tl.max(logits_MN, 1) * unit)
    shift_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M) if MASKED else new_max_M
    weight_MN = tl.exp2(logits_MN * unit - shift_M[:, None])
    decay_M = tl.exp2(max_M - shift_M)
    return weight_MN, decay_M, sum_M * decay_M + tl.sum(weight_MN, 1), new_max_M


@triton.jit
def add_sink(sinks, head_M, acc_MD, sum_M, max_M):
    """Add each head's sink to the softmax, a logit without a value. Returns the new sums and maximum."""
    sink_M = tl.load(sinks + head_M) * LOG2_E
    new_max_M = tl.maximum(max_M, sink_M)
    decay_M = tl.exp2(max_M - new_max_M)
    return acc_MD * decay_M[:, None], sum_M * decay_M + tl.exp2(sink_M - new_max_M), new_max_M


@triton.jit
def normalize(acc_MD, sum_M, max_M, factor):
    """Return weighted means of the values, times `factor`, and the base-2 LSE; zeros and -inf for rows without keys."""
    acc_MD = acc_MD * tl.where(sum_M > 0, factor / sum_M, 0.0)[:, None]
    return acc_MD, tl.where(sum_M > 0, max_M + tl.log2(sum_M), float("-inf"))


@triton.jit
def store_rows(
    out_THD,
    lse_HT,
    stride_lse,
    acc_MD,
    lse_M,
    query_start,
    first_token,
    token_M,
    head_M,
    valid_M,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Write rows of the output and, unless it is None, of the LSE; `first_token` is the tile's first in its query."""
    dim = tl.arange(0, acc_MD.shape[1])
    # 64 bits for the tile's first token, 32 within the tile.
    out = out_THD + (query_start + first_token).to(tl.int64) * (HEADS * HEAD_SIZE)
    pointer_MD = out + ((token_M - first_token) * HEADS + head_M)[:, None] * HEAD_SIZE + dim[None, :]
    mask_MD = valid_M[:, None] & (dim < HEAD_SIZE)[None, :]
    tl.store(pointer_MD, acc_MD.to(out_THD.dtype.element_ty), mask=mask_MD)
    if lse_HT is not None:
        tl.store(lse_HT + head_M.to(tl.int64) * stride_lse + query_start + token_M, lse_M * LN_2, mask=valid_M)


@triton.jit
def merge_parts(acc_MD, sum_M, max_M, new_max_M, lses, parts):
    """Add partial results to running sums, in order; `new_max_M` is the maximum of `max_M` and of their `lses`."""
    shift_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    decay_M = tl.exp2(max_M - shift_M)
    sum_M = sum_M * decay_M
    acc_MD = acc_MD * decay_M[:, None]
    for part in tl.static_range(len(lses)):
        weight_M = tl.exp2(lses[part] - shift_M)
        sum_M += weight_M
        acc_MD += parts[part] * weight_M[:, None]
    return acc_MD, sum_M
