"""A step as arrays, and the protocol that writes it into the static tensors of the graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from phonograph.attention.metadata import CommonMetadata
from phonograph.core.batch import BlockAppend, ScheduledBatch, StateCopy
from phonograph.graphs.modes import GraphKey
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.sampler import KernelParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """One step as arrays by row, decodes first.

    batch:        the step from the scheduler
    slots:        int64 [N], as are `context_lens`, `query_lens` and `draws`
    samples:      bool [N], True where the row samples a next token
    draws:        tokens that the request has generated so far, which is the index of its next random draw
    owners:       int64 [L], sequence of each row of logits: all tokens of a decode have one, of a prefill the last
    """

    batch: ScheduledBatch
    slots: np.ndarray
    context_lens: np.ndarray
    query_lens: np.ndarray
    samples: np.ndarray
    draws: np.ndarray
    owners: np.ndarray

    @property
    def num_logits(self) -> int:
        return len(self.owners)

    def logits_spans(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first row of logits of each sequence, and their number, int64 [N]."""
        counts = np.bincount(self.owners)
        return np.cumsum(counts) - counts, counts

    def write_copies(self, checkpoints_3R: np.ndarray) -> None:
        """Write the checkpoints of states that the step reads and writes, for `Inputs.checkpoints`."""
        checkpoints_3R.fill(-1)
        batch = self.batch
        if batch.restored or batch.saved:
            row_of = {slot: row for row, slot in enumerate(batch.slots)}
            for one in batch.restored:
                checkpoints_3R[0, row_of[one.slot]] = one.row
            for one in batch.saved:
                checkpoints_3R[1:, row_of[one.slot]] = one.row, one.num_tokens


class KernelRows(NamedTuple):
    """Rows that the step's own kernels sample, bool [N], and the sampling parameters of the sequences that start.

    The parameters are in the order of `ScheduledBatch.new`. `early` is the row of `TokenRing.send_early` and its tag;
    with tag 0 nothing is sent.
    """

    samples: np.ndarray
    starts: KernelParameters
    early: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticBatch:
    """Sequences for capture and verification, decodes first. All new tokens are concatenated in `token_ids`.

    num_decodes: leading sequences that are decodes, all of whose tokens have logits
    blocks: block table of each sequence, by KV group
    prefix_len: leading tokens that the first sequences have in the same blocks, or 0
    slots: slot of each sequence; None for sequence i in slot i
    restored: checkpoints that sequences start from
    saved: checkpoints that sequences write
    writes_states: False if the sequences start from zeros and write no state, as their slots may be in use
    max_lens: tokens that each sequence can have; None for those of the longest one
    encoder_lens: positions of each sequence's encoder; zeros without one
    """

    query_lens: list[int]
    context_lens: list[int]
    num_decodes: int
    blocks: list[list[np.ndarray]]
    token_ids: np.ndarray
    prefix_len: int = 0
    slots: list[int] | None = None
    restored: Sequence[StateCopy] = ()
    saved: Sequence[StateCopy] = ()
    writes_states: bool = True
    max_lens: list[int] | None = None
    encoder_lens: list[int]

    def rows(self) -> StepRows:
        """Return the step that computes the batch."""
        num_reqs = len(self.query_lens)
        slots = [*range(num_reqs)] if self.slots is None else self.slots
        batch = ScheduledBatch(
            slots=slots,
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            samples=[True] * num_reqs,
            num_decodes=self.num_decodes,
            num_decode_tokens=sum(self.query_lens[: self.num_decodes]),
            num_tokens=len(self.token_ids),
            restored=self.restored,
            saved=self.saved,
            appends=[
                BlockAppend(slot=slot, start=0, block_ids=ids.tolist(), group=group)
                for group, tables in enumerate(self.blocks)
                for slot, ids in zip(slots, tables, strict=True)
            ],
        )
        return rows_of(batch, np.zeros(max(slots) + 1, np.int64))


def rows_of(batch: ScheduledBatch, prompt_lens: np.ndarray) -> StepRows:
    """Return a batch as arrays. `prompt_lens` int64 [R] has one length per slot."""
    slots = np.array(batch.slots, np.int64)
    context_lens = np.array(batch.context_lens, np.int64)
    query_lens = np.array(batch.query_lens, np.int64)
    owners = np.arange(batch.num_reqs)
    if batch.num_decode_tokens > batch.num_decodes:
        owners = np.repeat(owners, np.where(owners < batch.num_decodes, query_lens, 1))
    return StepRows(
        batch=batch,
        slots=slots,
        context_lens=context_lens,
        query_lens=query_lens,
        samples=np.array(batch.samples, bool),
        draws=context_lens + query_lens - prompt_lens[slots],
        owners=owners,
    )


class PaddedViews(NamedTuple):
    """Attention inputs at one padded shape; see `CommonMetadata`.

    block_tables: of each KV group
    slot_mappings: likewise
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: tuple[torch.Tensor, ...]


def padded_views(inputs: Inputs, num_reqs: int, num_tokens: int) -> PaddedViews:
    """Return the views of inputs at a padded shape."""
    return PaddedViews(
        inputs.query_start_loc[: num_reqs + 1],
        inputs.seq_lens[:num_reqs],
        tuple(table[:num_reqs] for table in inputs.block_tables),
        tuple(mapping[:num_tokens] for mapping in inputs.slot_mappings),
    )


def metadata_of(
    rows: StepRows,
    views: PaddedViews,
    starts_cpu: np.ndarray,
    lens_cpu: np.ndarray,
    encoder_lens: Sequence[int] = (),
    encoder_lens_R: torch.Tensor | None = None,
    slot_encoder_lens: np.ndarray | None = None,
) -> tuple[CommonMetadata, ...]:
    """Return the attention metadata of a step, for each KV group.

    Args:
        rows: the step.
        views: its padded inputs.
        starts_cpu: host copy of query_start_loc, int32 [R+1].
        lens_cpu: host copy of seq_lens, int32 [R].
        encoder_lens: `KVGroup.encoder_len` of each group.
        encoder_lens_R: int32, keys of cross attention for the largest step; None if no group has it.
        slot_encoder_lens: int32, keys of cross attention by slot; None if all are those of `encoder_lens`.
    """
    num_reqs, num_decodes = rows.batch.num_reqs, rows.batch.num_decodes
    first = CommonMetadata(
        num_reqs=num_reqs,
        num_decodes=num_decodes,
        num_tokens=rows.batch.num_tokens,
        num_decode_tokens=int(starts_cpu[num_decodes]),
        max_query_len=max(rows.batch.query_lens),
        max_seq_len=int(lens_cpu[:num_reqs].max()),
        query_start_loc_cpu=starts_cpu,
        query_start_loc=views.query_start_loc,
        seq_lens=views.seq_lens,
        block_table=views.block_tables[0],
        slot_mapping=views.slot_mappings[0],
        seq_lens_cpu=lens_cpu,
    )
    others = zip(views.block_tables[1:], views.slot_mappings[1:], strict=True)
    commons = first, *(replace(first, block_table=table, slot_mapping=mapping) for table, mapping in others)
    if encoder_lens_R is None:
        return commons
    padded_reqs = len(lens_cpu)
    all_lens_cpu = np.zeros(padded_reqs, np.int32)
    all_lens_cpu[:num_reqs] = max(encoder_lens) if slot_encoder_lens is None else slot_encoder_lens[rows.slots]
    of_encoder = {"seq_lens": encoder_lens_R[:padded_reqs], "seq_lens_cpu": all_lens_cpu}
    return tuple(
        replace(common, max_seq_len=int(all_lens_cpu.max()), **of_encoder) if length else common
        for common, length in zip(commons, encoder_lens, strict=True)
    )


class Inputs(Protocol):
    """Request state by slot, and the static inputs of a step derived from it.

    input_ids:   int32 [T]
    positions:   int64 [T]
    logits_rows: int64 [L], the rows of the residual stream that have logits, for the largest step
    query_start_loc, seq_lens: as in `CommonMetadata`, for the largest step
    checkpoints: int32 [3, R], by sequence: the row of the pool of states that it starts from, in place of its slot; the
        row that its state is copied to; and its tokens at the copy. -1 for none.
    slots:       int32 [R], slot of each sequence of the step; -1 for empty rows, and for sequences that write no state
    block_tables, slot_mappings: likewise, of each KV group
    query_start_loc: int32 [R+1], see `CommonMetadata`
    num_logits:  int32 [1], rows of logits of the step without padding
    drafts:      int32 [R, K], drafts that a step leaves in the slots; K is 0 where the host makes them
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_rows: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    checkpoints: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: tuple[torch.Tensor, ...]
    num_logits: torch.Tensor

    @property
    def drafts(self) -> torch.Tensor: ...

    def take_over(self, batch: ScheduledBatch, failures: SlotFailures) -> None:
        """Load the sequences that start with this step.

        Args:
            batch: the step. Its appended blocks may also be taken over by `write`.
            failures: receives slots whose tokens cannot be loaded. These run with other tokens, and their results are
                dropped.
        """
        ...

    def write(self, rows: StepRows, key: GraphKey | None, *, sampling: KernelRows | None) -> tuple[CommonMetadata, ...]:
        """Write one step, and return the metadata that views its inputs, for each KV group.

        Args:
            rows: the step.
            key: the graph to pad to, or None for no padding.
            sampling: rows that the step's kernels sample; None if the host samples all rows.
        """
        ...

    def load(self, batch: SyntheticBatch, key: GraphKey) -> tuple[CommonMetadata, ...]:
        """Write a synthetic batch, padded to `key`. It overwrites the state of the slots it uses."""
        ...

    def prepare(self, *, num_reqs: int, num_tokens: int) -> None:
        """Derive the tensors of a step at its padded shape. This is the first operation of the step."""
        ...


class RankInputs(Inputs, Protocol):
    """Inputs of one of several ranks."""

    def host_tokens(self, rows: StepRows) -> np.ndarray:
        """Return the tokens of a step that rank 0 has written, int32 [T]; -1 for those that only its device has."""
        ...

    def write_tokens(
        self, rows: StepRows, token_ids_T: np.ndarray, starts_S3: np.ndarray, key: GraphKey | None
    ) -> tuple[CommonMetadata, ...]:
        """Write a step of rank 0 on another rank, and return the metadata that views its inputs, for each KV group.

        Args:
            rows: the step.
            token_ids_T: its tokens, as from `host_tokens`.
            starts_S3: slot, length of the prompt and most tokens of the sequences that start.
            key: the graph to pad to, or None for no padding.
        """
        ...
