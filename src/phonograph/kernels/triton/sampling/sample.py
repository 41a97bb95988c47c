"""Sampling inside the graph, with the host sampler's results, so that a step ends without the host.

Shapes: N rows of logits, V vocabulary, R slots, G listed rows.

There are two launches for any parameters; each program finds out on the device if it has work.
1. `scan.py` reads every row once, in parts. It serves greedy rows (the first largest logit) and rows with only a
   temperature (the largest sum of scaled logit and Gumbel noise).
2. `filter.py` does top-k, top-p and min-p, and ends at once for all other rows.
Noise and parameters mean the same as in `phonograph.kernels.torch.sampling`: tokens are the same up to the rounding of
float32 sums.

    programs of both   | row 0, part 0 | row 0, part 1 | ... | row 1, part 0 | ...    the last of a row merges its parts
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false
from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from phonograph.kernels.logit_edits import LogitEdits
from phonograph.kernels.triton.launch.pdl import pdl_options
from phonograph.kernels.triton.sampling.filter import filter_kernel
from phonograph.kernels.triton.sampling.scan import scan_kernel

_SCAN_BLOCK = 1024
_SCAN_WARPS = 4
_SCAN_PROGRAMS = 2048
_FILTER_BLOCK = 2048
_FILTER_WARPS = 8
_FILTER_PROGRAMS = 512
_SCAN_REGISTERS, _FILTER_REGISTERS = 80, 128
"""Registers that rows without edits need. More would leave fewer programs on a multiprocessor."""
_MAX_PARTS = 256
_CANDIDATES = 4096
_LEVELS = 16
"""Sums of a part of a row in the first pass: above 15 levels, and of all tokens."""


class SampleScratch(NamedTuple):
    """Scratch from `make_sample_scratch`. The counters are 0 between launches."""

    part_scores: torch.Tensor
    part_tokens: torch.Tensor
    part_maxima: torch.Tensor
    part_sums: torch.Tensor
    row_max: torch.Tensor
    row_low: torch.Tensor
    counters: torch.Tensor
    candidates: torch.Tensor


def make_sample_scratch(max_rows: int, vocab_size: int, device: torch.device) -> SampleScratch:
    """Make room for one call of `sample` at a time, with up to `max_rows` rows."""

    def most_parts(block: int, programs: int) -> int:
        return max(rows * _parts(rows, vocab_size, block, programs)[0] for rows in range(1, max_rows + 1))

    scan_parts = most_parts(_SCAN_BLOCK, _SCAN_PROGRAMS)
    empty = partial(torch.empty, device=device)
    return SampleScratch(
        part_scores=empty(scan_parts),
        part_tokens=empty(scan_parts, dtype=torch.int32),
        part_maxima=empty(scan_parts),
        part_sums=empty(most_parts(_FILTER_BLOCK, _FILTER_PROGRAMS), _LEVELS),
        row_max=empty(max_rows),
        row_low=empty(max_rows),
        counters=torch.zeros(2 * max_rows, dtype=torch.int32, device=device),
        candidates=empty(max_rows, _CANDIDATES, dtype=torch.int64),
    )


def _parts(num_rows: int, vocab_size: int, block: int, programs: int) -> tuple[int, int]:
    """Return the number of parts that a row is read in, and the blocks of each."""
    blocks = -(-vocab_size // block)
    parts = min(blocks, _MAX_PARTS, -(-programs // num_rows))
    blocks_per_part = -(-blocks // parts)
    return -(-blocks // blocks_per_part), blocks_per_part


def sample(
    logits_NV: torch.Tensor,
    slots_N: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    draw_keys_N: torch.Tensor,
    scratch: SampleScratch,
    tokens_N: torch.Tensor,
    last_token_R: torch.Tensor,
    num_computed_R: torch.Tensor,
    seq_lens_N: torch.Tensor,
    *,
    rows_G: torch.Tensor | None = None,
    edits: LogitEdits | None = None,
    most_drafts: int = 0,
    batch_invariant: bool = False,
) -> None:
    """Choose a token for each row that has a slot, into `tokens_N` and, for the next step, into the state of its slot.

    Args:
        logits_NV: bfloat16, float16 or float32; rows contiguous
        slots_N: int32; below 0, the row gets no token but -2
        temperature_N: float32; 0 is greedy, other values as bounded by the sampler
        top_k_N: int32; 0 keeps all
        top_p_N: float32; 1 keeps all
        min_p_N: float32; 0 keeps all
        draw_keys_N: int64, from `phonograph.kernels.torch.sampling.draw_keys`
        scratch: from `make_sample_scratch`
        tokens_N: int32, written; -1 where a row has NaN or +inf, or nothing but -inf
        last_token_R: int32, by slot; receives the token, or 0 where there is none
        num_computed_R: int32, by slot; receives the length of the row's sequence
        seq_lens_N: int32
        rows_G: int32; the rows to sample, each once, below 0 for none; tokens of all other rows stay as they are
        edits: bias, min_tokens and penalties of rows; None if no row can have any. Tokens of rows with edits are
            counted here
        most_drafts: most drafts of a sequence; if there are any, `accept` counts tokens instead
        batch_invariant: a row is always cut into the parts of the largest batch, because top-p depends on their sums
    """
    num_rows, vocab_size = logits_NV.shape
    if rows_G is not None:
        num_rows = rows_G.shape[0]
    assert logits_NV.stride(1) == 1 and num_rows <= scratch.row_max.shape[0]
    as_if_rows = scratch.row_max.shape[0] if batch_invariant else num_rows
    rows = logits_NV, logits_NV.stride(0), slots_N, temperature_N, top_k_N, top_p_N, min_p_N, draw_keys_N
    results = (
        tokens_N,
        last_token_R,
        num_computed_R,
        seq_lens_N,
        slots_N if rows_G is None else rows_G,
        *(edits or (None,) * len(LogitEdits._fields)),
        int(rows_G is not None),
    )
    parts, blocks = _parts(as_if_rows, vocab_size, _SCAN_BLOCK, _SCAN_PROGRAMS)
    scan_kernel[(num_rows, parts)](
        *rows,
        scratch.part_scores,
        scratch.part_tokens,
        scratch.part_maxima,
        scratch.row_max,
        scratch.row_low,
        scratch.counters,
        *results,
        blocks,
        V=vocab_size,
        BLOCK=_SCAN_BLOCK,
        MAX_PARTS=_MAX_PARTS,
        MOST_DRAFTS=most_drafts,
        **pdl_options(),
        num_warps=_SCAN_WARPS,
        maxnreg=_SCAN_REGISTERS,
    )
    parts, blocks = _parts(as_if_rows, vocab_size, _FILTER_BLOCK, _FILTER_PROGRAMS)
    filter_kernel[(num_rows, parts)](
        *rows,
        scratch.part_sums,
        scratch.row_max,
        scratch.row_low,
        scratch.counters,
        scratch.candidates,
        *results,
        blocks,
        V=vocab_size,
        ID_BITS=max(1, (vocab_size - 1).bit_length()),
        KEY_SHIFT={torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[logits_NV.dtype],
        BLOCK=_FILTER_BLOCK,
        MAX_PARTS=_MAX_PARTS,
        LEVELS=_LEVELS,
        CANDIDATES=_CANDIDATES,
        MOST_DRAFTS=most_drafts,
        **pdl_options(),
        num_warps=_FILTER_WARPS,
        maxnreg=_FILTER_REGISTERS,
    )
