"""Prompt lookup on the device: the last kernel of a step, which leaves drafts for the next one in the slots.

Shapes: R requests, K most drafts of a sequence, M tokens of the longest history.

The result is that of `speculation.ngram.NgramProposer` (Saxena 2023, "Prompt Lookup Decoding"): of the earlier
occurrences of the last tokens the longest one, and of equal ones the earliest.

    programs   | request 0 | request 1 | ...      each compares all places of its history with the last tokens
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options
from phonograph.kernels.triton.sampling.scan import NOT_SAMPLED
from phonograph.kernels.triton.step.logits_rows import logits_rows
from phonograph.kernels.triton.step.step_layout import SlotState, StepLayout

_NOT_SAMPLED = tl.constexpr(NOT_SAMPLED)


def propose_ngrams(
    staging: torch.Tensor,
    layout: StepLayout,
    state: SlotState,
    *,
    num_reqs_padded: int,
    tokens_L: torch.Tensor,
    history_RM: torch.Tensor,
    shortest: int,
    longest: int,
    listed_G: torch.Tensor | None = None,
) -> None:
    """Write drafts of each sequence that the step sampled. `accept` has removed the earlier ones.

    Args:
        staging: as `prepare` left it
        layout: of the staging buffer
        state: lengths as `accept` left them; receives the drafts
        num_reqs_padded: requests of the graph
        tokens_L: int32, sample of each row of logits
        history_RM: int32, tokens of each slot, the last one after the computed ones
        shortest: fewest last tokens that must occur earlier
        longest: most last tokens that are compared
        listed_G: as in `accept`
    """
    most_drafts, block = state.drafts.shape[1], min(4096, max(64, triton.next_power_of_2(history_RM.shape[1])))
    _ngram_kernel[(num_reqs_padded if listed_G is None else listed_G.shape[0],)](
        staging,
        state.num_computed,
        state.drafts,
        tokens_L,
        history_RM,
        history_RM.stride(0),
        shortest,
        longest,
        listed_G,
        SLOTS=layout.constants["SLOTS"],
        QUERY_STARTS=layout.constants["QUERY_STARTS"],
        MOST_DRAFTS=most_drafts,
        DRAFT_LANES=triton.next_power_of_2(most_drafts),
        BLOCK=block,
        **pdl_options(),
        num_warps=8,
    )


@triton.jit(do_not_specialize=["shortest", "longest"])
def _ngram_kernel(
    staging,
    num_computed_ptr,
    drafts_ptr,
    tokens_ptr,
    history_ptr,
    history_stride,
    shortest,
    longest,
    listed_ptr,
    SLOTS: tl.constexpr,
    QUERY_STARTS: tl.constexpr,
    MOST_DRAFTS: tl.constexpr,
    DRAFT_LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # A place matches by the number of tokens that end there and equal the last tokens of the history.
    pdl_begin(PDL)
    row = tl.program_id(0)
    if listed_ptr is not None:
        row = tl.load(listed_ptr + row)
    if (row < 0) | (row >= tl.load(staging)):
        return
    slot = tl.load(staging + SLOTS + row).to(tl.int64)
    query_start = tl.load(staging + QUERY_STARTS + row)
    first_row, _ = logits_rows(staging, row, query_start, query_start, QUERY_STARTS)
    if tl.load(tokens_ptr + first_row) == _NOT_SAMPLED:
        return
    last = tl.load(num_computed_ptr + slot)
    history = history_ptr + slot * history_stride
    lane = tl.arange(0, BLOCK)
    best = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, last, BLOCK):
        place = start + lane
        matched = tl.zeros((BLOCK,), tl.int32)
        alive = place < last
        length = 0
        while (length < longest) & (tl.max(alive.to(tl.int32), 0) > 0):
            wanted = tl.load(history + tl.maximum(last - length, 0))
            found = tl.load(history + place - length, mask=alive & (place >= length), other=-1)
            alive = alive & (place >= length) & (found == wanted)
            matched += alive.to(tl.int32)
            length += 1
        # The longest match first, then the earliest place.
        score = (matched.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
        best = tl.maximum(best, tl.where(matched >= shortest, score, 0))
    most = tl.max(best, 0)
    if most > 0:
        following = 0x7FFFFFFF - (most & 0x7FFFFFFF) + 1 + tl.arange(0, DRAFT_LANES)
        is_draft = tl.arange(0, DRAFT_LANES) < MOST_DRAFTS
        draft = tl.load(history + following, mask=is_draft & (following <= last), other=-1)
        tl.store(drafts_ptr + slot * MOST_DRAFTS + tl.arange(0, DRAFT_LANES), draft, mask=is_draft)
