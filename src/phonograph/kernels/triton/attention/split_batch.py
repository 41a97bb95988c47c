"""Split of a batch on the device, so that decodes and prefills can be launched apart inside one graph.

Shapes: R slots.

Each part is the whole batch with the other part's sequences empty, and every attention kernel takes empty sequences. So
slots, tokens and addresses that a graph froze stay, while the border between the parts moves from step to step. One
program finds the border, the first sequence of another query length, and writes both parts.

    sequences        | d0  d1  d2 | p0  p1 |
    decode_starts    | 0   1   2  | 3   3  | 3     tokens; a part's start stays at the border for the other's sequences
    prefill_starts   | 3   3   3  | 3   40 | 90
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBatch:
    """The two parts of a batch of R slots, int32: query_start_loc [R+1] and seq_lens [R] of each."""

    decode_starts: torch.Tensor
    decode_lens: torch.Tensor
    prefill_starts: torch.Tensor
    prefill_lens: torch.Tensor

    @classmethod
    def make(cls, max_num_seqs: int, device: torch.device) -> SplitBatch:
        """Make the tensors of a backend."""
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        return cls(
            decode_starts=zeros(max_num_seqs + 1),
            decode_lens=zeros(max_num_seqs),
            prefill_starts=zeros(max_num_seqs + 1),
            prefill_lens=zeros(max_num_seqs),
        )


def split_batch(
    split: SplitBatch, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, *, decode_query_len: int
) -> None:
    """Write both parts of a batch of R slots; one launch.

    Decodes are the sequences of `decode_query_len` tokens before the first of another length; the others are prefills.

    Args:
        split: receives the parts
        query_start_loc: [R+1] int32
        seq_lens: [R] int32
        decode_query_len: tokens of a decode
    """
    num_seqs = seq_lens.shape[0]
    _split_kernel[(1,)](
        query_start_loc,
        seq_lens,
        split.decode_starts,
        split.decode_lens,
        split.prefill_starts,
        split.prefill_lens,
        num_seqs,
        QUERY_LEN=decode_query_len,
        BLOCK=triton.next_power_of_2(max(32, split.decode_lens.shape[0])),
        **pdl_options(),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _split_kernel(
    query_start_loc,
    seq_lens,
    decode_starts,
    decode_lens,
    prefill_starts,
    prefill_lens,
    num_seqs,
    QUERY_LEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    seq = tl.arange(0, BLOCK)
    valid = seq < num_seqs
    start = tl.load(query_start_loc + seq, mask=valid, other=0)
    end = tl.load(query_start_loc + seq + 1, mask=valid, other=0)
    seq_len = tl.load(seq_lens + seq, mask=valid, other=0)
    num_decodes = tl.min(tl.where(valid & (end - start == QUERY_LEN), num_seqs, seq))
    num_decodes = tl.minimum(num_decodes, num_seqs)
    border = tl.load(query_start_loc + num_decodes)
    is_decode = seq < num_decodes
    tl.store(decode_starts + seq, tl.minimum(start, border), mask=valid)
    tl.store(prefill_starts + seq, tl.maximum(start, border), mask=valid)
    tl.store(decode_lens + seq, tl.where(is_decode, seq_len, 0), mask=valid)
    tl.store(prefill_lens + seq, tl.where(is_decode, 0, seq_len), mask=valid)
    # Both parts end after the last sequence.
    tl.store(decode_starts + num_seqs, border)
    tl.store(prefill_starts + num_seqs, tl.load(query_start_loc + num_seqs))
