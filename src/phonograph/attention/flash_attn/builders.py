"""Metadata of FlashAttention: the numbers that a launch freezes, by a builder for each version.

Metadata of a graph stays valid as it is, because the tensors of a batch are persistent.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.flash_attn.libraries import FlashAttentionMetadata, Launch, Plan
from phonograph.attention.flash_attn.sizes import plans, split_bound, unbounded_splits_fit
from phonograph.attention.metadata import CommonMetadata, MetadataBuilder
from phonograph.core.limits import Limits
from phonograph.errors import BackendError
from phonograph.graphs.modes import GraphKey, GraphSet


class FlashAttentionMetadataBuilder(MetadataBuilder[FlashAttentionMetadata]):
    """Builder that adds a few numbers to the batch, the same at each build of a key."""

    def __init__(self, spec: AttentionSpec, limits: Limits) -> None:
        self.spec = spec
        self.limits = limits
        self._plans: dict[GraphKey | None, Plan] = {}

    @abstractmethod
    def launch(self, common: CommonMetadata, key: GraphKey | None) -> Launch: ...

    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> FlashAttentionMetadata:
        """Build the metadata of one step.

        Raises:
            BackendError: ALiBi with a batch without a causal mask; the library's bias on later keys differs from ours.
        """
        if self.spec.alibi and not common.causal:
            raise BackendError(
                "attention backend flash_attn: ALiBi without a causal mask; its bias falls to both sides"
            )
        decodes = key is not None and key.graphs is GraphSet.DECODE
        return FlashAttentionMetadata(
            common=common,
            launch=self.launch(common, key),
            plan=self._plans.setdefault(key, Plan()),
            whole=decodes or (key is None and common.query_start_loc_cpu[0] == 0),
        )

    def _longest(self, common: CommonMetadata, key: GraphKey | None) -> tuple[int, int]:
        """Return the longest query and sequence: bounds for all batches of `key`, exact for an eager step."""
        if key is None:
            return max(common.max_query_len, 1), max(common.max_seq_len, 1)
        longest = self.limits.max_model_len
        return key.query_len if key.graphs is GraphSet.DECODE else min(key.num_tokens, longest), longest


class Version2Builder(FlashAttentionMetadataBuilder):
    """Builder of version 2, which chooses splits itself, from shapes and upper bounds.

    With a longest query of 1 it folds query heads into the query and takes token i for the token of slot i. So at least
    2 is passed unless every slot has a token, and also with an LSE, whose order would depend on the number of splits.
    """

    def launch(self, common: CommonMetadata, key: GraphKey | None) -> Launch:
        # Between pieces attention runs outside the graph too, and exact numbers make smaller grids.
        outside = key is None or key.graphs is GraphSet.PIECEWISE
        max_query_len, max_seq_len = self._longest(common, None if outside else key)
        mixed_graph = key is not None and key.graphs is GraphSet.MIXED
        if mixed_graph or self.spec.lse or not _token_by_slot(common):
            max_query_len = max(max_query_len, 2)
        return Launch(max_query_len=max_query_len, max_seq_len=max_seq_len, planned=True)


def _token_by_slot(common: CommonMetadata) -> bool:
    """Return True if token i belongs to slot i for all tokens. It does not in the prefill part of a split batch."""
    starts = common.query_start_loc_cpu
    num_slots = common.seq_lens.shape[0]
    if common.slot_mapping.shape[0] != num_slots:
        return False
    return bool((starts == np.minimum(np.arange(num_slots + 1), starts[-1])).all())


class Version3Builder(FlashAttentionMetadataBuilder):
    """Builder of version 3, which plans each step ahead of time if all layers have one window.

    With a plan, eager steps are launched as captured ones, but with exact maxima: a plan saves a kernel in each layer,
    and the bound on splits keeps their memory within the same budget. Without a plan the library would take the bound
    as the number of splits. Graphs then have one split, and eager steps leave the number to the library if its largest
    choice fits the budget.

    With batch invariance there is one split and no plan, and all launches get the same longest query and sequence: the
    library uses other tiles, and loads keys in another way, if no query is longer than one token.
    """

    def launch(self, common: CommonMetadata, key: GraphKey | None) -> Launch:
        if self.spec.batch_invariant:
            longest = self.limits.max_model_len
            longest_query = min(self.limits.max_num_batched_tokens, longest)
            return Launch(max_query_len=longest_query, max_seq_len=longest, num_splits=1)
        num_tokens = common.slot_mapping.shape[0]
        planned = plans(self.spec)
        if planned:
            num_splits = split_bound(num_tokens, self.spec)
        else:
            num_splits = 0 if key is None and unbounded_splits_fit(num_tokens, self.spec) else 1
        max_query_len, max_seq_len = self._longest(common, key)
        return Launch(max_query_len=max_query_len, max_seq_len=max_seq_len, num_splits=num_splits, planned=planned)


class Version4Builder(FlashAttentionMetadataBuilder):
    """Builder of version 4, which has no plan and so runs with one split."""

    def launch(self, common: CommonMetadata, key: GraphKey | None) -> Launch:
        max_query_len, max_seq_len = self._longest(common, key)
        return Launch(max_query_len=max_query_len, max_seq_len=max_seq_len, num_splits=1)
