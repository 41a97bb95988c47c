"""Inputs of a step on the CPU: request state by slot, and the static tensors made from it.

A batch names slots and lengths; token ids and block tables are already in the slots. Writing a step takes a fixed
number of vectorized NumPy calls, however many requests there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from phonograph.attention.metadata import CommonMetadata
from phonograph.core.batch import ScheduledBatch
from phonograph.core.blocks import blocks_for
from phonograph.graphs.modes import GraphKey
from phonograph.runner.step_inputs import KernelRows, StepRows, SyntheticBatch, metadata_of, padded_views
from phonograph.sampling.failures import SlotFailures


class CpuInputs:
    """Static inputs of all graphs in host memory, sized for the largest step.

    Shapes, with T = max_num_tokens, R = max_num_seqs and, for each of G KV groups, N blocks of the longest sequence in
    the group with the smallest blocks:
        input_ids       [T]       int32
        positions       [T]       int64
        slot_mappings   [G, T]    int64   -1 writes nothing
        query_start_loc [R+1]     int32
        seq_lens        [R]       int32
        slots           [R]       int32   -1 for empty rows
        checkpoints     [3, R]    int32   -1 for none
        block_tables    [G, R, N] int32
        encoder_lens    [R]       int32   keys of cross attention: positions of the encoder, 0 for empty rows
        logits_rows     [L]       int64   rows of `hidden` that have logits, L = max_num_logits
        num_reqs        [1]       int32   requests of the step without padding

    Each has a NumPy view of the same name with the suffix `_np`, through which it is written.

    State of the sequences by slot: token_ids [R, max_model_len + 1], slot_blocks [G, R, N], slot_encoder_lens [R].

    Args:
        max_num_seqs: R.
        max_num_tokens: T.
        max_model_len: tokens of the longest sequence.
        block_sizes: tokens of a block in each KV group.
        max_num_logits: L; R if None.
        encoder_lens: `KVGroup.encoder_len` of each group; none if no group has it.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        max_num_logits: int | None = None,
        encoder_lens: Sequence[int] = (),
    ) -> None:
        self.block_sizes = tuple(block_sizes)
        self._encoder_lens = encoder_lens or (0,) * len(block_sizes)
        most_blocks = blocks_for(max(max_model_len, *self._encoder_lens), min(block_sizes))
        self.max_model_len = max_model_len
        # A column more, for a draft head, whose entry of a token has the next one.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        # Zeros, as each entry must be a page: kernels may read one that a sliding group never filled.
        self.slot_blocks = np.zeros((len(block_sizes), max_num_seqs, most_blocks), np.int32)
        self.slot_encoder_lens = np.full(max_num_seqs, max(self._encoder_lens), np.int32)
        self._num_tokens = [0] * max_num_seqs
        self.input_ids_np = np.zeros(max_num_tokens, np.int32)
        self.positions_np = np.zeros(max_num_tokens, np.int64)
        self.slot_mappings_np = np.full((len(block_sizes), max_num_tokens), -1, np.int64)
        self.query_start_loc_np = np.zeros(max_num_seqs + 1, np.int32)
        self.seq_lens_np = np.zeros(max_num_seqs, np.int32)
        self.encoder_lens_np = np.zeros(max_num_seqs, np.int32)
        self.slots_np = np.full(max_num_seqs, -1, np.int32)
        self.checkpoints_np = np.full((3, max_num_seqs), -1, np.int32)
        self.block_tables_np = np.zeros_like(self.slot_blocks)
        self.logits_rows_np = np.zeros(max_num_logits or max_num_seqs, np.int64)
        self.num_logits_np = np.zeros(1, np.int32)
        self.input_ids = torch.from_numpy(self.input_ids_np)
        self.positions = torch.from_numpy(self.positions_np)
        self.slot_mappings = torch.from_numpy(self.slot_mappings_np).unbind()
        self.query_start_loc = torch.from_numpy(self.query_start_loc_np)
        self.seq_lens = torch.from_numpy(self.seq_lens_np)
        self.encoder_lens = torch.from_numpy(self.encoder_lens_np)
        self.slots = torch.from_numpy(self.slots_np)
        self.checkpoints = torch.from_numpy(self.checkpoints_np)
        self.block_tables = torch.from_numpy(self.block_tables_np).unbind()
        self.logits_rows = torch.from_numpy(self.logits_rows_np)
        self.num_logits = torch.from_numpy(self.num_logits_np)
        self.drafts = torch.empty((max_num_seqs, 0), dtype=torch.int32)
        # query_start_loc of a batch of single tokens.
        self._counting = np.arange(max_num_seqs + 1, dtype=np.int32)

    def take_over(self, batch: ScheduledBatch, failures: SlotFailures) -> None:
        """Load the sequences that start, and append their new blocks."""
        for new in batch.new:
            self._num_tokens[new.slot] = len(new.token_ids)
            self.slot_encoder_lens[new.slot] = new.encoder_len or max(self._encoder_lens)
            failures.run(new.slot, "token ids", self._keep_tokens, new.slot, new.token_ids)
        self._append_blocks(batch)

    def _keep_tokens(self, slot: int, token_ids: list[int]) -> None:
        self.token_ids[slot, : len(token_ids)] = token_ids

    def _append_blocks(self, batch: ScheduledBatch) -> None:
        for append in batch.appends:
            end = append.start + len(append.block_ids)
            self.slot_blocks[append.group, append.slot, append.start : end] = append.block_ids

    def append_tokens(self, slots: list[int], runs: list[list[int]]) -> None:
        """Append sampled tokens to each slot."""
        num_tokens, max_model_len = self._num_tokens, self.max_model_len
        for slot, run in zip(slots, runs, strict=True):
            start = num_tokens[slot]
            num_tokens[slot] = end = start + len(run)
            # A sequence at the end of its context samples a token that no step reads.
            self.token_ids[slot, start : min(end, max_model_len)] = run[: max(0, max_model_len - start)]

    def share_slots(self, other: CpuInputs, *, shift: int = 0) -> None:
        """Have the tokens and blocks of another's slots, which then sees what is appended here behind its own.

        Args:
            other: has the slots.
            shift: first tokens that are left out here.
        """
        self.token_ids, self.slot_blocks = other.token_ids[:, shift:], other.slot_blocks

    def set_length(self, slot: int, num_tokens: int) -> None:
        """Append behind the first `num_tokens` tokens of a slot from now on."""
        self._num_tokens[slot] = num_tokens

    def tokens_of(self, slot: int) -> np.ndarray:
        """Return the known tokens of a slot, int32, with room for drafts behind them."""
        return self.token_ids[slot, : min(self._num_tokens[slot], self.max_model_len)]

    def drafts_behind(self, num_rows: int) -> np.ndarray:
        """Return the token behind each of the first tokens of the step, which is its draft, int32 [num_rows]."""
        return np.append(self.input_ids_np, 0)[1 : num_rows + 1]

    def write_drafts(self, slot: int, drafts: np.ndarray) -> None:
        """Write the tokens that the next step verifies behind those of the slot."""
        start = self._num_tokens[slot]
        drafts = drafts[: max(0, self.max_model_len - start)]
        self.token_ids[slot, start : start + len(drafts)] = drafts

    def prepare(self, *, num_reqs: int, num_tokens: int) -> None:
        """Do nothing: the host has written all inputs before the step."""

    def write(
        self, rows: StepRows, key: GraphKey | None, *, sampling: KernelRows | None = None
    ) -> tuple[CommonMetadata, ...]:
        """Write one step and return its metadata; see `Inputs.write`."""
        batch, slots, context_lens = rows.batch, rows.slots, rows.context_lens
        num_reqs, num_tokens = batch.num_reqs, batch.num_tokens
        query_start_loc, seq_lens = self.query_start_loc_np, self.seq_lens_np
        query_start_loc[0] = 0
        self.slots_np[:num_reqs] = slots
        rows.write_copies(self.checkpoints_np)
        self.num_logits_np[0] = rows.num_logits
        if num_tokens == num_reqs:
            query_start_loc[1 : num_reqs + 1] = self._counting[1 : num_reqs + 1]
            seq_lens[:num_reqs] = context_lens + 1
            positions, token_slots = context_lens, slots
        else:
            np.cumsum(rows.query_lens, out=query_start_loc[1 : num_reqs + 1])
            seq_lens[:num_reqs] = context_lens + rows.query_lens
            token_slots = np.repeat(slots, rows.query_lens)
            starts = np.repeat(context_lens - query_start_loc[:num_reqs], rows.query_lens)
            positions = np.arange(num_tokens) + starts
        self.positions_np[:num_tokens] = positions
        self.input_ids_np[:num_tokens] = self.token_ids[token_slots, positions]
        longest = int(seq_lens[:num_reqs].max())
        for size, length, blocks, table, mapping in zip(
            self.block_sizes,
            self._encoder_lens,
            self.slot_blocks,
            self.block_tables_np,
            self.slot_mappings_np,
            strict=True,
        ):
            if length:  # The encoder wrote these keys when the sequence started.
                table[:num_reqs] = blocks[slots]
                continue
            block, offset = np.divmod(positions, size)
            mapping[:num_tokens] = blocks[token_slots, block] * size + offset
            num_blocks = blocks_for(longest, size)
            table[:num_reqs, :num_blocks] = blocks[slots, :num_blocks]
        # Empty slots have no query and no keys; padding tokens write to no cache slot.
        padded_reqs, padded_tokens = (num_reqs, num_tokens) if key is None else (key.num_reqs, key.num_tokens)
        logits_rows, num_drafted = self.logits_rows_np, batch.num_decode_tokens
        if num_drafted > batch.num_decodes:
            logits_rows[:num_drafted] = np.arange(num_drafted)
            logits_rows[num_drafted : rows.num_logits] = query_start_loc[batch.num_decodes + 1 : num_reqs + 1] - 1
        else:
            logits_rows[:num_reqs] = query_start_loc[1 : num_reqs + 1] - 1
        if key is not None:
            logits_rows[rows.num_logits : max(key.logits, padded_reqs)] = 0
        if padded_reqs > num_reqs:
            query_start_loc[num_reqs + 1 : padded_reqs + 1] = num_tokens
            seq_lens[num_reqs:padded_reqs] = 0
            self.slots_np[num_reqs:padded_reqs] = -1
        if padded_tokens > num_tokens:
            self.input_ids_np[num_tokens:padded_tokens] = 0
            self.positions_np[num_tokens:padded_tokens] = 0
            self.slot_mappings_np[:, num_tokens:padded_tokens] = -1
        views = padded_views(self, padded_reqs, padded_tokens)
        lens_R = None
        if any(self._encoder_lens):
            lens_R = self.encoder_lens
            self.encoder_lens_np[:num_reqs], self.encoder_lens_np[num_reqs:padded_reqs] = (
                self.slot_encoder_lens[slots],
                0,
            )
        starts_cpu, lens_cpu = query_start_loc[: padded_reqs + 1], seq_lens[:padded_reqs]
        return metadata_of(rows, views, starts_cpu, lens_cpu, self._encoder_lens, lens_R, self.slot_encoder_lens)

    def load(self, batch: SyntheticBatch, key: GraphKey) -> tuple[CommonMetadata, ...]:
        """Write a synthetic batch; see `Inputs.load`."""
        rows = batch.rows()
        self.slot_encoder_lens[rows.slots] = batch.encoder_lens
        commons = self._write_tokens(rows, batch.token_ids, key)
        if not batch.writes_states:
            self.slots_np.fill(-1)
        return commons

    def host_tokens(self, rows: StepRows) -> np.ndarray:
        """Return the tokens of the step, int32 [T]."""
        return self.input_ids_np[: rows.batch.num_tokens]

    def write_tokens(
        self, rows: StepRows, token_ids_T: np.ndarray, starts_S3: np.ndarray, key: GraphKey | None
    ) -> tuple[CommonMetadata, ...]:
        """Write a step of rank 0, which has all tokens; see `Inputs.write_tokens`."""
        return self._write_tokens(rows, token_ids_T, key)

    def _write_tokens(
        self, rows: StepRows, token_ids_T: np.ndarray, key: GraphKey | None
    ) -> tuple[CommonMetadata, ...]:
        """Write a step whose tokens, int32 [T], are not in their slots yet."""
        self._append_blocks(rows.batch)
        first = np.cumsum(rows.query_lens) - rows.query_lens
        positions = np.arange(len(token_ids_T)) + np.repeat(rows.context_lens - first, rows.query_lens)
        self.token_ids[np.repeat(rows.slots, rows.query_lens), positions] = token_ids_T
        return self.write(rows, key)
