"""Cut and merge of cascade attention in torch, for the CPU: plain operators that a graph records one by one.

The functions have the same names and arguments as in `kernels.triton.attention.cascade`.
"""

from __future__ import annotations

import torch

from phonograph.kernels.cascade_tensors import PrefixCut


def cut_prefix(
    cut: PrefixCut,
    prefix_len: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    block_table_RN: torch.Tensor,
    *,
    block_size: int,
) -> None:
    num_seqs, num_blocks = block_table_RN.shape
    cut.prefix_starts[1:].copy_(query_start_loc[num_seqs:])
    cut.prefix_lens.copy_(prefix_len)
    torch.clamp(seq_lens_R - prefix_len, min=0, out=cut.suffix_lens[:num_seqs])
    columns = torch.arange(cut.suffix_table.shape[1], device=prefix_len.device) + prefix_len // block_size
    # Entries after a sequence's blocks are never read, so any entry that exists will do.
    columns.clamp_(max=num_blocks - 1)
    torch.index_select(block_table_RN, 1, columns, out=cut.suffix_table[:num_seqs])


def merge_by_lse(
    prefix_out_THD: torch.Tensor,
    prefix_lse_HT: torch.Tensor,
    out_THD: torch.Tensor,
    suffix_lse_HT: torch.Tensor,
    num_tokens: torch.Tensor,
    lse_HT: torch.Tensor | None = None,
) -> None:
    is_padding_T = torch.arange(out_THD.shape[0], device=out_THD.device) >= num_tokens
    prefix_lse_HT = prefix_lse_HT.masked_fill(is_padding_T, -torch.inf)
    suffix_lse_HT = suffix_lse_HT.masked_fill(is_padding_T, -torch.inf)
    merged_HT = torch.logaddexp(prefix_lse_HT, suffix_lse_HT)
    shift_HT = merged_HT.masked_fill(merged_HT == -torch.inf, 0.0)
    prefix_weight_TH1 = torch.exp(prefix_lse_HT - shift_HT).t().unsqueeze(2)
    suffix_weight_TH1 = torch.exp(suffix_lse_HT - shift_HT).t().unsqueeze(2)
    # A side without a weight may hold anything, even NaN.
    prefix_THD = torch.where(prefix_weight_TH1 == 0, 0.0, prefix_out_THD * prefix_weight_TH1)
    suffix_THD = torch.where(suffix_weight_TH1 == 0, 0.0, out_THD * suffix_weight_TH1)
    out_THD.copy_(prefix_THD + suffix_THD)
    if lse_HT is not None:
        lse_HT.copy_(merged_HT)
