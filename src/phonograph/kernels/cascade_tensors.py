"""Tensors that cascade attention cuts a batch into, for both kernel sets.

They live as long as the backend: graphs freeze their addresses, and one graph serves every length of the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCut:
    """A batch of R slots as one sequence of all its queries over the prefix, and R sequences over their suffixes.

    Shapes, int32, with N blocks in the longest sequence:
        prefix_starts [2]    0, from the start, and the batch's tokens
        prefix_lens   [1]    keys of the prefix
        suffix_lens   [R]    keys after the prefix; 0 in empty slots
        suffix_table  [R, N] blocks after the prefix; entries after a sequence's blocks stay as they are
    """

    prefix_starts: torch.Tensor
    prefix_lens: torch.Tensor
    suffix_lens: torch.Tensor
    suffix_table: torch.Tensor

    @classmethod
    def make(cls, max_num_seqs: int, max_blocks: int, device: torch.device) -> PrefixCut:
        """Make the tensors of a backend."""
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        return cls(
            prefix_starts=zeros(2),
            prefix_lens=zeros(1),
            suffix_lens=zeros(max_num_seqs),
            suffix_table=zeros(max_num_seqs, max_blocks),
        )
