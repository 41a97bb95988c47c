"""Acceptance of drafts on the device, after the sampling of all rows of logits.

Shapes: R requests, L rows of logits, T tokens, K most drafts of a sequence, M tokens of the longest history.

Each row of logits was sampled with the noise of the draw that it stands for. A draft is kept if it equals the sample
of the row before it, so that a sequence gets the tokens that it gets without drafts (see `sampling.accept`). The
drafts are the tokens that the step computed, so a row whose next token happens to equal its sample is right too.

    programs   | request 0 | request 1 | ...
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options
from phonograph.kernels.triton.sampling.scan import NOT_SAMPLED, descend
from phonograph.kernels.triton.step.logits_rows import logits_rows
from phonograph.kernels.triton.step.step_layout import SlotState, StepLayout

DRAFTS_SHIFT = 8
LENGTH_MASK = (1 << DRAFTS_SHIFT) - 1
"""A count of `accept` is the number of tokens, and the number of drafts that were verified above these bits."""
_NOT_SAMPLED = tl.constexpr(NOT_SAMPLED)
_SHIFT = tl.constexpr(DRAFTS_SHIFT)


def accept(
    staging: torch.Tensor,
    layout: StepLayout,
    state: SlotState,
    *,
    num_reqs_padded: int,
    tokens_L: torch.Tensor,
    input_ids_T: torch.Tensor,
    counts_R: torch.Tensor,
    history_RM: torch.Tensor,
    synthetic_K: torch.Tensor | None = None,
    words_RV: torch.Tensor | None = None,
    listed_G: torch.Tensor | None = None,
) -> None:
    """Count the tokens that each sequence gets, and write the state of its slot.

    Args:
        staging: as `prepare` left it
        layout: of the staging buffer
        state: receives last tokens and lengths of the sequences that the step sampled, and loses their drafts
        num_reqs_padded: requests of the graph
        tokens_L: int32, sample of each row of logits
        input_ids_T: int32, tokens of the step
        counts_R: int32, written by row of the batch: the tokens that a sequence gets, see `DRAFTS_SHIFT`; 1 where the
            step did not sample it
        history_RM: int32, tokens of each slot; the new ones are appended
        synthetic_K: float32, share of sequences that keep their first 1, 2, ... drafts, whatever these are, for benches
            with random weights; None to keep what is right
        words_RV: see `LogitEdits`; receives the counts of tokens of sequences with edits
        listed_G: int32, rows of the batch, below 0 for none; None for all of the batch
    """
    most_drafts = state.drafts.shape[1]
    _accept_kernel[(num_reqs_padded if listed_G is None else listed_G.shape[0],)](
        staging,
        state.last_token,
        state.num_computed,
        state.drafts,
        tokens_L,
        input_ids_T,
        counts_R,
        history_RM,
        history_RM.stride(0),
        synthetic_K,
        words_RV,
        0 if words_RV is None else words_RV.stride(0),
        listed_G,
        SLOTS=layout.constants["SLOTS"],
        QUERY_STARTS=layout.constants["QUERY_STARTS"],
        TOKEN_STARTS=layout.constants["TOKEN_STARTS"],
        LENGTHS=layout.constants["LENGTHS"],
        EDITS=layout.constants["EDITS"],
        DRAW_KEYS=layout.constants["DRAW_KEYS"],
        MOST_DRAFTS=most_drafts,
        MOST_TOKENS=history_RM.shape[1],
        ROW_LANES=triton.next_power_of_2(1 + most_drafts),
        **pdl_options(),
        num_warps=1,
    )


@triton.jit
def _accept_kernel(
    staging,
    last_token_ptr,
    num_computed_ptr,
    drafts_ptr,
    tokens_ptr,
    input_ids_ptr,
    counts_ptr,
    history_ptr,
    history_stride,
    synthetic_ptr,
    words_ptr,
    words_stride,
    listed_ptr,
    SLOTS: tl.constexpr,
    QUERY_STARTS: tl.constexpr,
    TOKEN_STARTS: tl.constexpr,
    LENGTHS: tl.constexpr,
    EDITS: tl.constexpr,
    DRAW_KEYS: tl.constexpr,
    MOST_DRAFTS: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
    ROW_LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row = tl.program_id(0)
    if listed_ptr is not None:
        row = tl.load(listed_ptr + row)
    if (row < 0) | (row >= tl.load(staging)):
        return
    slot = tl.load(staging + SLOTS + row).to(tl.int64)
    query_start = tl.load(staging + QUERY_STARTS + row)
    query_end = tl.load(staging + QUERY_STARTS + row + 1)
    first, num_rows = logits_rows(staging, row, query_start, query_end, QUERY_STARTS)

    index = tl.arange(0, ROW_LANES)
    token = tl.load(tokens_ptr + first + index, mask=index < num_rows, other=-1)
    drafts = drafts_ptr + slot * MOST_DRAFTS
    # Decodes of synthetic batches have tokens, so drafts, from the host.
    has_all = tl.load(staging + TOKEN_STARTS + row) >= 0
    own = tl.load(drafts + index, mask=index < num_rows - 1, other=-1)
    draft = tl.load(input_ids_ptr + query_start + 1 + index, mask=index < num_rows - 1, other=-1)
    # The run ends with the first row whose draft is another token, or with the last row.
    ends = token != draft
    if synthetic_ptr is not None:
        draw_key = tl.load((staging + DRAW_KEYS + 2 * first).to(tl.pointer_type(tl.int64)))
        drawn = (descend(draw_key.to(tl.uint64), tl.full((), 0, tl.uint64)) >> 40).to(
            tl.float32
        ) * 5.9604644775390625e-8
        ends = drawn >= tl.load(synthetic_ptr + index, mask=index < MOST_DRAFTS, other=0.0)
        has_all = True
    ends = ends | (index >= num_rows - 1)
    count = tl.min(tl.where(ends, index, ROW_LANES), 0) + 1
    length = tl.load(staging + LENGTHS + first)
    sampled = tl.load(tokens_ptr + first) != _NOT_SAMPLED
    if sampled:
        # Loads of the drafts come first, because the counts end them.
        last = tl.max(tl.where(index == count - 1, token, -1), 0)
        verified = tl.sum((((own >= 0) | has_all) & (index < num_rows - 1)).to(tl.int32), 0)
        tl.store(counts_ptr + row, count + (verified << _SHIFT))
        tl.store(last_token_ptr + slot, tl.maximum(last, 0))
        tl.store(num_computed_ptr + slot, length - 1 + count)
        place = length + index
        kept = (index < count) & (place < MOST_TOKENS)
        tl.store(history_ptr + slot * history_stride + place, tl.maximum(token, 0), mask=kept)
        if words_ptr is not None:
            # A run may have a token twice.
            counted = (index < count) & (token >= 0) & (tl.load(staging + EDITS + first) > 0)
            tl.atomic_add(words_ptr + slot * words_stride + tl.maximum(token, 0), 1, mask=counted)
        tl.store(drafts + index, -1, mask=index < MOST_DRAFTS)
    else:
        tl.store(counts_ptr + row, 1)
