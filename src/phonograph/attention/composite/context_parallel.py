"""Backend of ranks that share a KV head: each has the keys of some tokens (decode context parallelism).

Token i of a sequence is on rank i % N, for the N neighbours of `Ranks.share`. A step attends in two parts, which are
merged by their log-sum-exps:

- The context, without a causal mask. Each rank attends the queries of all neighbours to its own keys, and sends each
  neighbour the results of its heads.
- The tokens of the step, causally. Every rank has their keys, in pages that live for one step.

So no kernel must know which positions a rank has. Decodes of one token have one part: the new token is the last of the
context, on the rank that keeps it. Lengths and slots of the parts are computed from the batch's tensors at the head of
the step, inside the graph. Inner backends see batches like others.

Shapes: N ranks, T tokens, R sequences, H query heads of a rank, K its KV heads, D head size, S tokens of a rank's page.
A block of the engine has N * S tokens, of which each rank keeps S in one page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AnyBackend, AttentionBackend, AttentionCall, MakeBackend
from phonograph.attention.metadata import AnyBuilder, AttentionMetadata, CommonMetadata, MetadataBuilder
from phonograph.core.blocks import blocks_for
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.kernels.ranks import Ranks, exchange_ranks, share_ranks
from phonograph.kernels.torch.attention.merge_parts import merge_parts, pack_parts


def context_spec(spec: AttentionSpec, num_ranks: int) -> AttentionSpec:
    """Return the attention of a rank's queries and those of its neighbours to its own keys."""
    return replace(spec, num_query_heads=num_ranks * spec.num_query_heads)


def step_pages(spec: AttentionSpec, limits: Limits) -> int:
    """Return the pages of the tokens of any step. Each sequence begins with a page of its own."""
    return blocks_for(limits.max_num_batched_tokens, spec.block_size) + limits.max_num_seqs


def step_cache_bytes(spec: AttentionSpec, limits: Limits) -> int:
    """Return the bytes of the keys and values of a step's tokens, which all layers share."""
    return step_pages(spec, limits) * spec.block_size * spec.kv_token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedMetadata(AttentionMetadata):
    """Batch with the metadata of its parts: a rank's part of the context, and the tokens of the step.

    step: None if the context has them, in a batch of decodes of one token
    """

    context: AttentionMetadata
    step: AttentionMetadata | None


class DividedTensors:
    """Lengths, slots and pages of the parts, in static memory.

    lse_XT: log-sum-exps of decodes of one token; minus infinity at the head of a step, where sequences without keys on
        this rank have it to its end

    Args:
        spec: attention of a rank.
        limits: the largest batch.
        device: of the batch's tensors.
        rank: number among the neighbours.
        num_ranks: N.
    """

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device, rank: int, num_ranks: int) -> None:
        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        most_seqs, most_tokens, self._size = limits.max_num_seqs, limits.max_num_batched_tokens, spec.block_size
        self._rank, self._num_ranks, self._last_page = rank, num_ranks, step_pages(spec, limits) - 1
        self._context_lens, self._step_lens = integers(most_seqs), integers(most_seqs)
        heads = num_ranks * spec.num_query_heads
        self.lse_XT = torch.zeros(heads, most_seqs, dtype=torch.float32, device=device)
        self._pages = integers(most_seqs, blocks_for(most_tokens, spec.block_size))
        self._slots, self._step_slots = (integers(most_tokens, dtype=torch.int64) for _ in range(2))
        self._page_numbers, self._tokens = (
            torch.arange(count, device=device) for count in (self._pages.shape[1], most_tokens)
        )

    def context_part(self, common: CommonMetadata, *, has_step: bool) -> CommonMetadata:
        """Return the batch of the context over this memory, which `write` fills. `has_step` adds the step's tokens."""
        lens = common.seq_lens_cpu
        if not has_step:
            lens = lens - np.diff(common.query_start_loc_cpu)
        lens = (lens + self._num_ranks - 1 - self._rank) // self._num_ranks
        return replace(
            common,
            max_seq_len=int(lens.max(initial=0)),
            seq_lens=self._context_lens[: len(common.seq_lens)],
            slot_mapping=self._slots[: len(common.slot_mapping)],
            seq_lens_cpu=lens,
            causal=False,
        )

    def step_part(self, common: CommonMetadata) -> CommonMetadata:
        """Return the batch of the step over this memory, which `write` fills."""
        num_slots = len(common.seq_lens)
        return replace(
            common,
            max_seq_len=common.max_query_len,
            seq_lens=self._step_lens[:num_slots],
            block_table=self._pages[:num_slots],
            slot_mapping=self._step_slots[: len(common.slot_mapping)],
            seq_lens_cpu=np.diff(common.query_start_loc_cpu),
        )

    def local_slots(self, slots_T: torch.Tensor) -> torch.Tensor:
        """Return the slots in this rank's pages for slots in blocks of all ranks; -1 where another rank has the token.

        Args:
            slots_T: int64; -1 for none.
        """
        num_ranks, size = self._num_ranks, self._size
        block, token = slots_T // (num_ranks * size), slots_T % (num_ranks * size)
        is_own = (slots_T >= 0) & (token % num_ranks == self._rank)
        return torch.where(is_own, block * size + token // num_ranks, -1)

    def write(self, common: CommonMetadata, *, has_step: bool) -> None:
        """Compute lengths, slots and pages of the parts from the batch's tensors; see `context_part`."""
        num_slots, num_tokens, starts = len(common.seq_lens), len(common.slot_mapping), common.query_start_loc
        self._slots[:num_tokens] = self.local_slots(common.slot_mapping)
        lens = common.seq_lens + (self._num_ranks - 1 - self._rank)
        if has_step:
            self._context_lens[:num_slots] = lens // self._num_ranks
            self.lse_XT.fill_(-torch.inf)
            return
        step_lens = starts[1 : num_slots + 1] - starts[:num_slots]
        self._context_lens[:num_slots] = (lens - step_lens) // self._num_ranks
        self._step_lens[:num_slots] = step_lens
        num_pages = (step_lens + (self._size - 1)) // self._size
        first_page = num_pages.cumsum(0) - num_pages
        self._pages[:num_slots] = (first_page.unsqueeze(1) + self._page_numbers).clamp_(max=self._last_page)
        tokens = self._tokens[:num_tokens]
        row = torch.searchsorted(starts[1 : num_slots + 1], tokens, right=True).clamp_(max=num_slots - 1)
        slots = first_page[row] * self._size + tokens - starts[row]
        self._step_slots[:num_tokens] = torch.where(tokens < starts[num_slots], slots, -1)


class DividedMetadataBuilder(MetadataBuilder[DividedMetadata]):
    """Builder of the parts, each by its own backend's builder."""

    def __init__(self, context: AnyBuilder, step: AnyBuilder, tensors: DividedTensors) -> None:
        self._context, self._step, self._tensors = context, step, tensors

    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> DividedMetadata:
        # As the key says, so that a step that runs beside pieces has the parts that these have.
        single = common.max_query_len <= 1 if key is None else key.graphs is GraphSet.DECODE and key.query_len == 1
        return DividedMetadata(
            common=common,
            context=self._context.build(self._tensors.context_part(common, has_step=single), key=key),
            step=None if single else self._step.build(self._tensors.step_part(common), key=key),
        )


class ContextParallelBackend(AttentionBackend[DividedMetadata]):
    """Attention over the keys of several ranks.

    Args:
        make: makes the backend of each part.
        ranks: connection with the other ranks.
        num_ranks: N.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        limits: Limits,
        *,
        make: MakeBackend,
        ranks: Ranks,
        num_ranks: int,
    ) -> None:
        super().__init__(spec, device, limits)
        self._context: AnyBackend = make(context_spec(spec, num_ranks), device, limits)
        self._step: AnyBackend = make(spec, device, limits)
        self.capabilities = self._step.capabilities
        self.reads_on_host = self._step.reads_on_host
        self._ranks, self._num_ranks = ranks, num_ranks
        self.tensors = DividedTensors(spec, limits, device, ranks.rank % num_ranks, num_ranks)
        shape = 2, step_pages(spec, limits), spec.block_size, spec.num_kv_heads, spec.head_size
        self._step_cache = torch.zeros(shape, dtype=getattr(torch, spec.kv_cache_dtype), device=device)
        # A kernel writes keys to the cache of the step alone (`kv_places`).
        self._copies = False

    def make_builder(self) -> DividedMetadataBuilder:
        return DividedMetadataBuilder(self._context.make_builder(), self._step.make_builder(), self.tensors)

    def schedule(self, metadata: DividedMetadata) -> None:
        self.tensors.write(metadata.common, has_step=metadata.step is None)
        self._context.schedule(metadata.context)
        if metadata.step is not None:
            self._step.schedule(metadata.step)

    def write_kv(self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, call: AttentionCall[DividedMetadata]) -> None:
        layer, kv_cache, metadata = call
        self._context.write_kv(key_TKD, value_TKD, AttentionCall(layer, kv_cache, metadata.context))
        if metadata.step is not None:
            self._step.write_kv(key_TKD, value_TKD, AttentionCall(layer, self._step_cache, metadata.step))

    def kv_places(
        self, call: AttentionCall[DividedMetadata], slot_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        metadata = call.metadata
        if metadata.step is None:
            return call.kv_cache, metadata.context.common.slot_mapping[: len(slot_mapping)]
        self._copies = True
        return self._step_cache, metadata.step.common.slot_mapping[: len(slot_mapping)]

    def _copy_step(self, call: AttentionCall[DividedMetadata], step: AttentionMetadata) -> None:
        """Copy keys and values of this rank's tokens from the cache of the step."""
        layer, kv_cache, metadata = call
        slots = step.common.slot_mapping.clamp(min=0)
        key_TKD, value_TKD = (plane.flatten(0, 1).index_select(0, slots) for plane in self._step_cache)
        self._context.write_kv(key_TKD, value_TKD, AttentionCall(layer, kv_cache, metadata.context))

    def forward(
        self,
        query_THD: torch.Tensor,
        call: AttentionCall[DividedMetadata],
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None = None,
    ) -> None:
        layer, kv_cache, metadata = call
        step, own, static_XT = metadata.step, None, None
        if step is None:
            static_XT = self.tensors.lse_XT[:, : len(query_THD)]
        elif self._copies:
            self._copy_step(call, step)
        query_TXD = share_ranks(query_THD, self._num_ranks, self._ranks)
        context = AttentionCall(layer, kv_cache, metadata.context)
        found_TXD, lse_XT = _attend(self._context, query_TXD, context, static_XT)
        if step is not None:
            own = _attend(self._step, query_THD, AttentionCall(layer, self._step_cache, step))
        if not self._ranks.merge_heads(found_TXD, lse_XT, out_THD, lse_HT, own):
            # The log-sum-exps travel with the results.
            parts_NTHF = exchange_ranks(pack_parts(found_TXD, lse_XT, self._num_ranks), self._ranks)
            merge_parts(parts_NTHF, out_THD, lse_HT, own)


def _attend(
    backend: AnyBackend,
    query_THD: torch.Tensor,
    call: AttentionCall[AttentionMetadata],
    lse_HT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and log-sum-exps. `lse_HT` has minus infinity where there are no keys; None for new memory."""
    out_THD = query_THD.new_empty(query_THD.shape) if backend.clears_padding else query_THD.new_zeros(query_THD.shape)
    if lse_HT is None:
        lse_HT = torch.full(query_THD.shape[1::-1], -torch.inf, dtype=torch.float32, device=query_THD.device)
    backend.forward(query_THD, call, out_THD, lse_HT)
    return out_THD, lse_HT
