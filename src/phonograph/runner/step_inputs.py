"""A step's numbers, and the protocol by which they get into the static tensors that every graph reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from phonograph.attention.metadata import CommonMetadata, CommonPrefix
from phonograph.core.batch import BlockAppend, ScheduledBatch
from phonograph.graphs.modes import GraphKey
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.sampler import KernelParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """One step as arrays by row, decodes first.

    batch:        the step as the scheduler made it
    slots:        int64 [N], as `context_lens`, `query_lens` and `draws`
    samples:      bool [N], True where the row's next token is sampled
    draws:        tokens that each request has generated before, the index of its draw
    """

    batch: ScheduledBatch
    slots: np.ndarray
    context_lens: np.ndarray
    query_lens: np.ndarray
    samples: np.ndarray
    draws: np.ndarray


class KernelRows(NamedTuple):
    """Rows that the step's own kernels sample, bool [N], and the parameters of all rows."""

    samples: np.ndarray
    parameters: KernelParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticBatch:
    """Sequences, decodes first: lengths as in ScheduledBatch, the blocks of each, and all new tokens end to end.

    prefix_len: leading tokens for which all have the same blocks, to be attended once; None where nothing cascades
    """

    query_lens: list[int]
    context_lens: list[int]
    blocks: list[np.ndarray]
    token_ids: np.ndarray
    prefix_len: int | None = None

    def rows(self) -> StepRows:
        """Return the step that computes the batch, sequence i in slot i."""
        num_reqs = len(self.query_lens)
        batch = ScheduledBatch(
            slots=[*range(num_reqs)],
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            samples=[True] * num_reqs,
            num_decodes=sum(length == 1 for length in self.query_lens),
            num_tokens=len(self.token_ids),
            appends=[BlockAppend(slot=row, start=0, block_ids=ids.tolist()) for row, ids in enumerate(self.blocks)],
        )
        return rows_of(batch, np.zeros(num_reqs, np.int64))


def rows_of(batch: ScheduledBatch, prompt_lens: np.ndarray) -> StepRows:
    """Return a batch as arrays; `prompt_lens` int64 [R] are by slot."""
    slots = np.array(batch.slots, np.int64)
    context_lens = np.array(batch.context_lens, np.int64)
    query_lens = np.array(batch.query_lens, np.int64)
    return StepRows(
        batch=batch,
        slots=slots,
        context_lens=context_lens,
        query_lens=query_lens,
        samples=np.array(batch.samples, bool),
        draws=context_lens + query_lens - prompt_lens[slots],
    )


class PaddedViews(NamedTuple):
    """Inputs of attention at one padded shape; see `CommonMetadata`."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


def metadata_of(
    rows: StepRows, views: PaddedViews, starts_cpu: np.ndarray, lens_cpu: np.ndarray, prefix: CommonPrefix | None
) -> CommonMetadata:
    """Return the metadata of a step.

    Args:
        rows: the step.
        views: its inputs, padded.
        starts_cpu, lens_cpu: host copies of the first two, int32 [R+1] and [R].
        prefix: what the step attends once, or None.
    """
    num_reqs, num_decodes = rows.batch.num_reqs, rows.batch.num_decodes
    return CommonMetadata(
        num_reqs=num_reqs,
        num_decodes=num_decodes,
        num_tokens=rows.batch.num_tokens,
        num_decode_tokens=int(starts_cpu[num_decodes]),
        max_query_len=max(rows.batch.query_lens),
        max_seq_len=int(lens_cpu[:num_reqs].max()),
        query_start_loc_cpu=starts_cpu,
        seq_lens_cpu=lens_cpu,
        prefix=prefix,
        **views._asdict(),
    )


class Inputs(Protocol):
    """State of the running sequences by slot, and the static inputs of a step made from it.

    input_ids:   int32 [T]
    positions:   int64 [T]
    logits_rows: int64 [R], the row of the residual stream whose logits a request wants
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_rows: torch.Tensor

    def take_over(self, batch: ScheduledBatch, failures: SlotFailures) -> None:
        """Take over the sequences that start with this step.

        Args:
            batch: the step, whose appended blocks may as well be taken over when it is written.
            failures: receives the slots whose tokens cannot be taken over; they have others, and their results are
                dropped.
        """
        ...

    def write(
        self, rows: StepRows, key: GraphKey | None, *, prefix_len: int | None, sampling: KernelRows | None
    ) -> CommonMetadata:
        """Write one step, and return the metadata that views its inputs.

        Args:
            rows: the step.
            key: the graph that it is padded to, or None to leave it as it is.
            prefix_len: tokens of the prefix that the step attends once, or None where it does not cascade.
            sampling: rows that the step samples itself; None where the host samples all of them.
        """
        ...

    def load(self, batch: SyntheticBatch, key: GraphKey) -> CommonMetadata:
        """Write a batch that no sequence stands behind, padded to `key`. It overwrites the state of its slots."""
        ...

    def prepare(self, *, num_reqs: int, num_tokens: int) -> None:
        """Make the tensors of a step, at its padded shape, as the first part of the step."""
        ...
