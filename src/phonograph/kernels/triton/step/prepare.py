"""First kernel of every graph: makes a step's inputs on the device from one uploaded buffer.

Shapes: R requests (slots), T tokens, A appended blocks, G KV groups, N blocks of the longest sequence in the group with
the smallest blocks. The tensors of a graph are padded to R' requests and T' tokens.

1. Last tokens and block tables live on the device by slot, so that a step can start before the host knows the tokens of
   the previous step.
2. The host uploads a single buffer of int32 words, laid out by `StepLayout`: a few numbers for each row, the blocks
   added to it, and the tokens that only the host has (prompts).
3. One launch makes the tensors that the step's other kernels read, padded to the graph's shape.

    programs   | row 0, chunk 0 | row 0, chunk 1 | ... | row R'-1, chunk 0 | ...   for each group
               a chunk is every chunks-th block of the row's tokens and of its block table; row 0 pads the tokens too;
               the first group's programs also make what all groups share
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options

_HEADER = 8
_PREFIX_LEN = 3
"""Word of the header that `cascade.cut_prefix` reads."""
_ALIGN = 4
"""Alignment of fields, in words: 16 bytes, which is enough for the int64 draw keys."""
_READ_BY_KERNEL = (
    "slots", "context_lens", "query_starts", "token_starts", "append_starts", "append_at", "sample_slots",
    "block_sizes", "appends", "tokens",
)  # fmt: skip


class HostViews(NamedTuple):
    """Fields of a staging buffer as numpy arrays on its memory, by row of the batch.

    header:        int32 [8]: numbers of requests, of tokens and of decodes, and the length of a cascade's prefix; the
                   rest is not read
    slots:         int32 [R]
    context_lens:  int32 [R]   tokens computed before this step
    query_starts:  int32 [R+1] running sum of the query lengths, from 0; `num_reqs + 1` entries are read
    token_starts:  int32 [R]   first of the row's tokens in `tokens`; -1 if its one token is the last token of its slot
    append_starts: int32 [G, R+1] the row's new blocks are `appends[append_starts[g, r] : append_starts[g, r + 1]]`
    append_at:     int32 [G, R] entry of the slot's block table for the first new block
    sample_slots:  int32 [R]   slot for the token that the sampling kernel chooses, or -1; `prepare` sets it to -1 in
                               the padding rows of the device's copy
    temperature, top_p, min_p: float32 [R];  top_k: int32 [R];  draw_keys: int64 [R]; see `sampling.sample`
    block_sizes:   int32 [G]   tokens of a block, the same in every step; empty for a single group
    appends:       int32 [A]   block ids of all groups
    tokens:        int32 [T]   token ids, of the rows with a token_start
    """

    header: np.ndarray
    slots: np.ndarray
    context_lens: np.ndarray
    query_starts: np.ndarray
    token_starts: np.ndarray
    append_starts: np.ndarray
    append_at: np.ndarray
    sample_slots: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    draw_keys: np.ndarray
    block_sizes: np.ndarray
    appends: np.ndarray
    tokens: np.ndarray


class SamplingViews(NamedTuple):
    """Fields that the sampling kernel reads in the staging buffer; `slots` is for rows sampled after the step."""

    slots: torch.Tensor
    sample_slots: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    draw_keys: torch.Tensor


class StepLayout:
    """Layout of a staging buffer of `num_words` int32 words.

    The areas of changing size come last, so that a step uploads no more than `used_words`.

    fields: element type and words of each field, in the order of `HostViews`
    """

    def __init__(self, max_num_seqs: int, max_num_tokens: int, max_appends: int, *, num_groups: int = 1) -> None:
        rows, self.max_appends, self.num_groups = max_num_seqs, max_appends, num_groups
        self.fields: dict[str, tuple[str, slice]] = {}
        self.num_words = 0
        for name, dtype, words in (
            ("header", "int32", _HEADER),
            ("slots", "int32", rows),
            ("context_lens", "int32", rows),
            ("query_starts", "int32", rows + 1),
            ("token_starts", "int32", rows),
            ("append_starts", "int32", num_groups * (rows + 1)),
            ("append_at", "int32", num_groups * rows),
            ("sample_slots", "int32", rows),
            ("temperature", "float32", rows),
            ("top_k", "int32", rows),
            ("top_p", "float32", rows),
            ("min_p", "float32", rows),
            ("draw_keys", "int64", 2 * rows),
            ("block_sizes", "int32", num_groups if num_groups > 1 else 0),
            ("appends", "int32", max_appends),
            ("tokens", "int32", max_num_tokens),
        ):
            self.fields[name] = dtype, slice(self.num_words, self.num_words + words)
            self.num_words += -(-words // _ALIGN) * _ALIGN
        self.constants = {name.upper(): self._start(name) for name in _READ_BY_KERNEL} | {"ROWS": rows}

    def host_views(self, words: np.ndarray) -> HostViews:
        """Return views of a staging buffer on the host, int32 [num_words], in memory aligned to 8 bytes."""
        views = HostViews(*(words[where].view(dtype) for dtype, where in self.fields.values()))
        by_group = {name: getattr(views, name).reshape(self.num_groups, -1) for name in ("append_starts", "append_at")}
        return views._replace(**by_group)

    def sampling_views(self, staging: torch.Tensor) -> SamplingViews:
        """Return views of the staging buffer on the device, int32 [num_words]."""
        fields = (self.fields[name] for name in SamplingViews._fields)
        return SamplingViews(*(staging[where].view(getattr(torch, dtype)) for dtype, where in fields))

    def prefix_len(self, staging: torch.Tensor) -> torch.Tensor:
        """Return the prefix's length in the staging buffer on the device, [1] int32."""
        start = self._start("header") + _PREFIX_LEN
        return staging[start : start + 1]

    def num_reqs(self, staging: torch.Tensor) -> torch.Tensor:
        """Return the number of requests in the staging buffer on the device, [1] int32."""
        start = self._start("header")
        return staging[start : start + 1]

    def used_words(self, *, num_appends: int, num_tokens: int) -> int:
        """Return the words to upload, from the buffer's start, with that many appended blocks and host tokens."""
        if num_tokens:
            return self._start("tokens") + num_tokens
        return self._start("appends") + num_appends

    def _start(self, name: str) -> int:
        return self.fields[name][1].start


def prepare(
    staging: torch.Tensor,
    layout: StepLayout,
    *,
    last_token_R: torch.Tensor,
    slot_block_tables_GRN: torch.Tensor,
    block_sizes: Sequence[int],
    num_reqs_padded: int,
    num_tokens_padded: int,
    input_ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    slot_mappings_GT: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    block_tables_GRN: torch.Tensor,
    logits_rows_R: torch.Tensor,
) -> None:
    """Write the first R' requests and T' tokens of a step's inputs from the staging buffer.

    Args:
        staging: int32 [layout.num_words]; padding rows of its sample_slots are set to -1
        layout: of the staging buffer
        last_token_R: int32 [R], by slot
        slot_block_tables_GRN: int32 [G, R, N], by slot; receives the step's new blocks
        block_sizes: tokens of a block in each group; if they differ, they are in the staging buffer too
        num_reqs_padded: R'
        num_tokens_padded: T'
        input_ids_T: int32 [>= T']; padding is 0
        positions_T: int64 [>= T']; padding is 0
        slot_mappings_GT: int64 [G, >= T']; padding is -1
        query_start_loc: int32 [>= R' + 1]; padding repeats the number of tokens
        seq_lens_R: int32 [>= R']; padding is 0
        block_tables_GRN: int32 [G, >= R', N], by row; entries after a sequence's blocks stay as they are
        logits_rows_R: int64 [>= R'], the row of each request's last token; padding is 0
    """
    num_groups, _, max_blocks = slot_block_tables_GRN.shape
    block = 256 if num_tokens_padded <= 1024 else 1024
    # With few requests, more programs copy long block tables.
    table_chunks = min(triton.cdiv(max_blocks, block), max(1, 1024 // num_reqs_padded))
    chunks = max(triton.cdiv(num_tokens_padded, block), table_chunks)
    _prepare_kernel[(num_reqs_padded, chunks, num_groups)](
        staging,
        last_token_R,
        slot_block_tables_GRN,
        input_ids_T,
        positions_T,
        slot_mappings_GT,
        query_start_loc,
        seq_lens_R,
        block_tables_GRN,
        logits_rows_R,
        num_reqs_padded,
        num_tokens_padded,
        slot_block_tables_GRN.stride(1),
        block_tables_GRN.stride(1),
        slot_block_tables_GRN.stride(0),
        slot_mappings_GT.stride(0),
        block_tables_GRN.stride(0),
        NUM_GROUPS=num_groups,
        BLOCK_SIZE=block_sizes[0] if len(set(block_sizes)) == 1 else 0,
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


@triton.jit(do_not_specialize=["num_reqs_padded", "num_tokens_padded"])
def _prepare_kernel(
    staging,
    last_token_ptr,
    slot_table_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    logits_rows_ptr,
    num_reqs_padded,
    num_tokens_padded,
    slot_table_stride,
    block_table_stride,
    slot_tables_stride,
    slot_mappings_stride,
    block_tables_stride,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    CONTEXT_LENS: tl.constexpr,
    QUERY_STARTS: tl.constexpr,
    TOKEN_STARTS: tl.constexpr,
    APPEND_STARTS: tl.constexpr,
    APPEND_AT: tl.constexpr,
    SAMPLE_SLOTS: tl.constexpr,
    BLOCK_SIZES: tl.constexpr,
    APPENDS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, chunk, group) takes every chunk-th BLOCK of the row's tokens and of its block table of the group.

    Only latency counts, so all loads come before stores that they would have to wait for.

    BLOCK_SIZE: tokens of a block; 0 if it differs between groups
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
    slot = tl.load(staging + SLOTS + row)
    context_len = tl.load(staging + CONTEXT_LENS + row)
    query_start = tl.load(staging + QUERY_STARTS + row)
    query_end = tl.load(staging + QUERY_STARTS + row + 1)
    token_start = tl.load(staging + TOKEN_STARTS + row)
    append_start = tl.load(append_starts + row)
    append_end = tl.load(append_starts + row + 1)
    append_at = tl.load(append_ats + row)

    if row < num_reqs:
        num_appends = append_end - append_start
        table_row = slot_table_ptr + slot.to(tl.int64) * slot_table_stride
        out_row = block_table_ptr + row.to(tl.int64) * block_table_stride
        appends = staging + APPENDS + append_start
        query_len = query_end - query_start
        seq_len = context_len + query_len
        num_blocks = (seq_len + block_size - 1) // block_size
        # Blocks may be appended ahead of the tokens that will fill them.
        end = tl.maximum(num_blocks, append_at + num_appends)

        position = context_len + lane
        is_token = lane < query_len
        column = tl.where(is_token, position // block_size, end)  # the end is not loaded
        token_block, _ = _load_blocks(column, end, table_row, appends, append_at, num_appends)
        host_token = tl.load(staging + TOKENS + token_start + lane, mask=is_token & (token_start >= 0), other=0)
        last_token = tl.load(last_token_ptr + slot)
        block_ids, is_new = _load_blocks(lane, end, table_row, appends, append_at, num_appends)

        token = query_start + lane
        is_shared = is_token & is_first
        tl.store(input_ids_ptr + token, tl.where(token_start >= 0, host_token, last_token), mask=is_shared)
        tl.store(positions_ptr + token, position.to(tl.int64), mask=is_shared)
        kv_slot = token_block.to(tl.int64) * block_size + position % block_size
        tl.store(slot_mapping_ptr + token, kv_slot, mask=is_token)
        tl.store(out_row + lane, block_ids, mask=lane < num_blocks)
        tl.store(table_row + lane, block_ids, mask=is_new)
        if (chunk == 0) & is_first:
            tl.store(query_start_loc_ptr + row, query_start)
            tl.store(seq_lens_ptr + row, seq_len)
            tl.store(logits_rows_ptr + row, (query_end - 1).to(tl.int64))

        step = tl.num_programs(1) * BLOCK
        for first in range(chunk * BLOCK + step, end, step):
            column = first + tl.arange(0, BLOCK)
            block_ids, is_new = _load_blocks(column, end, table_row, appends, append_at, num_appends)
            tl.store(out_row + column, block_ids, mask=column < num_blocks)
            tl.store(table_row + column, block_ids, mask=is_new)
    elif (chunk == 0) & is_first:
        tl.store(query_start_loc_ptr + row, num_tokens)
        tl.store(seq_lens_ptr + row, 0)
        tl.store(logits_rows_ptr + row, tl.zeros((), tl.int64))
        tl.store(staging + SAMPLE_SLOTS + row, -1)

    if row == 0:
        padding = (lane >= num_tokens) & (lane < num_tokens_padded)
        tl.store(input_ids_ptr + lane, 0, mask=padding & is_first)
        tl.store(positions_ptr + lane, tl.zeros((BLOCK,), tl.int64), mask=padding & is_first)
        tl.store(slot_mapping_ptr + lane, tl.full((BLOCK,), -1, tl.int64), mask=padding)
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
