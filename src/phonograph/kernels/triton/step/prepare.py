"""First kernel of every graph: makes a step's inputs on the device from one uploaded buffer.

Shapes: R requests (slots), T tokens, L rows of logits, A appended blocks, G KV groups, N blocks of the longest sequence
in the group with the smallest blocks. The tensors of a graph are padded to R' requests, T' tokens and L' rows.

1. What a sequence needs in each step lives on the device by slot (`SlotState`): its length, last token, drafts, block
   table and sampling parameters. A step can start before the host knows how the previous one ended.
2. The host uploads a single buffer of int32 words, laid out by `StepLayout`: a few numbers for each row, the blocks
   added to it, the parameters of sequences that start, and the tokens that only the host has (prompts).
3. One launch makes the tensors that the step's other kernels read, padded to the graph's shape, and the key of the
   random draw of each row of logits. Sampling writes lengths and last tokens: programs of this launch read them.
4. All tokens of a decode have a row of logits, and of a prefill the last. Decodes come first, so that the rows of
   logits are in the order of the tokens.

    programs   | row 0, chunk 0 | row 0, chunk 1 | ... | row R'-1, chunk 0 | ...   for each group
               a chunk is every chunks-th block of the row's tokens and of its block table; row 0 pads the tokens, and
               with drafts the rows of logits;
               the first group's programs also make what all groups share
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options
from phonograph.kernels.triton.step.logits_rows import draw_key, logits_rows
from phonograph.kernels.triton.step.step_layout import START_WORDS, SlotState, StepLayout

_START_WORDS = tl.constexpr(START_WORDS)


def prepare(
    staging: torch.Tensor,
    layout: StepLayout,
    state: SlotState,
    *,
    block_sizes: Sequence[int],
    num_reqs_padded: int,
    num_tokens_padded: int,
    input_ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    slot_mappings_GT: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    slots_R: torch.Tensor,
    block_tables_GRN: torch.Tensor,
    logits_rows_L: torch.Tensor,
    encoder_lens: Sequence[int] = (),
    encoder_lens_R: torch.Tensor | None = None,
    slot_encoder_lens_R: torch.Tensor | None = None,
    history_RM: torch.Tensor | None = None,
) -> None:
    """Write the first R' requests and T' tokens of a step's inputs from the staging buffer.

    Args:
        staging: int32 [layout.num_words]; what sampling reads is written, with a sample_slots of -1 for padding
        layout: of the staging buffer
        state: receives the step's new blocks, and the parameters of sequences that start
        block_sizes: tokens of a block in each group; if they differ, they are in the staging buffer too
        num_reqs_padded: R'
        num_tokens_padded: T'
        input_ids_T: int32 [>= T']; padding is 0
        positions_T: int64 [>= T']; padding is 0
        slot_mappings_GT: int64 [G, >= T']; padding is -1
        query_start_loc: int32 [>= R' + 1]; padding repeats the number of tokens
        seq_lens_R: int32 [>= R']; padding is 0
        slots_R: int32 [>= R'], slot of each sequence; -1 for padding, and in a step that writes no state
        block_tables_GRN: int32 [G, >= R', N], by row; entries after a sequence's blocks stay as they are
        logits_rows_L: int64 [>= L'], the token of each row of logits; padding is 0. L' is R' without drafts, else at
            most T', and all of it up to the end of the tensor is padded
        encoder_lens: keys of a sequence in each group of cross attention, which has no slot mapping; 0 in all others
        encoder_lens_R: int32 [>= R'], keys of cross attention; padding is 0. None if no group has it.
        slot_encoder_lens_R: int32 [R], keys of cross attention by slot; None if `encoder_lens` has them
        history_RM: int32 [R, M], tokens of each slot: receives those of prefills. None if they are not kept
    """
    assert len({*encoder_lens} - {0}) <= 1, "all layers of cross attention are in one group"
    slot_block_tables_GRN, most_drafts = state.block_tables, state.drafts.shape[1]
    num_groups, _, max_blocks = slot_block_tables_GRN.shape
    block = 256 if num_tokens_padded <= 1024 else 1024
    # With few requests, more programs copy long block tables.
    table_chunks = min(triton.cdiv(max_blocks, block), max(1, 1024 // num_reqs_padded))
    chunks = max(triton.cdiv(num_tokens_padded, block), table_chunks)
    if most_drafts:
        chunks = max(chunks, triton.cdiv(logits_rows_L.shape[0], block))
    _prepare_kernel[(num_reqs_padded, chunks, num_groups)](
        staging,
        *state,
        input_ids_T,
        positions_T,
        slot_mappings_GT,
        query_start_loc,
        seq_lens_R,
        slots_R,
        block_tables_GRN,
        logits_rows_L,
        encoder_lens_R,
        slot_encoder_lens_R,
        history_RM,
        num_reqs_padded,
        num_tokens_padded,
        slot_block_tables_GRN.stride(1),
        block_tables_GRN.stride(1),
        slot_block_tables_GRN.stride(0),
        slot_mappings_GT.stride(0),
        block_tables_GRN.stride(0),
        0 if history_RM is None else history_RM.stride(0),
        NUM_LOGITS=logits_rows_L.shape[0],
        MOST_DRAFTS=most_drafts,
        ROW_LANES=triton.next_power_of_2(1 + most_drafts),
        NUM_GROUPS=num_groups,
        BLOCK_SIZE=block_sizes[0] if len(set(block_sizes)) == 1 else 0,
        ENCODER_LEN=max(encoder_lens, default=0),
        ENCODER_GROUP=max(range(len(encoder_lens)), key=encoder_lens.__getitem__, default=0),
        **layout.constants,
        BLOCK=block,
        **pdl_options(),
        num_warps=4,
    )


def apply_appends(appends_3P: torch.Tensor, slot_block_table_RN: torch.Tensor) -> None:
    """Enter blocks into the block tables of slots, ahead of a step whose buffer cannot hold them.

    Args:
        appends_3P: int32, contiguous: slots, entries of their block tables, and block ids; no entry twice
        slot_block_table_RN: int32, by slot
    """
    num_appends = appends_3P.shape[1]
    if num_appends:
        table = slot_block_table_RN
        _append_kernel[(triton.cdiv(num_appends, 256),)](appends_3P, table, num_appends, table.stride(0), BLOCK=256)


@triton.jit
def _load_blocks(column, end, table_row, appends, append_at, num_appends):
    """Return entries `column` of a row's block table before `end`, and which are new.

    New ones are read from the staging buffer: another program may not have entered them into the table yet.
    """
    is_new = (column >= append_at) & (column < append_at + num_appends)
    wanted = column < end
    old = tl.load(table_row + column, mask=wanted & ~is_new, other=0)
    new = tl.load(appends + (column - append_at), mask=wanted & is_new, other=0)
    return tl.where(is_new, new, old), is_new


@triton.jit
def _parameter(place: tl.constexpr, entry, new, old):
    """Return a word of a slot's parameters: one that starts has new ones, which are stored."""
    starts = entry >= 0
    word = tl.load(new + place, mask=starts, other=0) | tl.load(old + place, mask=entry < 0, other=0)
    tl.store(old + place, word, mask=starts)
    return word


@triton.jit(do_not_specialize=["num_reqs_padded", "num_tokens_padded"])
def _prepare_kernel(
    staging,
    last_token_ptr,
    num_computed_ptr,
    parameters_ptr,
    drafts_ptr,
    slot_table_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    slots_ptr,
    block_table_ptr,
    logits_rows_ptr,
    encoder_lens_ptr,
    slot_encoder_lens_ptr,
    history_ptr,
    num_reqs_padded,
    num_tokens_padded,
    slot_table_stride,
    block_table_stride,
    slot_tables_stride,
    slot_mappings_stride,
    block_tables_stride,
    history_stride,
    NUM_LOGITS: tl.constexpr,
    MOST_DRAFTS: tl.constexpr,
    ROW_LANES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENCODER_LEN: tl.constexpr,
    ENCODER_GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    CONTEXT_LENS: tl.constexpr,
    QUERY_STARTS: tl.constexpr,
    TOKEN_STARTS: tl.constexpr,
    APPEND_STARTS: tl.constexpr,
    APPEND_AT: tl.constexpr,
    SAMPLES: tl.constexpr,
    START_AT: tl.constexpr,
    BLOCK_SIZES: tl.constexpr,
    APPENDS: tl.constexpr,
    STARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROW_SLOTS: tl.constexpr,
    SAMPLE_SLOTS: tl.constexpr,
    LENGTHS: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    EDITS: tl.constexpr,
    DRAW_KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, chunk, group) takes every chunk-th BLOCK of the row's tokens and of its block table of the group.

    Only latency counts, so all loads come before stores that they would have to wait for.

    BLOCK_SIZE: tokens of a block; 0 if it differs between groups
    ENCODER_LEN: most keys of cross attention, which is group ENCODER_GROUP; 0 for none
    ROW_LANES: power of two, at least the rows of logits of a sequence
    """
    pdl_begin(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    append_starts = staging + APPEND_STARTS
    append_ats = staging + APPEND_AT
    is_first: tl.constexpr = True
    if NUM_GROUPS > 1:
        group = tl.program_id(2)
        is_first = group == 0
        append_starts += group * (ROWS + 1)
        append_ats += group * ROWS
        slot_table_ptr += group.to(tl.int64) * slot_tables_stride
        slot_mapping_ptr += group.to(tl.int64) * slot_mappings_stride
        block_table_ptr += group.to(tl.int64) * block_tables_stride
    if BLOCK_SIZE:
        block_size: tl.constexpr = BLOCK_SIZE
    else:
        block_size = tl.load(staging + BLOCK_SIZES + group)
    lane = chunk * BLOCK + tl.arange(0, BLOCK)
    num_reqs = tl.load(staging)
    num_tokens = tl.load(staging + 1)
    num_decodes = tl.load(staging + 2)
    slot = tl.load(staging + SLOTS + row)
    context_len = tl.load(staging + CONTEXT_LENS + row)
    query_start = tl.load(staging + QUERY_STARTS + row)
    query_end = tl.load(staging + QUERY_STARTS + row + 1)
    token_start = tl.load(staging + TOKEN_STARTS + row)
    append_start = tl.load(append_starts + row)
    append_end = tl.load(append_starts + row + 1)
    append_at = tl.load(append_ats + row)

    if row < num_reqs:
        continues = token_start < 0
        context_len = tl.where(continues, tl.load(num_computed_ptr + slot), context_len)
        num_appends = append_end - append_start
        table_row = slot_table_ptr + slot.to(tl.int64) * slot_table_stride
        out_row = block_table_ptr + row.to(tl.int64) * block_table_stride
        appends = staging + APPENDS + append_start
        query_len = query_end - query_start
        seq_len = context_len + query_len
        # The passes of a draft model have keys behind those of the step.
        num_keys = seq_len + MOST_DRAFTS
        if ENCODER_LEN:
            if slot_encoder_lens_ptr is not None:
                encoder_len = tl.load(slot_encoder_lens_ptr + slot)
            else:
                encoder_len: tl.constexpr = ENCODER_LEN
            num_keys = tl.where(group == ENCODER_GROUP, encoder_len, num_keys)
        num_blocks = (num_keys + block_size - 1) // block_size
        # Blocks may be appended ahead of the tokens that will fill them.
        end = tl.maximum(num_blocks, append_at + num_appends)

        position = context_len + lane
        is_token = lane < query_len
        entry = tl.load(staging + START_AT + row)
        new, old = staging + STARTS + entry * _START_WORDS, parameters_ptr + slot * _START_WORDS
        column = tl.where(is_token, position // block_size, end)  # the end is not loaded
        token_block, _ = _load_blocks(column, end, table_row, appends, append_at, num_appends)
        host_token = tl.load(staging + TOKENS + token_start + lane, mask=is_token & (token_start >= 0), other=0)
        own_token = tl.load(last_token_ptr + slot)
        if MOST_DRAFTS:
            # A draft that there is not is a token like any other, which sampling accepts if it chooses it.
            is_draft = (lane > 0) & (lane <= MOST_DRAFTS)
            draft = tl.load(drafts_ptr + slot * MOST_DRAFTS + lane - 1, mask=is_token & is_draft, other=0)
            own_token = tl.where(is_draft, tl.maximum(draft, 0), own_token)
        block_ids, is_new = _load_blocks(lane, end, table_row, appends, append_at, num_appends)

        token = query_start + lane
        is_shared = is_token & is_first
        tl.store(input_ids_ptr + token, tl.where(token_start >= 0, host_token, own_token), mask=is_shared)
        kv_slot = token_block.to(tl.int64) * block_size + position % block_size
        if history_ptr is not None:
            history_row = history_ptr + slot.to(tl.int64) * history_stride
            tl.store(history_row + position, host_token, mask=is_shared & (row >= num_decodes))
        if MOST_DRAFTS:
            # The last token that a sequence can have is never computed. Drafts reach beyond it where a step that is in
            # flight accepts more than the least; there the sequence has no blocks, and its positions no rotation.
            last = tl.where(entry >= 0, tl.load(new + 7, mask=entry >= 0, other=0), tl.load(old + 7)) - 1
            kv_slot = tl.where(position < last, kv_slot, -1)
            position = tl.minimum(position, tl.maximum(last, 0))
        if ENCODER_LEN:
            kv_slot = tl.where(group == ENCODER_GROUP, -1, kv_slot)
        tl.store(positions_ptr + token, position.to(tl.int64), mask=is_shared)
        tl.store(slot_mapping_ptr + token, kv_slot, mask=is_token)
        tl.store(out_row + lane, block_ids, mask=lane < num_blocks)
        tl.store(table_row + lane, block_ids, mask=is_new)
        if (chunk == 0) & is_first:
            tl.store(query_start_loc_ptr + row, query_start)
            tl.store(seq_lens_ptr + row, seq_len)
            if ENCODER_LEN:
                tl.store(encoder_lens_ptr + row, encoder_len)
            tl.store(slots_ptr + row, tl.where(tl.load(staging + 4) > 0, slot, -1))
            num_rows, first_row = 1, row
            if MOST_DRAFTS:
                first_row, num_rows = logits_rows(staging, row, query_start, query_end, QUERY_STARTS)
            index = tl.arange(0, ROW_LANES)
            of_row, has_row = first_row + index, index < num_rows
            length = seq_len - num_rows + 1 + index
            tl.store(logits_rows_ptr + of_row, (query_end - num_rows + index).to(tl.int64), mask=has_row)
            samples = tl.load(staging + SAMPLES + row)
            tl.store(staging + ROW_SLOTS + of_row, slot, mask=has_row)
            tl.store(staging + SAMPLE_SLOTS + of_row, tl.where(samples > 0, slot, -1), mask=has_row)
            tl.store(staging + LENGTHS + of_row, length, mask=has_row)
            tl.store(staging + TEMPERATURE + of_row, _parameter(0, entry, new, old), mask=has_row)
            tl.store(staging + TOP_K + of_row, _parameter(1, entry, new, old), mask=has_row)
            tl.store(staging + TOP_P + of_row, _parameter(2, entry, new, old), mask=has_row)
            tl.store(staging + MIN_P + of_row, _parameter(3, entry, new, old), mask=has_row)
            edits, must_not_end = _parameter(8, entry, new, old), length < _parameter(9, entry, new, old)
            tl.store(staging + EDITS + of_row, tl.where(must_not_end, 2 * edits, edits), mask=has_row)
            low, high = _parameter(4, entry, new, old), _parameter(5, entry, new, old)
            # The number of tokens that the request has generated is the index of its draw.
            key = draw_key(low, high, length - _parameter(6, entry, new, old))
            tl.store((staging + DRAW_KEYS + 2 * of_row).to(tl.pointer_type(tl.int64)), key, mask=has_row)
            if MOST_DRAFTS:
                _parameter(7, entry, new, old)

        step = tl.num_programs(1) * BLOCK
        for first in range(chunk * BLOCK + step, end, step):
            column = first + tl.arange(0, BLOCK)
            block_ids, is_new = _load_blocks(column, end, table_row, appends, append_at, num_appends)
            tl.store(out_row + column, block_ids, mask=column < num_blocks)
            tl.store(table_row + column, block_ids, mask=is_new)
    elif (chunk == 0) & is_first:
        tl.store(query_start_loc_ptr + row, num_tokens)
        tl.store(seq_lens_ptr + row, 0)
        if ENCODER_LEN:
            tl.store(encoder_lens_ptr + row, 0)
        tl.store(slots_ptr + row, -1)
        if not MOST_DRAFTS:
            tl.store(logits_rows_ptr + row, tl.zeros((), tl.int64))
            tl.store(staging + SAMPLE_SLOTS + row, -1)

    if row == 0:
        padding = (lane >= num_tokens) & (lane < num_tokens_padded)
        tl.store(input_ids_ptr + lane, 0, mask=padding & is_first)
        tl.store(positions_ptr + lane, tl.zeros((BLOCK,), tl.int64), mask=padding & is_first)
        tl.store(slot_mapping_ptr + lane, tl.full((BLOCK,), -1, tl.int64), mask=padding)
        if MOST_DRAFTS:
            unused = (lane >= tl.load(staging + 3)) & (lane < NUM_LOGITS) & is_first
            tl.store(logits_rows_ptr + lane, tl.zeros((BLOCK,), tl.int64), mask=unused)
            tl.store(staging + SAMPLE_SLOTS + lane, -1, mask=unused)
        if (chunk == 0) & is_first:
            tl.store(query_start_loc_ptr + num_reqs_padded, num_tokens)


@triton.jit(do_not_specialize=["num_appends"])
def _append_kernel(appends_ptr, table_ptr, num_appends, table_stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_appends
    slot = tl.load(appends_ptr + index, mask=mask, other=0).to(tl.int64)
    column = tl.load(appends_ptr + num_appends + index, mask=mask, other=0)
    block_id = tl.load(appends_ptr + 2 * num_appends + index, mask=mask, other=0)
    tl.store(table_ptr + slot * table_stride + column, block_id, mask=mask)
