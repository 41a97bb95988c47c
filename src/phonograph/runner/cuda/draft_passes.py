"""Passes of a draft model at the end of a step: the first over the step's rows, the others over a row a sequence.

Sequences with a grammar are sampled behind the step's graph, so their passes are in graphs of their own (`listed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from phonograph.attention.backend import AnyBackend, AttentionLayer
from phonograph.attention.metadata import AttentionMetadata, CommonMetadata
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.graphs.runtime import GraphRuntime
from phonograph.kernels.triton.elementwise.layers import gather_rows
from phonograph.kernels.triton.sampling.sample import make_sample_scratch, sample
from phonograph.kernels.triton.step.draft_rows import DraftRows, first_pass, listed_pass, next_pass
from phonograph.models.transformer import Transformer
from phonograph.runner.cuda.cuda_inputs import CudaInputs
from phonograph.runner.step_attention import StepAttention


class DraftPasses:
    """The draft model, with keys and values in the blocks of the target.

    Each draft is sampled with the parameters of its request and the noise of the draw that it stands for, so that it
    equals the target's sample wherever both models score alike.

    Args:
        model: the draft model, bound to kernels of its own.
        backend: attention of its layers.
        layers: parameters of its layers.
        kv_caches: keys and values of each layer.
        inputs: of the step.
        runtime: calls attention between the pieces of graphs.
        block_size: tokens of a block of the target's only KV group.
        max_num_tokens: rows of the largest first pass.
        max_model_len: tokens of the longest sequence.
        states_TF: hidden states of the target in the step, for a draft head; None for a model of its own.
    """

    def __init__(
        self,
        *,
        model: Transformer,
        backend: AnyBackend,
        layers: Sequence[AttentionLayer],
        kv_caches: Sequence[torch.Tensor],
        inputs: CudaInputs,
        runtime: GraphRuntime,
        block_size: int,
        max_num_tokens: int,
        max_model_len: int,
        states_TF: torch.Tensor | None = None,
    ) -> None:
        self._states_TF, self.model, self.layers = states_TF, model, layers
        self._inputs = inputs
        self._block_size, self._max_model_len = block_size, max_model_len
        max_num_seqs, self._most_drafts = inputs.state.drafts.shape
        device = inputs.state.drafts.device
        self._rows = DraftRows.make(max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, device=device)
        vocab_size = (model.spec.features or model.spec).vocab_size
        self._scratch = make_sample_scratch(max_num_seqs, vocab_size, device)
        # Sampling writes the state of a slot, which `accept` has written already.
        self._ignored = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        # Of the first pass, of the others, and of all that are listed.
        self._attentions = [
            StepAttention([backend], layers, kv_caches, [self._rows.slot_mapping], runtime) for _ in range(3)
        ]
        self._builders = [backend.make_builder() for _ in self._attentions]
        # Metadata of the passes behind a step by its graph, if they depend on the graph alone.
        self._known: dict[GraphKey, list[AttentionMetadata]] = {}
        self._listed_tables = torch.zeros_like(inputs.block_tables[0])
        self._common: CommonMetadata | None = None
        self._num_kept = 0
        # Features of the last step's rows. Those of all steps begin at the same address.
        self._features_TE: torch.Tensor | None = None
        self._features_RE = torch.empty(max_num_seqs, model.spec.hidden_size, dtype=model.dtype, device=device)
        # Logits of a head that has fewer tokens, at those of the target; others are never drawn.
        self._target_ids = None if model.features is None else model.features.target_ids
        if self._target_ids is not None:
            self._logits_RV = torch.full((max_num_seqs, vocab_size), float("-inf"), dtype=model.dtype, device=device)

    def build(self, commons: Sequence[CommonMetadata], key: GraphKey | None) -> None:
        """Build the attention metadata of the passes behind a step.

        Args:
            commons: the step, by KV group.
            key: the graph that will be captured or replayed; None for an eager step.
        """
        self._common = common = commons[0]
        # Rows of the first pass's last layer. Without a graph as many as there can be, so that all such steps run the
        # same kernels.
        self._num_kept = len(self._rows.last_rows) if key is None else key.num_reqs
        built = None if key is None else self._known.get(key)
        if built is None:
            built = self._built(common, key)
            if key is not None and all(builder.depends_on_key for builder in self._builders):
                self._known[key] = built
        for attention, metadata in zip(self._attentions, built, strict=False):
            attention.metadata = (metadata,)

    def _built(self, common: CommonMetadata, key: GraphKey | None) -> list[AttentionMetadata]:
        """Return the metadata of the first pass, and of the others."""
        rows, num_reqs, num_tokens = self._rows, len(common.seq_lens), len(common.slot_mapping)
        first = replace(
            common,
            seq_lens=rows.seq_lens[:num_reqs],
            slot_mapping=rows.slot_mapping[:num_tokens],
            seq_lens_cpu=self._bounds(common.seq_lens_cpu, 1),
            max_seq_len=min(common.max_seq_len + 1, self._max_model_len),
        )
        later = self._one_row_each(common, common.seq_lens_cpu, common.num_reqs, common.block_table)
        of_later = None if key is None else GraphKey(GraphSet.DECODE, num_reqs, num_reqs, 1)
        return [
            builder.build(one, key=of_pass)
            for builder, one, of_pass in zip(self._builders, (first, later), (key, of_later), strict=False)
        ]

    def build_listed(self, numbers: Sequence[int], size: int) -> None:
        """Build the attention metadata of `run_listed` behind the step that `build` was called for.

        Args:
            numbers: rows of the batch.
            size: rows of the passes, with padding.
        """
        assert self._common is not None, "a step that makes drafts comes before"
        lens_cpu = np.zeros(size, np.int32)
        lens_cpu[: len(numbers)] = self._common.seq_lens_cpu[[*numbers]]
        common = self._one_row_each(self._common, lens_cpu, len(numbers), self._listed_tables[:size])
        key = GraphKey(GraphSet.DECODE, size, size, 1)
        self._attentions[2].metadata = (self._builders[2].build(common, key=key),)

    def _one_row_each(
        self, common: CommonMetadata, lens_cpu: np.ndarray, count: int, block_table: torch.Tensor
    ) -> CommonMetadata:
        """Return a step of one row for each of `count` sequences, padded to the lengths before the drafts."""
        rows, size = self._rows, len(lens_cpu)
        return replace(
            common,
            num_reqs=count,
            num_decodes=count,
            num_tokens=count,
            num_decode_tokens=count,
            max_query_len=1,
            max_seq_len=min(common.max_seq_len + self._most_drafts, self._max_model_len),
            query_start_loc=rows.query_start_loc[: size + 1],
            seq_lens=rows.seq_lens[:size],
            block_table=block_table,
            slot_mapping=rows.slot_mapping[:size],
            query_start_loc_cpu=np.minimum(np.arange(size + 1, dtype=np.int32), count),
            seq_lens_cpu=self._bounds(lens_cpu, self._most_drafts),
        )

    def run(self, tokens_L: torch.Tensor, *, num_tokens: int, num_reqs: int, pieces: bool) -> None:
        """Leave drafts in the slots of the sequences that the step sampled.

        Args:
            tokens_L: int32, sample of each row of logits.
            num_tokens: padded tokens of the step.
            num_reqs: padded requests.
            pieces: split the capture at each call of attention.
        """
        inputs, rows = self._inputs, self._rows
        block_table = inputs.block_tables[0]
        first_pass(
            inputs.staging,
            inputs.layout,
            inputs.state,
            rows,
            block_size=self._block_size,
            num_reqs_padded=self._num_kept,
            num_tokens_padded=num_tokens,
            tokens_L=tokens_L,
            input_ids_T=inputs.input_ids,
            seq_lens_R=inputs.seq_lens,
            block_table_RN=block_table,
            history_RM=None if self._states_TF is None else inputs.history,
        )
        if self._states_TF is not None:
            assert self.model.feature_part is not None
            self._features_TE = self.model.feature_part.join(self._states_TF[:num_tokens])
        last_rows = rows.last_rows[: self._num_kept]
        self._draft(
            [num_tokens, num_reqs], self._attentions[:2], block_table, self._features_TE, last_rows, pieces=pieces
        )

    def run_listed(self, requests_G: torch.Tensor, *, pieces: bool) -> tuple[torch.Tensor, ...]:
        """Leave drafts in the slots of sequences that were sampled behind the step; return no tensors.

        The first pass has a row for the last token of each: `run` has computed the tokens before it.

        Args:
            requests_G: int32, rows of the batch, below 0 for padding.
            pieces: as in `run`.
        """
        inputs, rows, size = self._inputs, self._rows, len(requests_G)
        block_table, shifts = self._listed_tables[:size], self._states_TF is not None
        listed_pass(
            inputs.staging,
            inputs.layout,
            inputs.state,
            rows,
            block_size=self._block_size,
            listed_G=requests_G,
            seq_lens_R=inputs.seq_lens,
            block_table_RN=inputs.block_tables[0],
            listed_table_GN=block_table,
            shifts=shifts,
        )
        features = None
        if shifts:
            assert self._features_TE is not None
            features = self._features_RE[:size]
            gather_rows(self._features_TE, rows.last_rows[:size], features)
        self._draft([size, size], [self._attentions[2]] * 2, block_table, features, None, pieces=pieces)
        return ()

    def _draft(
        self,
        counts: Sequence[int],
        attentions: Sequence[StepAttention],
        block_table: torch.Tensor,
        features: torch.Tensor | None,
        last_rows_R: torch.Tensor | None,
        *,
        pieces: bool,
    ) -> None:
        """Run all passes.

        Args:
            counts: rows of the first pass, and sequences, with padding.
            attentions: of the first pass and of the others.
            block_table: int32, blocks of the sequences.
            features: of the rows of the first pass, for a draft head.
            last_rows_R: int64, rows of the first pass whose samples are drafts, and padding; None for all of them.
            pieces: as in `run`.
        """
        rows, num_reqs = self._rows, counts[1]
        for index in range(self._most_drafts):
            count, attention = counts[index > 0], attentions[index > 0]
            attention.pieces = pieces
            attention.schedule()
            ids, positions = rows.input_ids[:count], rows.positions[:count]
            last_rows = None if index else last_rows_R
            leaves_out = last_rows is not None and self.model.leaves_rows_out(count, len(last_rows))
            kept = last_rows if leaves_out else None
            hidden = self.model.forward(ids, positions, attention, kept, features_TE=features)
            if leaves_out:
                hidden, last_rows = hidden[:num_reqs], None
            elif last_rows is not None:
                last_rows = last_rows[:num_reqs]
            self._sample(self.model.logits(hidden, last_rows), num_reqs)
            if self.model.feature_part is not None:
                features = self._features_RE[:num_reqs]
                self.model.feature_part.next_features(hidden, last_rows, features)
            next_pass(
                self._inputs.state,
                rows,
                index=index,
                block_size=self._block_size,
                num_reqs_padded=num_reqs,
                block_table_RN=block_table,
                shifts=self._states_TF is not None,
            )

    def _sample(self, logits_RV: torch.Tensor, num_reqs: int) -> None:
        rows = self._rows
        if self._target_ids is not None:
            whole_RV = self._logits_RV[:num_reqs]
            whole_RV.index_copy_(1, self._target_ids, logits_RV)
            logits_RV = whole_RV
        sample(
            logits_RV,
            rows.sample_slots[:num_reqs],
            rows.temperature[:num_reqs],
            rows.top_k[:num_reqs],
            rows.top_p[:num_reqs],
            rows.min_p[:num_reqs],
            rows.draw_keys[:num_reqs],
            self._scratch,
            rows.tokens[:num_reqs],
            self._ignored,
            self._ignored,
            self._ignored,
        )

    def _bounds(self, lens: np.ndarray, more: int) -> np.ndarray:
        """Return upper bounds of the lengths with `more` tokens, 0 for padding."""
        return np.where(lens > 0, np.minimum(lens + more, self._max_model_len), 0).astype(np.int32)
