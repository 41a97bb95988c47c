"""What a launch of FlashAttention freezes, decided for each version by a builder of its own.

The tensors of a batch are persistent, so metadata made for a graph stays right as it is: a block table that changes is
written in place, and there is nothing to refresh in metadata that exists, as peers do when groups share it.

Drafting has no setting in this engine; a draft's step would want builds without a plan.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from phonograph.attention.backend import AttentionSpec, BatchLimits
from phonograph.attention.flash_attn.libraries import FlashAttentionMetadata, Launch, Plan
from phonograph.attention.flash_attn.sizes import plans, split_bound, unbounded_splits_fit
from phonograph.attention.metadata import CommonMetadata, MetadataBuilder
from phonograph.errors import BackendError
from phonograph.graphs.modes import GraphKey, GraphSet


class FlashAttentionMetadataBuilder(MetadataBuilder[FlashAttentionMetadata]):
    """Wraps the batch's own tensors: all that is built are a few numbers, by key the same each time."""

    def __init__(self, spec: AttentionSpec, limits: BatchLimits) -> None:
        self.spec = spec
        self.limits = limits
        self._plans: dict[GraphKey | None, Plan] = {}

    @abstractmethod
    def launch(self, common: CommonMetadata, key: GraphKey | None) -> Launch: ...

    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> FlashAttentionMetadata:
        """The metadata of one step.

        Raises:
            BackendError: a batch without a causal mask for a model with ALiBi, whose bias on later keys is another one.
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
        """The longest query and sequence: of every batch of `key`, or exactly of an eager one."""
        if key is None:
            return max(common.max_query_len, 1), max(common.max_seq_len, 1)
        longest = self.limits.max_model_len
        return key.query_len if key.graphs is GraphSet.DECODE else min(key.num_tokens, longest), longest


class Version2Builder(FlashAttentionMetadataBuilder):
    """Version 2 must not be told that the longest query is 1, unless every slot has a token: it then folds query heads
    into the query, takes token i for slot i's, and fails where there are fewer tokens than slots.

    Nor where the LSE is asked for: of folded queries its order depends on whether keys were split.

    It is told no splits: they are its own choice, from shapes and upper bounds.
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
    """Whether token i is that of slot i, for as many as there are: not so in a batch whose decodes were cut off."""
    starts = common.query_start_loc_cpu
    num_slots = common.seq_lens.shape[0]
    if common.slot_mapping.shape[0] != num_slots:
        return False
    return bool((starts == np.minimum(np.arange(num_slots + 1), starts[-1])).all())


class Version3Builder(FlashAttentionMetadataBuilder):
    """Version 3 plans ahead of time where all layers have one window; its plan is then part of every step.

    With a plan, eager steps are launched as captured ones are, only with exact maxima: a plan saves each layer a
    kernel, and the bound on splits keeps their memory within the same budget. Without one, a number of splits would be
    taken as it is and not as a bound: graphs then have one split, and eager steps the library's choice where the
    largest one fits the budget.

    For batch invariance there is one split and no plan, and every launch is told the same longest query and sequence:
    the library takes other tiles, and another way to load keys, where no query is longer than one token.
    """

    def launch(self, common: CommonMetadata, key: GraphKey | None) -> Launch:
        if self.spec.batch_invariant:
            longest = self.limits.max_model_len
            longest_query = min(self.limits.max_num_tokens, longest)
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
    """Version 4 has no plan, so it runs with one split."""

    def launch(self, common: CommonMetadata, key: GraphKey | None) -> Launch:
        max_query_len, max_seq_len = self._longest(common, key)
        return Launch(max_query_len=max_query_len, max_seq_len=max_seq_len, num_splits=1)
