"""Inputs of a step on a GPU: request state in device slots, and one pinned buffer of changes per step.

The device keeps the length, the last token, the block table and the sampling parameters of each sequence; with drafts
also these, and all of its tokens, in which they are looked up. The host sends a few numbers per sequence, the tokens of
prefills and the appended blocks. The prepare kernel at the head of every graph derives the step's tensors from both.
Graphs freeze the addresses of these tensors, so they are allocated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from phonograph.attention.metadata import CommonMetadata
from phonograph.core.batch import MAX_LEN, BlockAppend, ScheduledBatch
from phonograph.core.blocks import blocks_for
from phonograph.graphs.modes import GraphKey
from phonograph.kernels.host_arrays import send
from phonograph.kernels.logit_edits import LogitEdits
from phonograph.kernels.triton.sampling.sample import make_sample_scratch
from phonograph.kernels.triton.step.accept_drafts import accept
from phonograph.kernels.triton.step.prepare import apply_appends, prepare
from phonograph.kernels.triton.step.prompt_lookup import propose_ngrams
from phonograph.kernels.triton.step.step_layout import SlotState, StepLayout
from phonograph.runner.cuda.encoder_lens import EncoderLens
from phonograph.runner.cuda.pinned import PinnedWords
from phonograph.runner.step_inputs import KernelRows, PaddedViews, StepRows, SyntheticBatch, metadata_of, padded_views
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.sampler import KernelParameters
from phonograph.sampling.slot_edits import SlotEdits

_MAX_APPENDS = 4096
"""Blocks that one upload can append. A step with more sends the rest before it."""
_UPLOADS = 4
"""Pinned buffers, used in turn: more than there can be steps in flight."""


class StepResults(NamedTuple):
    """Results of a step on the host, all int32.

    tokens: [L], sample of each row of logits
    counts: [R], see `accept`, by row of the batch; empty without drafts
    drafts: [R, K] by slot, those that the next step verifies; -1 for none
    """

    tokens: np.ndarray
    counts: np.ndarray
    drafts: np.ndarray


class CudaInputs:
    """Device state by slot, the inputs of a step, and the uploads that change them.

    The prepare kernel writes, with T = max_num_tokens, R = max_num_seqs, L = max_num_logits and, for each of G KV
    groups, N blocks of the longest sequence in the group with the smallest blocks: input_ids [T] int32, positions [T]
    and slot_mappings [G, T] int64, query_start_loc [R+1], seq_lens [R] and block_tables [G, R, N] int32, logits_rows
    [L] int64, and with drafts the tokens of prefills to history [R, M], int32; others are copied there ahead of a step.

    Sampling reads `sampling`, and writes tokens [L], int32, and the last tokens and lengths of `state`. With drafts,
    acceptance writes counts [R], int32, and history. `results` has tokens, counts, and the drafts of the next step by
    slot.

    Args:
        draft_tokens: most drafts of a sequence.
        max_num_logits: rows of logits of the largest step; by default one a sequence.
        keeps_tokens: keep the tokens of all sequences on the device.
        has_states: layers have states, and the prefix cache may have checkpoints of them.
        encoder_lens: `KVGroup.encoder_len` of each group; none if no group has it.
        ragged_encoder: sequences may have fewer positions of the encoder.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        vocab_size: int,
        device: torch.device,
        draft_tokens: int = 0,
        max_num_logits: int | None = None,
        keeps_tokens: bool = False,
        has_states: bool = False,
        encoder_lens: Sequence[int] = (),
        ragged_encoder: bool = False,
    ) -> None:
        num_groups, num_logits = len(block_sizes), max_num_logits or max_num_seqs
        sizes = max_num_seqs, max_num_tokens, _MAX_APPENDS
        # Drafts reach behind the longest sequence, where no token is computed for use.
        max_blocks = blocks_for(max([max_model_len + 2 * draft_tokens, *encoder_lens]), min(block_sizes))
        self._encoder_lens = EncoderLens(encoder_lens, max_num_seqs, device, ragged=ragged_encoder)
        self._block_sizes = tuple(block_sizes)
        self._max_model_len = max_model_len
        self.layout = StepLayout(*sizes, num_groups=num_groups, max_num_logits=num_logits, has_states=has_states)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.staging = zeros(self.layout.num_words)
        self.state = SlotState.make(
            num_groups=num_groups, max_num_seqs=max_num_seqs, max_blocks=max_blocks, device=device
        )
        self.results = zeros(num_logits + (max_num_seqs * (1 + draft_tokens) if draft_tokens else 0))
        parts = num_logits, max_num_seqs if draft_tokens else 0, max_num_seqs * draft_tokens
        self.tokens, self.counts, drafts = self.results.split(parts)
        self.state = self.state._replace(drafts=drafts.view(max_num_seqs, draft_tokens))
        self.history = zeros(max_num_seqs, max_model_len + 1 if keeps_tokens else 0)
        self.input_ids, self.positions = zeros(max_num_tokens), zeros(max_num_tokens, dtype=torch.int64)
        self._slot_mappings = zeros(num_groups, max_num_tokens, dtype=torch.int64)
        self.slot_mappings = self._slot_mappings.unbind()
        self.query_start_loc, self.seq_lens = zeros(max_num_seqs + 1), zeros(max_num_seqs)
        self.slots, self.checkpoints = zeros(max_num_seqs), self.layout.checkpoints(self.staging)
        self._block_tables = zeros(num_groups, max_num_seqs, max_blocks)
        self.block_tables = self._block_tables.unbind()
        self.logits_rows = zeros(num_logits, dtype=torch.int64)
        self.edits = SlotEdits(max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=device)
        self.sample_scratch = make_sample_scratch(num_logits, vocab_size, device)
        self.sampling = self.layout.sampling_views(self.staging)
        self._uploads = [_Upload(self.layout, device, self._block_sizes) for _ in range(_UPLOADS)]
        self.num_logits, self._next = self.layout.num_logits(self.staging), 0
        self._views: dict[tuple[int, int], PaddedViews] = {}
        # By slot: token ids that the host has.
        self._tokens: dict[int, np.ndarray] = {}
        self._host_drafts: dict[int, np.ndarray] = {}

    @property
    def drafts(self) -> torch.Tensor:
        """Drafts of each slot, int32 [R, K]."""
        return self.state.drafts

    def take_over(self, batch: ScheduledBatch, failures: SlotFailures) -> None:
        """Keep the token ids of sequences that start; appended blocks travel with the step."""
        self._encoder_lens.keep([new.slot for new in batch.new], [new.encoder_len for new in batch.new])
        for new in batch.new:
            if not failures.run(new.slot, "token ids", self._keep_tokens, new.slot, new.token_ids, batch):
                self._tokens[new.slot] = np.zeros(len(new.token_ids), np.int32)

    def _keep_tokens(self, slot: int, token_ids: list[int], batch: ScheduledBatch) -> None:
        self._tokens[slot] = kept = np.array(token_ids, np.int32)
        # The step itself writes the tokens of its prefills.
        if self.history.shape[1] and batch.query_lens[batch.slots.index(slot)] < len(kept):
            send(kept, self.history[slot, : len(kept)])

    def write_drafts(self, slot: int, last_token: int, drafts: Sequence[int]) -> None:
        """Keep drafts that the host made, for the next step. Its lengths on the host must be exact then."""
        self._host_drafts[slot] = np.array([last_token, *drafts], np.int32)

    def write(self, rows: StepRows, key: GraphKey | None, *, sampling: KernelRows | None) -> tuple[CommonMetadata, ...]:
        """Send one step and return its metadata; see `Inputs.write`."""
        starts = {new.slot: (new.prompt_len, new.max_len) for new in rows.batch.new}
        return self._send(rows, key, self._known_tokens(rows), starts, sampling)

    def _known_tokens(self, rows: StepRows) -> dict[int, np.ndarray]:
        """Return the tokens of the rows that do not continue from the state of their slot."""
        slots, context_lens, query_lens = rows.batch.slots, rows.batch.context_lens, rows.batch.query_lens
        # Decodes continue from it, unless the host has made their drafts.
        known = {
            row: self._tokens[slots[row]][context_lens[row] : context_lens[row] + query_lens[row]]
            for row in range(rows.batch.num_decodes, rows.batch.num_reqs)
        }
        if self._host_drafts:
            for row, query_len in enumerate(query_lens[: rows.batch.num_decodes]):
                if query_len > 1:
                    known[row] = self._host_drafts[slots[row]][:query_len]
        return known

    def load(self, batch: SyntheticBatch, key: GraphKey) -> tuple[CommonMetadata, ...]:
        """Send a synthetic batch with greedy sampling, and prepare it, so that its slot mapping is on the device."""
        rows = batch.rows()
        num_reqs = rows.batch.num_reqs
        starts = np.cumsum([0, *batch.query_lens])
        known = {row: batch.token_ids[starts[row] : starts[row + 1]] for row in range(num_reqs)}
        max_lens = batch.max_lens or [self._max_model_len + 1] * num_reqs
        bounds = {slot: (0, max_len) for slot, max_len in zip(rows.batch.slots, max_lens, strict=True)}
        sampling = KernelRows(rows.samples, KernelParameters.greedy(num_reqs))
        self._encoder_lens.keep(rows.batch.slots, batch.encoder_lens)
        commons = self._send(rows, key, known, bounds, sampling, writes_states=batch.writes_states)
        self.prepare(num_reqs=key.num_reqs, num_tokens=key.num_tokens)
        return commons

    def prepare(self, *, num_reqs: int, num_tokens: int) -> None:
        """Launch the prepare kernel for a padded shape; it is the head of every step."""
        prepare(
            self.staging,
            self.layout,
            self.state,
            block_sizes=self._block_sizes,
            num_reqs_padded=num_reqs,
            num_tokens_padded=num_tokens,
            input_ids_T=self.input_ids,
            positions_T=self.positions,
            slot_mappings_GT=self._slot_mappings,
            query_start_loc=self.query_start_loc,
            seq_lens_R=self.seq_lens,
            slots_R=self.slots,
            block_tables_GRN=self._block_tables,
            logits_rows_L=self.logits_rows,
            history_RM=self.history if self.history.shape[1] else None,
            **self._encoder_lens.of_kernel,
        )

    def results_of(self, words: np.ndarray) -> StepResults:
        """Return views of the results of a step that were copied to the host."""
        num_logits, (num_slots, most_drafts) = len(self.tokens), self.drafts.shape
        end = num_logits + len(self.counts)
        drafts = words[end : end + num_slots * most_drafts].reshape(num_slots, most_drafts)
        if self._host_drafts:
            drafts = drafts.copy()
            for slot, made in self._host_drafts.items():
                drafts[slot, : len(made) - 1] = made[1:]
        return StepResults(words[:num_logits], words[num_logits:end], drafts)

    def accept(
        self,
        tokens_L: torch.Tensor,
        *,
        num_reqs: int,
        synthetic_K: torch.Tensor | None = None,
        listed_G: torch.Tensor | None = None,
    ) -> None:
        """Launch the kernel that accepts drafts, behind the sampling of a padded shape; see `accept_drafts`."""
        accept(
            self.staging,
            self.layout,
            self.state,
            num_reqs_padded=num_reqs,
            tokens_L=tokens_L,
            input_ids_T=self.input_ids,
            counts_R=self.counts,
            history_RM=self.history,
            synthetic_K=synthetic_K,
            words_RV=self.edits.words,
            listed_G=listed_G,
        )

    def logit_edits(self) -> LogitEdits:
        """Return what the sampling kernels read of bias, min_tokens and penalties."""
        edits, sampling = self.edits, self.sampling
        return LogitEdits(
            words=edits.words,
            biases=edits.biases,
            factors=edits.factors,
            edits=sampling.edits,
            row_slots=sampling.row_slots,
            logits_rows=self.logits_rows,
            input_ids=self.input_ids,
        )

    def propose_ngrams(
        self,
        tokens_L: torch.Tensor,
        *,
        num_reqs: int,
        shortest: int,
        longest: int,
        listed_G: torch.Tensor | None = None,
    ) -> None:
        """Launch the kernel that looks up drafts for the next step, behind `accept`."""
        propose_ngrams(
            self.staging,
            self.layout,
            self.state,
            num_reqs_padded=num_reqs,
            tokens_L=tokens_L,
            history_RM=self.history,
            shortest=shortest,
            longest=longest,
            listed_G=listed_G,
        )

    def _send(
        self,
        rows: StepRows,
        key: GraphKey | None,
        known: dict[int, np.ndarray],
        starts: dict[int, tuple[int, int]],
        sampling: KernelRows | None,
        *,
        writes_states: bool = True,
    ) -> tuple[CommonMetadata, ...]:
        """Upload a step.

        Args:
            rows: the step.
            key: as in `write`.
            known: token ids of the rows that do not continue from their slot.
            starts: length of the prompt and most tokens by slot, of the sequences that start, in the order of
                `sampling.starts`.
            sampling: as in `write`.
            writes_states: see `SyntheticBatch`.
        """
        upload = self._uploads[self._next % _UPLOADS]
        self._next += 1
        upload.wait()
        batch, num_reqs, query_starts = rows.batch, rows.batch.num_reqs, upload.views.query_starts
        query_starts[0] = 0
        np.cumsum(rows.query_lens, out=query_starts[1 : num_reqs + 1])
        numbers = num_reqs, batch.num_tokens, batch.num_decodes, rows.num_logits, writes_states
        upload.views.header[:7] = *numbers, *((0, 0) if sampling is None else sampling.early)
        upload.views.slots[:num_reqs] = rows.slots
        rows.write_copies(upload.views.checkpoints)
        upload.views.context_lens[:num_reqs] = rows.context_lens
        upload.views.start_at[:num_reqs] = -1
        if sampling is None:
            upload.views.samples[:num_reqs] = 0
        else:
            upload.views.samples[:num_reqs] = sampling.samples
            if starts:
                self._start(upload, rows, starts, sampling.starts)
        num_known = self._copy_tokens(upload, known, num_reqs)
        num_appended = self._append(upload, rows)
        used = self.layout.used_words(num_appends=num_appended, num_tokens=num_known)
        upload.send(self.staging, used)
        return self._metadata(rows, key, query_starts)

    def _start(
        self, upload: _Upload, rows: StepRows, starts: dict[int, tuple[int, int]], parameters: KernelParameters
    ) -> None:
        entries, count = upload.views.starts, len(starts)
        floats, integers = entries.view(np.float32), entries.view(np.int64)
        floats[:count, 0] = parameters.temperature_N
        entries[:count, 1] = parameters.top_k_N
        floats[:count, 2] = parameters.top_p_N
        floats[:count, 3] = parameters.min_p_N
        integers[:count, 2] = parameters.stream_keys_N
        entries[:count, 6:8] = [*starts.values()]
        entries[:count, 8] = parameters.edits_N
        entries[:count, 9] = np.minimum(entries[:count, 6] + parameters.min_tokens_N, MAX_LEN)
        row_of = {slot: row for row, slot in enumerate(rows.batch.slots)}
        upload.views.start_at[[row_of[slot] for slot in starts]] = range(count)

    def _copy_tokens(self, upload: _Upload, known: dict[int, np.ndarray], num_reqs: int) -> int:
        token_starts, tokens = upload.views.token_starts, upload.views.tokens
        token_starts[:num_reqs] = -1
        num_known = 0
        for row, token_ids in known.items():
            token_starts[row] = num_known
            tokens[num_known : num_known + len(token_ids)] = token_ids
            num_known += len(token_ids)
        return num_known

    def _append(self, upload: _Upload, rows: StepRows) -> int:
        """Write the appended blocks of the rows. Return the number of blocks that travel in this upload."""
        views, most, num_reqs = upload.views, self.layout.max_appends, len(rows.slots)
        views.append_starts[:, : num_reqs + 1] = 0
        num_appended = 0
        if rows.batch.appends:
            row_of = {slot: row for row, slot in enumerate(rows.slots.tolist())}
            counts = views.append_starts[:, 1 : num_reqs + 1]
            # In the order of the areas: by group, then by row.
            for append in sorted(rows.batch.appends, key=lambda one: (one.group, row_of[one.slot])):
                end = num_appended + len(append.block_ids)
                if end > most:
                    self._append_ahead(append)
                    continue
                row = row_of[append.slot]
                views.append_at[append.group, row] = append.start
                counts[append.group, row] = len(append.block_ids)
                views.appends[num_appended:end] = append.block_ids
                num_appended = end
            ends = np.cumsum(counts).reshape(counts.shape)
            views.append_starts[:, 1 : num_reqs + 1] = ends
            views.append_starts[1:, 0] = ends[:-1, -1]
        return num_appended

    def _append_ahead(self, append: BlockAppend) -> None:
        """Send blocks that do not fit the step's upload, in a launch of their own."""
        count = len(append.block_ids)
        triples = torch.empty((3, count), dtype=torch.int32, pin_memory=True)
        triples[0] = append.slot
        triples[1] = torch.arange(append.start, append.start + count)
        triples[2] = torch.tensor(append.block_ids)
        apply_appends(triples.to(self.staging.device, non_blocking=True), self.state.block_tables[append.group])

    def _metadata(self, rows: StepRows, key: GraphKey | None, query_starts: np.ndarray) -> tuple[CommonMetadata, ...]:
        num_reqs, num_tokens = rows.batch.num_reqs, rows.batch.num_tokens
        padded_reqs, padded_tokens = (num_reqs, num_tokens) if key is None else (key.num_reqs, key.num_tokens)
        starts_cpu = np.full(padded_reqs + 1, num_tokens, np.int32)
        starts_cpu[: num_reqs + 1] = query_starts[: num_reqs + 1]
        lens_cpu = np.zeros(padded_reqs, np.int32)
        lens_cpu[:num_reqs] = rows.context_lens + rows.query_lens
        views = self._views.get((padded_reqs, padded_tokens))
        if views is None:
            views = padded_views(self, padded_reqs, padded_tokens)
            if key is not None:  # eager shapes are too many to keep
                self._views[padded_reqs, padded_tokens] = views
        return metadata_of(rows, views, starts_cpu, lens_cpu, *self._encoder_lens.of_metadata)


class _Upload(PinnedWords):
    """The words of one step, with views of their fields."""

    def __init__(self, layout: StepLayout, device: torch.device, block_sizes: Sequence[int]) -> None:
        super().__init__(layout.num_words, device)
        self.views = layout.host_views(self.words.numpy())
        self.views.block_sizes[:] = block_sizes[: len(self.views.block_sizes)]
