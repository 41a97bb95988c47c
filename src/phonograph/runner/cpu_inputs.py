"""Persistent state of the running requests, one row a slot, and the static inputs of a step made from it.

A step's batch names slots and lengths only; token ids and block tables are already here. So filling the buffers is a
few vectorised numpy calls whatever the number of requests, which is what keeps the host out of the way.
"""

from __future__ import annotations

import numpy as np

from phonograph.attention.metadata import CommonMetadata, CommonPrefix
from phonograph.core.batch import ScheduledBatch
from phonograph.graphs.buffers import StaticBuffers
from phonograph.graphs.modes import GraphKey
from phonograph.sampling.failures import SlotFailures


class SlotTable:
    """token_ids [R, max_model_len], block_table [R, blocks]: R = max_num_seqs rows, one a slot."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = [0] * max_num_seqs
        self.block_table = np.zeros((max_num_seqs, blocks_for(max_model_len, block_size)), np.int32)

    def apply(self, batch: ScheduledBatch, failures: SlotFailures) -> None:
        """Takes over what changed since the last step: sequences that start, and blocks that were appended.

        failures: receives the slots whose tokens cannot be taken over; they keep others, and their results are dropped
        """
        for new in batch.new:
            self.num_tokens[new.slot] = len(new.token_ids)
            failures.run(new.slot, "token ids", self._load, new.slot, new.token_ids)
        for append in batch.appends:
            self.block_table[append.slot, append.start : append.start + len(append.block_ids)] = append.block_ids

    def _load(self, slot: int, token_ids: list[int]) -> None:
        self.token_ids[slot, : len(token_ids)] = token_ids

    def append_tokens(self, slots: list[int], token_ids: list[int]) -> None:
        """Writes the sampled token of each slot behind its last one."""
        num_tokens, table = self.num_tokens, self.token_ids
        max_model_len = table.shape[1]
        for slot, token_id in zip(slots, token_ids, strict=True):
            end = num_tokens[slot]
            # A sequence that reached the context's end samples a token that it will never feed back.
            if end < max_model_len:
                table[slot, end] = token_id
            num_tokens[slot] = end + 1


def most_step_tokens(*, num_blocks: int, block_size: int, max_model_len: int, max_num_seqs: int) -> int:
    """Tokens of the largest step that the cache holds, of at most so many sequences without context."""
    whole, rest = divmod(num_blocks, blocks_for(max_model_len, block_size))
    fitting = whole * max_model_len + min(rest * block_size, max_model_len)
    return min(fitting, max_num_seqs * max_model_len)


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def fill_buffers(
    buffers: StaticBuffers,
    table: SlotTable,
    batch: ScheduledBatch,
    key: GraphKey | None,
    prefix_len: int | None = None,
) -> CommonMetadata:
    """Writes the inputs of one step, padded to `key`, and returns the metadata that views them.

    prefix_len: of the prefix to attend once, or None where the step does not cascade
    """
    num_reqs, num_tokens = batch.num_reqs, batch.num_tokens
    slots = np.array(batch.slots, np.int64)
    context_lens = np.array(batch.context_lens, np.int64)
    query_start_loc, seq_lens = buffers.query_start_loc_np, buffers.seq_lens_np
    query_start_loc[0] = 0
    if batch.num_decodes == num_reqs:
        query_start_loc[1 : num_reqs + 1] = buffers.counting_np[1 : num_reqs + 1]
        seq_lens[:num_reqs] = context_lens + 1
        positions, token_slots = context_lens, slots
    else:
        query_lens = np.array(batch.query_lens, np.int64)
        np.cumsum(query_lens, out=query_start_loc[1 : num_reqs + 1])
        seq_lens[:num_reqs] = context_lens + query_lens
        token_slots = np.repeat(slots, query_lens)
        positions = np.arange(num_tokens) + np.repeat(context_lens - query_start_loc[:num_reqs], query_lens)
    buffers.positions_np[:num_tokens] = positions
    buffers.input_ids_np[:num_tokens] = table.token_ids[token_slots, positions]
    block, offset = np.divmod(positions, table.block_size)
    buffers.slot_mapping_np[:num_tokens] = table.block_table[token_slots, block] * table.block_size + offset
    num_blocks = blocks_for(int(seq_lens[:num_reqs].max()), table.block_size)
    buffers.block_table_np[:num_reqs, :num_blocks] = table.block_table[slots, :num_blocks]
    buffers.logits_rows_np[:num_reqs] = query_start_loc[1 : num_reqs + 1] - 1
    max_query_len = max(batch.query_lens)
    return pad_buffers(
        buffers,
        key,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        num_decodes=batch.num_decodes,
        max_query_len=max_query_len,
        prefix_len=prefix_len,
    )


def pad_buffers(
    buffers: StaticBuffers,
    key: GraphKey | None,
    *,
    num_reqs: int,
    num_tokens: int,
    num_decodes: int,
    max_query_len: int,
    prefix_len: int | None,
) -> CommonMetadata:
    """Makes the rows behind the batch harmless, up to the slots and tokens of `key`, and marks the buffers prepared.

    Empty slots have no query and no keys; padded tokens write to no slot and belong to no request.
    """
    padded_reqs, padded_tokens = (num_reqs, num_tokens) if key is None else (key.num_reqs, key.num_tokens)
    if padded_reqs > num_reqs:
        buffers.query_start_loc_np[num_reqs + 1 : padded_reqs + 1] = num_tokens
        buffers.seq_lens_np[num_reqs:padded_reqs] = 0
        buffers.logits_rows_np[num_reqs:padded_reqs] = 0
    if padded_tokens > num_tokens:
        buffers.input_ids_np[num_tokens:padded_tokens] = 0
        buffers.positions_np[num_tokens:padded_tokens] = 0
        buffers.slot_mapping_np[num_tokens:padded_tokens] = -1
    if prefix_len is not None:
        buffers.prefix_len_np[0] = prefix_len
    buffers.prepared(key)
    return CommonMetadata(
        num_reqs=num_reqs,
        num_decodes=num_decodes,
        num_tokens=num_tokens,
        num_decode_tokens=int(buffers.query_start_loc_np[num_decodes]),
        max_query_len=max_query_len,
        max_seq_len=int(buffers.seq_lens_np[:num_reqs].max()),
        query_start_loc=buffers.query_start_loc[: padded_reqs + 1],
        seq_lens=buffers.seq_lens[:padded_reqs],
        block_table=buffers.block_table[:padded_reqs],
        slot_mapping=buffers.slot_mapping[:padded_tokens],
        query_start_loc_cpu=buffers.query_start_loc_np[: padded_reqs + 1],
        seq_lens_cpu=buffers.seq_lens_np[:padded_reqs],
        prefix=None if prefix_len is None else CommonPrefix(num_tokens=prefix_len, length=buffers.prefix_len),
    )
