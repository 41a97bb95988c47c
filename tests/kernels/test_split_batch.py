"""The cut of a batch into decodes and prefills, on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phonograph.kernels.triton.attention.split_batch import SplitBatch, split_batch


def cut(query_lens: list[int], seq_lens: list[int], query_len: int) -> tuple[list[list[int]], int]:
    """Return the expected result by definition: starts and lengths of both parts, and the number of decodes."""
    num_decodes = 0
    while num_decodes < len(query_lens) and query_lens[num_decodes] == query_len:
        num_decodes += 1
    decode = [length if row < num_decodes else 0 for row, length in enumerate(query_lens)]
    prefill = [0 if row < num_decodes else length for row, length in enumerate(query_lens)]
    border = num_decodes * query_len
    return [
        np.cumsum([0, *decode]).tolist(),
        seq_lens[:num_decodes] + [0] * (len(seq_lens) - num_decodes),
        np.cumsum([border, *prefill]).tolist(),
        [0] * num_decodes + seq_lens[num_decodes:],
    ], num_decodes


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("max_num_seqs", [1, 5, 40])
def test_cut(max_num_seqs: int, query_len: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rng = np.random.default_rng(max_num_seqs)
    split = SplitBatch.make(max_num_seqs, device)
    found = set()
    for _ in range(12):
        num_seqs = int(rng.integers(1, max_num_seqs + 1))
        decodes, prefills = (int(number) for number in rng.multinomial(num_seqs, [0.5, 0.3, 0.2])[:2])
        query_lens = [query_len] * decodes + rng.integers(1, 9, prefills).tolist()
        query_lens += [0] * (num_seqs - decodes - prefills)
        seq_lens = [length and length + int(rng.integers(0, 50)) for length in query_lens]
        for tensor in (split.decode_starts, split.decode_lens, split.prefill_starts, split.prefill_lens):
            tensor.fill_(-7)
        starts = torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32, device=device)
        lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        split_batch(split, starts, lens, decode_query_len=query_len)
        expected, num_decodes = cut(query_lens, seq_lens, query_len)
        got = [split.decode_starts, split.decode_lens, split.prefill_starts, split.prefill_lens]
        sizes = [num_seqs + 1, num_seqs, num_seqs + 1, num_seqs]
        assert [tensor[:size].tolist() for tensor, size in zip(got, sizes, strict=True)] == expected
        assert all((tensor[size:] == -7).all() for tensor, size in zip(got, sizes, strict=True))
        found.add((num_decodes > 0, num_decodes < num_seqs))
    assert len(found) >= 2, "the batches were all of one kind"
