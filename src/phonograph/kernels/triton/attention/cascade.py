"""Kernels of cascade attention around a backend's launches: cut at the common prefix, and merge of both sides.

Shapes: R slots, N blocks of the longest sequence, T tokens, H query heads, D head size.

Algorithm: cascade inference (FlashInfer, Ye et al., 2024).
1. `cut_prefix` writes the batch as one sequence of all queries over the prefix, and R sequences over their suffixes.
2. The backend attends both, with LSE.
3. `merge_by_lse` weighs both outputs by exp(LSE) and divides by the sum of the weights.
The length of the prefix is read on the device, so that a captured cut is right for every batch.

    cut: a program a slot     | slot 0 | slot 1 | ...    copies the slot's blocks after the prefix
    merge: a program a token  | token t, heads 0..h | token t, heads h.. | ...    about 1024 elements each
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.cascade_tensors import PrefixCut
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options

_TABLE_BLOCK = 1024
_MERGED_ELEMENTS = 1024
"""Output elements of a program: few, so that small batches have many programs."""


def cut_prefix(
    cut: PrefixCut,
    prefix_len: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    block_table_RN: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """Cut a batch of R slots after its common prefix; one launch.

    Args:
        cut: receives the tensors
        prefix_len: [1] int32, a multiple of block_size that no sequence in the batch is shorter than
        query_start_loc: int32, as in CommonMetadata
        seq_lens_R: int32, likewise
        block_table_RN: int32, likewise
        block_size: tokens of a block
    """
    num_seqs = seq_lens_R.shape[0]
    _cut_kernel[(num_seqs,)](
        prefix_len,
        query_start_loc,
        seq_lens_R,
        block_table_RN,
        cut.prefix_starts,
        cut.prefix_lens,
        cut.suffix_lens,
        cut.suffix_table,
        num_seqs,
        block_table_RN.stride(0),
        cut.suffix_table.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=_TABLE_BLOCK,
        **pdl_options(),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _cut_kernel(
    prefix_len_ptr,
    query_start_loc,
    seq_lens,
    block_table,
    prefix_starts,
    prefix_lens,
    suffix_lens,
    suffix_table,
    num_seqs,
    stride_table,
    stride_suffix,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    seq = tl.program_id(0)
    prefix_len = tl.load(prefix_len_ptr)
    suffix_len = tl.maximum(tl.load(seq_lens + seq) - prefix_len, 0)
    tl.store(suffix_lens + seq, suffix_len)
    source = block_table + seq.to(tl.int64) * stride_table + prefix_len // BLOCK_SIZE
    target = suffix_table + seq.to(tl.int64) * stride_suffix
    num_blocks = (suffix_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    for first in range(0, num_blocks, BLOCK):
        column = first + tl.arange(0, BLOCK)
        valid = column < num_blocks
        tl.store(target + column, tl.load(source + column, mask=valid), mask=valid)
    if seq == 0:
        tl.store(prefix_starts + 1, tl.load(query_start_loc + num_seqs))
        tl.store(prefix_lens, prefix_len)


def merge_by_lse(
    prefix_out_THD: torch.Tensor,
    prefix_lse_HT: torch.Tensor,
    out_THD: torch.Tensor,
    suffix_lse_HT: torch.Tensor,
    num_tokens: torch.Tensor,
    lse_HT: torch.Tensor | None = None,
) -> None:
    """Merge attention over two sets of keys into attention over both; one launch.

    A side without keys (its LSE is -inf, or the inf of FlashAttention 2) is not read, so its output may hold anything.
    Rows without keys on either side get zeros and the LSE -inf. So do padding rows, which are not read.

    Args:
        prefix_out_THD: any strides of rows and heads
        prefix_lse_HT: float32, natural logarithm
        out_THD: output of the suffix, which the merged output replaces
        suffix_lse_HT: float32, natural logarithm
        num_tokens: [1] int32, rows before the padding
        lse_HT: receives the merged LSE, or None
    """
    num_rows, num_heads, head_size = out_THD.shape
    assert out_THD.stride(2) == prefix_out_THD.stride(2) == 1
    assert prefix_lse_HT.stride(1) == suffix_lse_HT.stride(1) == 1 and (lse_HT is None or lse_HT.stride(1) == 1)
    width = triton.next_power_of_2(head_size)
    heads = min(triton.next_power_of_2(num_heads), max(1, _MERGED_ELEMENTS // width))
    _merge_kernel[(num_rows, triton.cdiv(num_heads, heads))](
        prefix_out_THD,
        prefix_lse_HT,
        out_THD,
        suffix_lse_HT,
        num_tokens,
        lse_HT,
        prefix_out_THD.stride(0),
        prefix_out_THD.stride(1),
        out_THD.stride(0),
        out_THD.stride(1),
        prefix_lse_HT.stride(0),
        suffix_lse_HT.stride(0),
        0 if lse_HT is None else lse_HT.stride(0),
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        HEADS=heads,
        WIDTH=width,
        **pdl_options(),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["stride_prefix_lse", "stride_suffix_lse", "stride_lse"])
def _merge_kernel(
    prefix_out,
    prefix_lse,
    out,
    suffix_lse,
    num_tokens,
    lse,
    stride_prefix_token,
    stride_prefix_head,
    stride_token,
    stride_head,
    stride_prefix_lse,
    stride_suffix_lse,
    stride_lse,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    is_head = head < NUM_HEADS
    is_read = is_head & (token < tl.load(num_tokens))
    nothing = float("-inf")
    prefix = tl.load(prefix_lse + head * stride_prefix_lse + token, mask=is_read, other=nothing)
    suffix = tl.load(suffix_lse + head * stride_suffix_lse + token, mask=is_read, other=nothing)
    prefix = tl.where(prefix == float("inf"), nothing, prefix)
    suffix = tl.where(suffix == float("inf"), nothing, suffix)
    largest = tl.maximum(prefix, suffix)
    # Where both are -inf the difference would be NaN.
    shift = tl.where(largest == nothing, 0.0, largest)
    prefix_weight, suffix_weight = tl.exp(prefix - shift), tl.exp(suffix - shift)
    total = prefix_weight + suffix_weight
    scale = tl.where(total > 0.0, 1.0 / total, 0.0)

    mask = is_head[:, None] & (column < HEAD_SIZE)[None, :]
    prefix_pointer = prefix_out + token * stride_prefix_token + head[:, None] * stride_prefix_head + column[None, :]
    out_pointer = out + token * stride_token + head[:, None] * stride_head + column[None, :]
    has_prefix, has_suffix = (prefix_weight > 0.0)[:, None], (suffix_weight > 0.0)[:, None]
    prefix_values = tl.load(prefix_pointer, mask=mask & has_prefix, other=0.0).to(tl.float32)
    suffix_values = tl.load(out_pointer, mask=mask & has_suffix, other=0.0).to(tl.float32)
    merged = prefix_values * (prefix_weight * scale)[:, None] + suffix_values * (suffix_weight * scale)[:, None]
    tl.store(out_pointer, merged.to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        tl.store(lse + head * stride_lse + token, tl.where(total > 0.0, shift + tl.log(total), nothing), mask=is_head)
