"""Inputs of the passes of a draft model, after the acceptance of a step's drafts.

Shapes: R requests, T tokens, N blocks of the longest sequence, K most drafts of a sequence.

The draft model has keys and values in the blocks of the sequences. It holds every computed token. For some sequences,
which are *ahead*, it holds the last token too, which the target has not computed yet. The first pass has the step's
number of rows for each sequence, and they begin after the tokens that the draft model holds. Where they reach the last
token, its row gives the first draft. Each further pass has one row a sequence, the draft of the pass before.

    tokens of a sequence   0 1 2 ... c | c+1 ... L-1 | L         c computed before the step, L the last token
    rows, not ahead        c ... c+q-1                           reach L if fewer than q tokens were accepted
    rows, ahead            c+1 ... c+q                           always reach L

A draft head (EAGLE) has an entry for each computed token, of the token's features and of the token that follows. So it
has the rows of the step, and each sequence reaches the last token: `shifts` is True.

Rows with a grammar are sampled after these passes. Their sequences have passes of their own then, *listed* ones, all of
one row a sequence: the first has the last token, or the entry of a head that waits for it.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options
from phonograph.kernels.triton.sampling.scan import NOT_SAMPLED
from phonograph.kernels.triton.step.logits_rows import draw_key, logits_rows
from phonograph.kernels.triton.step.step_layout import START_WORDS, SlotState, StepLayout

_NOT_SAMPLED = tl.constexpr(NOT_SAMPLED)
_START_WORDS = tl.constexpr(START_WORDS)


class DraftRows(NamedTuple):
    """Static tensors of the passes.

    ahead:           int32 [R] by slot: 1 if the draft model holds the last token
    input_ids:       int32 [T], as are the next two int64 [T]; of the first pass, or of one row a sequence
    positions:       position of each row in its sequence
    slot_mapping:    cache slot of each row; -1 after the end of a sequence and for padding
    seq_lens:        int32 [R], tokens of a sequence with the rows of the pass; 0 for padding
    query_start_loc: int32 [R+1] of passes of one row a sequence; padding repeats the number of requests
    last_rows:       int64 [R], row of the first pass that has the last token; 0 if none has. Of a listed pass: the
        step's row of the token before the last one
    sample_slots:    int32 [R], slot of a sequence whose rows reach its last token, else -1
    temperature:     float32 [R], as are top_p and min_p; top_k int32 and draw_keys int64: see `sampling.sample`
    tokens:          int32 [R], the samples of a pass
    """

    ahead: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    last_rows: torch.Tensor
    sample_slots: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    draw_keys: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def make(cls, *, max_num_seqs: int, max_num_tokens: int, device: torch.device) -> DraftRows:
        """Return the tensors of empty slots."""
        rows, tokens = max_num_seqs, max(max_num_tokens, max_num_seqs)

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            ahead=zeros(rows),
            input_ids=zeros(tokens),
            positions=zeros(tokens, torch.int64),
            slot_mapping=zeros(tokens, torch.int64),
            seq_lens=zeros(rows),
            query_start_loc=zeros(rows + 1),
            last_rows=zeros(rows, torch.int64),
            sample_slots=zeros(rows),
            temperature=zeros(rows, torch.float32),
            top_k=zeros(rows),
            top_p=zeros(rows, torch.float32),
            min_p=zeros(rows, torch.float32),
            draw_keys=zeros(rows, torch.int64),
            tokens=zeros(rows),
        )


def first_pass(
    staging: torch.Tensor,
    layout: StepLayout,
    state: SlotState,
    rows: DraftRows,
    *,
    block_size: int,
    num_reqs_padded: int,
    num_tokens_padded: int,
    tokens_L: torch.Tensor,
    input_ids_T: torch.Tensor,
    seq_lens_R: torch.Tensor,
    block_table_RN: torch.Tensor,
    history_RM: torch.Tensor | None = None,
) -> None:
    """Write the rows of the first pass.

    Args:
        staging: as `prepare` left it
        layout: of the staging buffer
        state: as `accept` left it
        rows: written
        block_size: tokens of a block
        num_reqs_padded: requests of the graph
        num_tokens_padded: tokens of the graph
        tokens_L: int32, sample of each row of logits
        input_ids_T: int32, tokens of the step
        seq_lens_R: int32, tokens of each sequence with all rows of the step
        block_table_RN: int32, blocks of the sequences of the step
        history_RM: int32, tokens of each slot, for a draft head; None for a draft model
    """
    constants, block = layout.constants, 256 if num_tokens_padded <= 1024 else 1024
    names = "SLOTS", "QUERY_STARTS", "START_AT"
    _first_rows_kernel[(num_reqs_padded, triton.cdiv(num_tokens_padded, block))](
        staging,
        state.last_token,
        state.num_computed,
        state.parameters,
        *rows[:-1],
        tokens_L,
        input_ids_T,
        seq_lens_R,
        block_table_RN,
        block_table_RN.stride(0),
        history_RM,
        0 if history_RM is None else history_RM.stride(0),
        num_reqs_padded,
        num_tokens_padded,
        BLOCK_SIZE=block_size,
        **{name: constants[name] for name in names},
        BLOCK=block,
        **pdl_options(),
        num_warps=4,
    )


def listed_pass(
    staging: torch.Tensor,
    layout: StepLayout,
    state: SlotState,
    rows: DraftRows,
    *,
    block_size: int,
    listed_G: torch.Tensor,
    seq_lens_R: torch.Tensor,
    block_table_RN: torch.Tensor,
    listed_table_GN: torch.Tensor,
    shifts: bool = False,
) -> None:
    """Write the rows of the first listed pass.

    Args:
        staging: as `prepare` left it
        layout: of the staging buffer
        state: as `accept` left it for the listed sequences
        rows: written, entry i for listed sequence i
        block_size: tokens of a block
        listed_G: int32, rows of the batch, then entries below 0 for padding
        seq_lens_R: int32, tokens of each sequence with all rows of the step
        block_table_RN: int32, blocks of the sequences of the step
        listed_table_GN: int32, receives those of the listed sequences
        shifts: as in `next_pass`
    """
    constants = layout.constants
    _listed_rows_kernel[(listed_G.shape[0],)](
        staging,
        state.last_token,
        state.num_computed,
        state.parameters,
        *rows[1:-1],
        seq_lens_R,
        block_table_RN,
        block_table_RN.stride(0),
        listed_table_GN,
        listed_table_GN.stride(0),
        listed_G,
        listed_G.shape[0],
        SLOTS=constants["SLOTS"],
        QUERY_STARTS=constants["QUERY_STARTS"],
        MOST_DRAFTS=state.drafts.shape[1],
        BLOCK_SIZE=block_size,
        SHIFT=int(shifts),
        BLOCK=256,
        **pdl_options(),
        num_warps=4,
    )


def next_pass(
    state: SlotState,
    rows: DraftRows,
    *,
    index: int,
    block_size: int,
    num_reqs_padded: int,
    block_table_RN: torch.Tensor,
    shifts: bool = False,
) -> None:
    """Keep the draft that the last pass sampled, and write the row of the next pass.

    Args:
        state: receives the draft
        rows: `tokens` are read, the others written
        index: number of the draft, from 0
        block_size: tokens of a block
        num_reqs_padded: requests of the graph
        block_table_RN: int32, blocks of the sequences of the step
        shifts: the rows are of a draft head, whose entry is that of the token before
    """
    _next_row_kernel[(num_reqs_padded,)](
        state.num_computed,
        state.parameters,
        state.drafts,
        *rows,
        block_table_RN,
        block_table_RN.stride(0),
        index,
        MOST_DRAFTS=state.drafts.shape[1],
        BLOCK_SIZE=block_size,
        SHIFT=int(shifts),
        **pdl_options(),
        num_warps=1,
    )


@triton.jit
def _draw_key(parameters, length):
    """Return the key of the draw that follows the first `length` tokens of a sequence."""
    return draw_key(tl.load(parameters + 4), tl.load(parameters + 5), length - tl.load(parameters + 6))


@triton.jit
def _write_draw(row, parameters, length, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, draw_keys_ptr):
    """Write the sampling parameters of the draw that follows the first `length` tokens of a sequence."""
    tl.store(temperature_ptr + row, tl.load((parameters + 0).to(tl.pointer_type(tl.float32))))
    tl.store(top_k_ptr + row, tl.load(parameters + 1))
    tl.store(top_p_ptr + row, tl.load((parameters + 2).to(tl.pointer_type(tl.float32))))
    tl.store(min_p_ptr + row, tl.load((parameters + 3).to(tl.pointer_type(tl.float32))))
    tl.store(draw_keys_ptr + row, _draw_key(parameters, length))


@triton.jit
def _write_place(
    positions_ptr, slot_mapping_ptr, at, position, last_position, table_row, mask, BLOCK_SIZE: tl.constexpr
):
    """Write position and cache slot of rows. From the last position on a sequence has neither blocks nor rotations."""
    has_block = position < last_position
    block = tl.load(table_row + tl.where(has_block, position // BLOCK_SIZE, 0), mask=mask, other=0)
    cache_slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(positions_ptr + at, tl.minimum(position, last_position).to(tl.int64), mask=mask)
    tl.store(slot_mapping_ptr + at, tl.where(has_block, cache_slot, -1), mask=mask)


@triton.jit(do_not_specialize=["num_reqs_padded", "num_tokens_padded"])
def _first_rows_kernel(
    staging,
    last_token_ptr,
    num_computed_ptr,
    parameters_ptr,
    ahead_ptr,
    ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    last_rows_ptr,
    sample_slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    draw_keys_ptr,
    tokens_ptr,
    input_ids_ptr,
    step_lens_ptr,
    block_table_ptr,
    block_table_stride,
    history_ptr,
    history_stride,
    num_reqs_padded,
    num_tokens_padded,
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    QUERY_STARTS: tl.constexpr,
    START_AT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, chunk) takes every chunk-th BLOCK of the row's tokens.

    The number of tokens that are computed is read where the step sampled: elsewhere it is that of the step.
    """
    pdl_begin(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    lane = chunk * BLOCK + tl.arange(0, BLOCK)
    num_reqs = tl.load(staging)
    num_tokens = tl.load(staging + 1)
    if row < num_reqs:
        slot = tl.load(staging + SLOTS + row)
        query_start = tl.load(staging + QUERY_STARTS + row)
        query_len = tl.load(staging + QUERY_STARTS + row + 1) - query_start
        first_row, _ = logits_rows(staging, row, query_start, query_start + query_len, QUERY_STARTS)
        step_len = tl.load(step_lens_ptr + row)
        context = step_len - query_len
        sampled = tl.load(tokens_ptr + first_row) != _NOT_SAMPLED
        computed = tl.where(sampled, tl.load(num_computed_ptr + slot), step_len)
        own_token = tl.load(last_token_ptr + slot)
        starts = tl.load(staging + START_AT + row) >= 0
        shift: tl.constexpr = 0 if history_ptr is None else 1
        ahead = 0 if shift else tl.where(starts, 0, tl.load(ahead_ptr + slot))
        parameters = parameters_ptr + slot * _START_WORDS
        last_position = tl.maximum(tl.load(parameters + 7) - 1, 0)

        place = query_start + lane
        position = context + ahead + lane
        is_row = lane < query_len
        forward = ahead + shift
        step_token = tl.load(input_ids_ptr + place + forward, mask=is_row & (lane + forward < query_len), other=0)
        if shift:
            # If the prompt goes on, its token after the chunk.
            own_token = tl.where(
                sampled, own_token, tl.load(history_ptr + slot.to(tl.int64) * history_stride + computed)
            )
        else:
            own_token = tl.where(sampled, own_token, 0)
        token = tl.where(position + shift == computed, own_token, step_token)
        table_row = block_table_ptr + row.to(tl.int64) * block_table_stride
        tl.store(ids_ptr + place, token, mask=is_row)
        _write_place(positions_ptr, slot_mapping_ptr, place, position, last_position, table_row, is_row, BLOCK_SIZE)
        if chunk == 0:
            reaches = sampled & (context + ahead + query_len + shift > computed)
            # No program of the row reads another value: rows of several programs are of a prefill, which is not ahead.
            tl.store(ahead_ptr + slot, reaches.to(tl.int32))
            tl.store(seq_lens_ptr + row, context + ahead + query_len)
            tl.store(query_start_loc_ptr + row, row)
            last_row = query_start + computed - shift - context - ahead
            tl.store(last_rows_ptr + row, tl.where(reaches, last_row, 0).to(tl.int64))
            tl.store(sample_slots_ptr + row, tl.where(reaches, slot, -1))
            _write_draw(row, parameters, computed + 1, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, draw_keys_ptr)
    elif chunk == 0:
        tl.store(seq_lens_ptr + row, 0)
        tl.store(query_start_loc_ptr + row, num_reqs)
        tl.store(last_rows_ptr + row, tl.zeros((), tl.int64))
        tl.store(sample_slots_ptr + row, -1)
    if row == 0:
        padding = (lane >= num_tokens) & (lane < num_tokens_padded)
        tl.store(ids_ptr + lane, 0, mask=padding)
        tl.store(positions_ptr + lane, tl.zeros((BLOCK,), tl.int64), mask=padding)
        tl.store(slot_mapping_ptr + lane, tl.full((BLOCK,), -1, tl.int64), mask=padding)
        if chunk == 0:
            tl.store(query_start_loc_ptr + num_reqs_padded, num_reqs)


@triton.jit(do_not_specialize=["index"])
def _next_row_kernel(
    num_computed_ptr,
    parameters_ptr,
    drafts_ptr,
    ahead_ptr,
    ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    last_rows_ptr,
    sample_slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    draw_keys_ptr,
    tokens_ptr,
    block_table_ptr,
    block_table_stride,
    index,
    MOST_DRAFTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row = tl.program_id(0)
    slot = tl.load(sample_slots_ptr + row)
    if slot >= 0:
        token = tl.load(tokens_ptr + row)
        length = tl.load(num_computed_ptr + slot) + 1 - SHIFT
        parameters = parameters_ptr + slot * _START_WORDS
        last_position = tl.maximum(tl.load(parameters + 7) - 1, 0)
        position = length + index
        table_row = block_table_ptr + row.to(tl.int64) * block_table_stride
        tl.store(drafts_ptr + slot * MOST_DRAFTS + index, token)
        tl.store(ids_ptr + row, tl.maximum(token, 0))
        _write_place(positions_ptr, slot_mapping_ptr, row, position, last_position, table_row, slot >= 0, BLOCK_SIZE)
        tl.store(seq_lens_ptr + row, tl.minimum(position, last_position) + 1)
        tl.store(draw_keys_ptr + row, _draw_key(parameters, position + 1 + SHIFT))
    else:
        is_padding = tl.load(query_start_loc_ptr + row) == tl.load(query_start_loc_ptr + row + 1)
        tl.store(ids_ptr + row, 0)
        tl.store(positions_ptr + row, tl.zeros((), tl.int64))
        tl.store(slot_mapping_ptr + row, tl.full((), -1, tl.int64))
        tl.store(seq_lens_ptr + row, tl.where(is_padding, 0, 1))


@triton.jit(do_not_specialize=["num_listed"])
def _listed_rows_kernel(
    staging,
    last_token_ptr,
    num_computed_ptr,
    parameters_ptr,
    ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    last_rows_ptr,
    sample_slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    draw_keys_ptr,
    step_lens_ptr,
    block_table_ptr,
    block_table_stride,
    listed_table_ptr,
    listed_table_stride,
    listed_ptr,
    num_listed,
    SLOTS: tl.constexpr,
    QUERY_STARTS: tl.constexpr,
    MOST_DRAFTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    place = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    num_reqs = 0
    for start in range(0, num_listed, BLOCK):
        row = tl.load(listed_ptr + start + lane, mask=start + lane < num_listed, other=-1)
        num_reqs += tl.sum((row >= 0).to(tl.int32), 0)
    tl.store(query_start_loc_ptr + place, tl.minimum(place, num_reqs))
    if place == 0:
        tl.store(query_start_loc_ptr + num_listed, num_reqs)
    if place < num_reqs:
        row = tl.load(listed_ptr + place)
        slot = tl.load(staging + SLOTS + row)
        query_start = tl.load(staging + QUERY_STARTS + row)
        query_end = tl.load(staging + QUERY_STARTS + row + 1)
        computed = tl.load(num_computed_ptr + slot)
        parameters = parameters_ptr + slot * _START_WORDS
        last_position = tl.maximum(tl.load(parameters + 7) - 1, 0)
        position = computed - SHIFT
        table_row = block_table_ptr + row.to(tl.int64) * block_table_stride
        tl.store(ids_ptr + place, tl.load(last_token_ptr + slot))
        _write_place(positions_ptr, slot_mapping_ptr, place, position, last_position, table_row, True, BLOCK_SIZE)
        tl.store(seq_lens_ptr + place, tl.minimum(position, last_position) + 1)
        # Row `query_end` of the step would have the position after all of its rows.
        last_row = query_end - tl.load(step_lens_ptr + row) + computed - 1
        tl.store(last_rows_ptr + place, tl.maximum(last_row, query_start).to(tl.int64))
        tl.store(sample_slots_ptr + place, slot)
        _write_draw(place, parameters, computed + 1, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, draw_keys_ptr)
        num_blocks = tl.minimum(position + MOST_DRAFTS, last_position) // BLOCK_SIZE + 1
        listed_row = listed_table_ptr + place.to(tl.int64) * listed_table_stride
        for start in range(0, num_blocks, BLOCK):
            index = start + lane
            tl.store(listed_row + index, tl.load(table_row + index, mask=index < num_blocks), mask=index < num_blocks)
    else:
        tl.store(ids_ptr + place, 0)
        tl.store(positions_ptr + place, tl.zeros((), tl.int64))
        tl.store(slot_mapping_ptr + place, tl.full((), -1, tl.int64))
        tl.store(seq_lens_ptr + place, 0)
        tl.store(last_rows_ptr + place, tl.zeros((), tl.int64))
        tl.store(sample_slots_ptr + place, -1)
