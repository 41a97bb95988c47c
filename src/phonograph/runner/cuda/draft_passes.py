"""Passes of a draft model at the end of a step: the first over the step's rows, the others over a row a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from phonograph.attention.backend import AnyBackend, AttentionLayer
from phonograph.attention.metadata import CommonMetadata
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.graphs.runtime import GraphRuntime
from phonograph.kernels.triton.sampling.sample import make_sample_scratch, sample
from phonograph.kernels.triton.step.draft_rows import DraftRows, first_pass, next_pass
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
        needs_all_rows: the states are those behind the target's last layer too.
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
        needs_all_rows: bool = False,
    ) -> None:
        self._states_TF, self.needs_all_rows = states_TF, needs_all_rows
        self.model, self.layers = model, layers
        self._inputs = inputs
        self._block_size, self._max_model_len = block_size, max_model_len
        max_num_seqs, self._most_drafts = inputs.state.drafts.shape
        device = inputs.state.drafts.device
        self._rows = DraftRows.make(max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, device=device)
        vocab_size = (model.spec.features or model.spec).vocab_size
        self._scratch = make_sample_scratch(max_num_seqs, vocab_size, device)
        # Sampling writes the state of a slot, which `accept` has written already.
        self._ignored = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._attentions = [
            StepAttention([backend], layers, kv_caches, [self._rows.slot_mapping], runtime) for _ in range(2)
        ]
        self._builders = [backend.make_builder() for _ in self._attentions]
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
        common, rows = commons[0], self._rows
        num_reqs, num_tokens = len(common.seq_lens), len(common.slot_mapping)
        first = replace(
            common,
            seq_lens=rows.seq_lens[:num_reqs],
            slot_mapping=rows.slot_mapping[:num_tokens],
            seq_lens_cpu=self._bounds(common, 1),
            max_seq_len=min(common.max_seq_len + 1, self._max_model_len),
        )
        starts = np.minimum(np.arange(num_reqs + 1, dtype=np.int32), common.num_reqs)
        later = replace(
            first,
            num_decodes=common.num_reqs,
            num_tokens=common.num_reqs,
            num_decode_tokens=common.num_reqs,
            max_query_len=1,
            max_seq_len=min(common.max_seq_len + self._most_drafts, self._max_model_len),
            query_start_loc=rows.query_start_loc[: num_reqs + 1],
            slot_mapping=rows.slot_mapping[:num_reqs],
            query_start_loc_cpu=starts,
            seq_lens_cpu=self._bounds(common, self._most_drafts),
        )
        keys = key, None if key is None else GraphKey(GraphSet.DECODE, num_reqs, num_reqs, 1)
        for attention, builder, one, of_pass in zip(
            self._attentions, self._builders, (first, later), keys, strict=True
        ):
            attention.metadata = (builder.build(one, key=of_pass),)

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
            num_reqs_padded=num_reqs,
            num_tokens_padded=num_tokens,
            tokens_L=tokens_L,
            input_ids_T=inputs.input_ids,
            seq_lens_R=inputs.seq_lens,
            block_table_RN=block_table,
            history_RM=None if self._states_TF is None else inputs.history,
        )
        features = None
        if self._states_TF is not None:
            assert self.model.feature_part is not None
            features = self.model.feature_part.join(self._states_TF[:num_tokens])
        for index in range(self._most_drafts):
            first = index == 0
            count, attention = (num_tokens, self._attentions[0]) if first else (num_reqs, self._attentions[1])
            attention.pieces = pieces
            attention.schedule()
            ids, positions = rows.input_ids[:count], rows.positions[:count]
            hidden = self.model.forward(ids, positions, attention, features_TE=features)
            last_rows = rows.last_rows[:num_reqs] if first else None
            self._sample(self.model.logits(hidden, last_rows), num_reqs)
            if self.model.feature_part is not None:
                features = self._features_RE[:num_reqs]
                self.model.feature_part.next_features(hidden, last_rows, features)
            next_pass(
                inputs.state,
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

    def _bounds(self, common: CommonMetadata, more: int) -> np.ndarray:
        """Return upper bounds of the lengths with `more` tokens, 0 for padding."""
        lens = common.seq_lens_cpu
        return np.where(lens > 0, np.minimum(lens + more, self._max_model_len), 0).astype(np.int32)
