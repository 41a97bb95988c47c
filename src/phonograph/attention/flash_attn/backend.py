"""FlashAttention as backends, one for each version: what a graph freezes, and where the plan of a step lies.

What differs between versions is which numbers go into a launch; a builder each decides that. Everything else is here
once, and knows of no package: `Library` is what calls them.

The tensors of a batch are persistent, so metadata made for a graph stays right as it is: a block table that changes is
written in place, and there is nothing to refresh in metadata that exists, as peers do when groups share it.

Neither drafting nor batch invariance has a setting in this engine. A draft's step would want builds without a plan, and
batch invariance one split without a plan (`_Numbers(num_splits=1, planned=False)`), since splits depend on the batch.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from phonograph.attention.backend import AttentionBackend, AttentionLayer, AttentionSpec, BatchLimits
from phonograph.attention.flash_attn.capabilities import (
    FlashAttention2Capabilities,
    FlashAttention3Capabilities,
    FlashAttention4Capabilities,
)
from phonograph.attention.flash_attn.libraries import Launch
from phonograph.attention.flash_attn.providers import make_library
from phonograph.attention.metadata import AttentionMetadata, CommonMetadata, MetadataBuilder
from phonograph.errors import BackendError
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.kernels.triton.rope_kv import write_kv

MAX_SPLITS = 32
"""Parts that the keys of a sequence are cut into at most."""
ACCUMULATOR_BYTES = 128 << 20
"""What the partial results of one launch may take, float32 [splits, H, T, D]: a graph keeps them in its pool."""
_HEURISTIC_SPLITS = 128
"""The most that the library's own choice comes to."""


def split_bound(num_tokens: int, spec: AttentionSpec) -> int:
    """The bound on splits for steps of `num_tokens` padded tokens: the same in capture, replay and eager runs.

    MAX_SPLITS, or fewer where the partial results would outgrow ACCUMULATOR_BYTES; 1 where that leaves less than 2. It
    depends on the shape alone, so that a replay can never need more room than its capture set aside.
    """
    fitting = ACCUMULATOR_BYTES // _accumulator_bytes(num_tokens, spec)
    return min(MAX_SPLITS, fitting) if fitting >= 2 else 1


def _accumulator_bytes(num_tokens: int, spec: AttentionSpec) -> int:
    """Of one split."""
    return 4 * max(num_tokens, 1) * spec.num_query_heads * spec.head_size


class Plan:
    """The plan of one graph (or of eager steps): the part of the persistent buffer that it fills; None until it did.

    How long it is follows from the graph's shape, and is known once `schedule` ran for it. It outlives the metadata of
    a step, since a replay of pieces runs attention with metadata for which `schedule` ran in the capture only.
    """

    def __init__(self) -> None:
        self.part: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttentionMetadata(AttentionMetadata):
    """planned: whether `schedule` makes a plan, and launches read it."""

    launch: Launch
    slot_mapping: torch.Tensor
    plan: Plan
    planned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """What a launch freezes: as Launch and FlashAttentionMetadata have it."""

    max_query_len: int
    max_seq_len: int
    num_splits: int = 0
    planned: bool = False


class FlashAttentionMetadataBuilder(MetadataBuilder):
    """Wraps the batch's own tensors: all that is built are a few numbers, by key the same each time."""

    def __init__(self, spec: AttentionSpec, limits: BatchLimits) -> None:
        self.spec = spec
        self.limits = limits
        self._plans: dict[GraphKey | None, Plan] = {}

    @abstractmethod
    def _numbers(self, common: CommonMetadata, key: GraphKey | None) -> _Numbers: ...

    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> FlashAttentionMetadata:
        """The metadata of one step.

        Raises:
            BackendError: a batch without a causal mask for a model with ALiBi, whose bias on later keys is another one.
        """
        if self.spec.alibi and not common.causal:
            raise BackendError(
                "attention backend flash_attn: ALiBi without a causal mask; its bias falls to both sides"
            )
        numbers = self._numbers(common, key)
        return FlashAttentionMetadata(
            launch=Launch(
                query_start_loc=common.query_start_loc,
                seq_lens=common.seq_lens,
                block_table=common.block_table,
                max_query_len=numbers.max_query_len,
                max_seq_len=numbers.max_seq_len,
                causal=common.causal,
                num_splits=numbers.num_splits,
            ),
            slot_mapping=common.slot_mapping,
            plan=self._plans.setdefault(key, Plan()),
            planned=numbers.planned,
        )

    def _longest_query(self, key: GraphKey) -> int:
        if key.graphs is GraphSet.DECODE:
            return key.query_len
        return min(key.num_tokens, self.limits.max_model_len)


class Version2Builder(FlashAttentionMetadataBuilder):
    """Version 2 must not be told that the longest query is 1, unless every slot has a token: it then folds query heads
    into the query, takes token i for slot i's, and fails where there are fewer tokens than slots.

    It is told no splits: they are its own choice, from shapes and upper bounds.
    """

    def _numbers(self, common: CommonMetadata, key: GraphKey | None) -> _Numbers:
        if key is None or key.graphs is GraphSet.PIECEWISE:
            # Between pieces attention runs outside the graph too, and exact numbers make smaller grids.
            max_query_len, max_seq_len = max(common.max_query_len, 1), max(common.max_seq_len, 1)
        else:
            max_query_len, max_seq_len = self._longest_query(key), self.limits.max_model_len
        mixed_graph = key is not None and key.graphs is GraphSet.MIXED
        if mixed_graph or common.slot_mapping.shape[0] != common.seq_lens.shape[0]:
            max_query_len = max(max_query_len, 2)
        return _Numbers(max_query_len=max_query_len, max_seq_len=max_seq_len, planned=True)


class Version3Builder(FlashAttentionMetadataBuilder):
    """Version 3 plans ahead of time where all layers have one window; its plan is then part of every step.

    With a plan, eager steps are launched as captured ones are, only with exact maxima: a plan saves each layer a
    kernel, and the bound on splits keeps their memory within the same budget. Without one, a number of splits would be
    taken as it is and not as a bound: graphs then have one split, and eager steps the library's choice where the
    largest one fits the budget.
    """

    def _numbers(self, common: CommonMetadata, key: GraphKey | None) -> _Numbers:
        num_tokens = common.slot_mapping.shape[0]
        planned = len(self.spec.windows) == 1
        if planned:
            num_splits = split_bound(num_tokens, self.spec)
        else:
            fits = _HEURISTIC_SPLITS * _accumulator_bytes(num_tokens, self.spec) <= ACCUMULATOR_BYTES
            num_splits = 0 if key is None and fits else 1
        return _Numbers(
            max_query_len=max(common.max_query_len, 1) if key is None else self._longest_query(key),
            max_seq_len=max(common.max_seq_len, 1) if key is None else self.limits.max_model_len,
            num_splits=num_splits,
            planned=planned,
        )


class Version4Builder(FlashAttentionMetadataBuilder):
    """Version 4 has no plan, so it runs with one split."""

    def _numbers(self, common: CommonMetadata, key: GraphKey | None) -> _Numbers:
        return _Numbers(
            max_query_len=max(common.max_query_len, 1) if key is None else self._longest_query(key),
            max_seq_len=max(common.max_seq_len, 1) if key is None else self.limits.max_model_len,
            num_splits=1,
        )


class FlashAttentionBackend(AttentionBackend):
    """What all versions share.

    Raises:
        BackendError: when it is made: the library is not here, or does not take what this spec needs.
    """

    clears_padding = False
    builder: type[FlashAttentionMetadataBuilder]

    def __init__(self, spec: AttentionSpec, device: torch.device, limits: BatchLimits) -> None:
        super().__init__(spec, device, limits)
        self._library = make_library(self.capabilities.version, spec)
        # A semaphore and four numbers for each request slot, in vectors of a multiple of four. No graph has more slots
        # than there are sequences; tokens, of which a graph may have more, are counted to be safe from other layouts.
        slots = max(limits.max_num_seqs, limits.max_num_tokens)
        self._plan = torch.zeros(1 + -(-slots // 4) * 16, dtype=torch.int32, device=device)
        if spec.lse:
            self._token_numbers = torch.arange(limits.max_num_tokens, dtype=torch.int32, device=device)
            self._no_keys = torch.tensor(-torch.inf, device=device)

    def make_builder(self) -> FlashAttentionMetadataBuilder:
        return self.builder(self.spec, self.limits)

    def schedule(self, metadata: AttentionMetadata) -> None:
        """Makes the library's plan where it has one, into the one buffer that eager steps, graphs and pieces share.

        A graph's own memory would not do: pieces are followed by attention outside, when later pieces may have reused
        it. The buffer's rest is zeroed each time, as blocks of the launch would act on entries of an earlier plan.
        """
        assert isinstance(metadata, FlashAttentionMetadata)
        if not metadata.planned:
            return
        made = self._library.schedule(metadata.launch, self.spec.windows[0])
        if made is None:
            return
        size = made.shape[0]
        if size > self._plan.shape[0]:
            raise BackendError(
                f"attention backend {self.capabilities.label}: its schedule has {size} numbers for "
                f"{metadata.launch.seq_lens.shape[0]} request slots; one semaphore and four for each are known"
            )
        metadata.plan.part = self._plan[:size]
        metadata.plan.part.copy_(made)
        self._plan[size:].zero_()

    def write_kv(
        self,
        layer: AttentionLayer,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        assert isinstance(metadata, FlashAttentionMetadata)
        write_kv(key_TKD, value_TKD, kv_cache, metadata.slot_mapping, layer.k_scale, layer.v_scale)

    def forward(
        self,
        layer: AttentionLayer,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None = None,
    ) -> None:
        assert isinstance(metadata, FlashAttentionMetadata)
        launch, plan = metadata.launch, metadata.plan.part if metadata.planned else None
        key_BSKD, value_BSKD = kv_cache.unbind(0)
        lse = self._library.attend(layer, query_THD, key_BSKD, value_BSKD, launch, plan, out_THD)
        if lse is not None and lse_HT is not None:
            # The library's tensor is new, and what it has for rows of no request is whatever lay there.
            real = self._token_numbers[: lse_HT.shape[1]] < launch.query_start_loc[-1:]
            torch.where(real, lse.view_as(lse_HT), self._no_keys, out=lse_HT)


class FlashAttention2Backend(FlashAttentionBackend):
    capabilities = FlashAttention2Capabilities()
    builder = Version2Builder


class FlashAttention3Backend(FlashAttentionBackend):
    capabilities = FlashAttention3Capabilities()
    builder = Version3Builder


class FlashAttention4Backend(FlashAttentionBackend):
    capabilities = FlashAttention4Capabilities()
    builder = Version4Builder
