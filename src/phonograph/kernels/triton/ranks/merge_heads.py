"""Attention of several ranks to parts of the keys: results travel over peer memory (`peer_buffers`) and are merged.

A rank has the results of all heads over its own keys. It sends each other rank the results for its heads, takes the
results for its own heads, and weighs them by their log-sum-exps. `kernels/torch/attention/merge_parts.py` does the same
with operations of torch.

Shapes: T tokens, W ranks, H query heads of a rank, X = W * H, D head size.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options
from phonograph.kernels.triton.ranks.peer_buffers import (
    PeerBuffers,
    as_integers,
    clear_before,
    next_part,
    place_of,
    received,
    sent_bits,
    to_peer,
)


def merge_heads(
    found_TXD: torch.Tensor,
    lse_XT: torch.Tensor,
    outputs: PeerBuffers,
    lses: PeerBuffers,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor | None,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Merge the results of all ranks for the heads of this one.

    Args:
        found_TXD: outputs of all heads over this rank's keys, contiguous.
        lse_XT: their log-sum-exps, float32; minus infinity has no keys, and then any output.
        outputs: buffers of H * D numbers in the type of `found_TXD`.
        lses: buffers of H numbers in float32.
        out_THD: receives the outputs; 0 without any keys. Numbers of a head lie together.
        lse_HT: receives the log-sum-exps, or None.
        own: more results for the heads of this rank: outputs [T, H, D], contiguous, and log-sum-exps [H, T].
    """
    num_tokens, num_heads, head_size = out_THD.shape
    own_THD, own_HT = own or (None, None)
    heads, block = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_size)
    _merge_heads_kernel[(num_tokens,)](
        found_TXD, lse_XT, own_THD, own_HT, out_THD, lse_HT, outputs.own, outputs.offsets, lses.own, lses.offsets,
        outputs.counters, outputs.limit, outputs.rank, lse_XT.stride(0), 0 if own_HT is None else own_HT.stride(0),
        out_THD.stride(0), out_THD.stride(1), 0 if lse_HT is None else lse_HT.stride(0), H=num_heads, D=head_size,
        HEADS=heads, BLOCK=block, NUM_RANKS=outputs.own.shape[1], MAX_ROWS=outputs.max_rows, **pdl_options(),
        num_warps=min(16, max(1, heads * block // 256)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "lse_stride", "own_stride", "out_lse_stride"])
def _merge_heads_kernel(
    found_ptr,
    lse_ptr,
    own_found_ptr,
    own_lse_ptr,
    out_ptr,
    out_lse_ptr,
    outputs_ptr,
    output_offsets_ptr,
    lses_ptr,
    lse_offsets_ptr,
    counters_ptr,
    limit_ptr,
    rank,
    lse_stride,
    own_stride,
    out_stride_token,
    out_stride_head,
    out_lse_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program `row` merges the heads of a token."""
    number: tl.constexpr = found_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    outputs, lses = as_integers(outputs_ptr), as_integers(lses_ptr)
    head, dim = tl.arange(0, HEADS), tl.arange(0, BLOCK)[None, :]
    is_head = head < H
    mask = is_head[:, None] & (dim < D)
    # Numbers of a head within a row of H * D.
    column = head[:, None] * D + dim
    pdl_begin(PDL)
    part = tl.load(counters_ptr + row)
    place = place_of(part, rank, row, NUM_RANKS, MAX_ROWS)
    for other in tl.static_range(NUM_RANKS):
        if other != rank:
            of = other * H + head
            found = tl.load(found_ptr + (row * (NUM_RANKS * H) + of)[:, None] * D + dim, mask, other=0.0)
            lse = tl.load(lse_ptr + of.to(tl.int64) * lse_stride + row, is_head, other=0.0)
            to = to_peer(outputs, output_offsets_ptr, other) + place * (H * D)
            tl.store(to + column, sent_bits(found), mask)
            tl.store(to_peer(lses, lse_offsets_ptr, other) + place * H + head, sent_bits(lse), is_head)

    if own_found_ptr is None:
        most, total = tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32)
        mixed = tl.zeros([HEADS, BLOCK], tl.float32)
    else:
        most = tl.load(own_lse_ptr + head.to(tl.int64) * own_stride + row, is_head, other=float("-inf"))
        has_keys = most > float("-inf")
        total = tl.where(has_keys, 1.0, 0.0)
        mixed = tl.load(own_found_ptr + (row * H + head)[:, None] * D + dim, mask & has_keys[:, None], other=0.0)
        mixed = mixed.to(tl.float32)
    of = rank * H + head
    my_found = sent_bits(tl.load(found_ptr + (row * (NUM_RANKS * H) + of)[:, None] * D + dim, mask, other=0.0))
    my_lse = sent_bits(tl.load(lse_ptr + of.to(tl.int64) * lse_stride + row, is_head, other=0.0))
    for other in tl.static_range(NUM_RANKS):
        place = place_of(part, other, row, NUM_RANKS, MAX_ROWS)
        lse_bits, no_lse = received(lses + place * H + head, my_lse, is_head, other == rank, limit_ptr)
        source = outputs + place * (H * D) + column
        found_bits, no_found = received(source, my_found, mask, other == rank, limit_ptr)
        lse = tl.where(is_head, lse_bits.to(tl.float32, bitcast=True), float("-inf"))
        # NaN if one of both never came.
        lse = tl.where(no_lse | no_found, float("nan"), lse)
        has_keys = lse != float("-inf")
        found = tl.where(has_keys[:, None], found_bits.to(number, bitcast=True).to(tl.float32), 0.0)
        more = tl.maximum(most, lse, propagate_nan=tl.PropagateNan.ALL)
        old = tl.where(most > float("-inf"), tl.exp(most - more), 0.0)
        new = tl.where(has_keys, tl.exp(lse - more), 0.0)
        mixed = mixed * old[:, None] + found * new[:, None]
        total = total * old + new
        most = more
    mixed = mixed / tl.where(total == 0, 1.0, total)[:, None]
    out = out_ptr + row * out_stride_token + (head * out_stride_head)[:, None] + dim
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask)
    if out_lse_ptr is not None:
        tl.store(out_lse_ptr + head.to(tl.int64) * out_lse_stride + row, most + tl.log(total), is_head)

    clear_before(outputs, part, row, column, mask, rank, H * D, NUM_RANKS, MAX_ROWS)
    clear_before(lses, part, row, head, is_head, rank, H, NUM_RANKS, MAX_ROWS)
    next_part(counters_ptr, row, part)
