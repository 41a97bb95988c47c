"""Backend of ranks that share a KV head: each has the keys of some tokens (decode context parallelism).

Token i of a sequence is on rank i % N, for the N neighbours of `Ranks.share`. A step attends in two parts, which are
merged by their log-sum-exps:

- The context, without a causal mask. Each rank attends the queries of all neighbours to its own keys, and sends each
  neighbour the results of its heads.
- The tokens of the step, causally. Every rank has their keys, in pages that live for one step.

So no kernel must know which positions a rank has. Lengths and slots of both parts are computed from the batch's tensors
at the head of the step, inside the graph. Inner backends see batches like others.

Shapes: N ranks, T tokens, R sequences, H query heads of a rank, K its KV heads, D head size, S tokens of a rank's page.
A block of the engine has N * S tokens, of which each rank keeps S in one page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AnyBackend, AttentionBackend, AttentionCall, MakeBackend
from phonograph.attention.metadata import AnyBuilder, AttentionMetadata, CommonMetadata, MetadataBuilder
from phonograph.core.blocks import blocks_for
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey
from phonograph.kernels.ranks import Ranks, exchange_ranks, share_ranks


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
    """Batch with the metadata of its two parts: a rank's part of the context, and the tokens of the step."""

    context: AttentionMetadata
    step: AttentionMetadata


class DividedTensors:
    """Lengths, slots and pages of both parts, in static memory.

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
        self._pages = integers(most_seqs, blocks_for(most_tokens, spec.block_size))
        self._slots, self._step_slots = (integers(most_tokens, dtype=torch.int64) for _ in range(2))
        self._page_numbers, self._tokens = (
            torch.arange(count, device=device) for count in (self._pages.shape[1], most_tokens)
        )

    def parts(self, common: CommonMetadata) -> tuple[CommonMetadata, CommonMetadata]:
        """Return the batches of the context and of the step, over this memory, which `write` fills."""
        num_slots, num_tokens = len(common.seq_lens), len(common.slot_mapping)
        starts, lens = common.query_start_loc_cpu, common.seq_lens_cpu
        step_lens = starts[1:] - starts[:-1]
        context_lens = (lens - step_lens + self._num_ranks - 1 - self._rank) // self._num_ranks
        context = replace(
            common,
            max_seq_len=int(context_lens.max(initial=0)),
            seq_lens=self._context_lens[:num_slots],
            slot_mapping=self._slots[:num_tokens],
            seq_lens_cpu=context_lens,
            causal=False,
        )
        step = replace(
            common,
            max_seq_len=common.max_query_len,
            seq_lens=self._step_lens[:num_slots],
            block_table=self._pages[:num_slots],
            slot_mapping=self._step_slots[:num_tokens],
            seq_lens_cpu=step_lens,
        )
        return context, step

    def local_slots(self, slots_T: torch.Tensor) -> torch.Tensor:
        """Return the slots in this rank's pages for slots in blocks of all ranks; -1 where another rank has the token.

        Args:
            slots_T: int64; -1 for none.
        """
        num_ranks, size = self._num_ranks, self._size
        block, token = slots_T // (num_ranks * size), slots_T % (num_ranks * size)
        is_own = (slots_T >= 0) & (token % num_ranks == self._rank)
        return torch.where(is_own, block * size + token // num_ranks, -1)

    def write(self, common: CommonMetadata) -> None:
        """Compute lengths, slots and pages of both parts from the batch's tensors."""
        num_slots, num_tokens, starts = len(common.seq_lens), len(common.slot_mapping), common.query_start_loc
        step_lens = starts[1 : num_slots + 1] - starts[:num_slots]
        context_lens = common.seq_lens - step_lens + (self._num_ranks - 1 - self._rank)
        self._context_lens[:num_slots] = context_lens // self._num_ranks
        self._step_lens[:num_slots] = step_lens
        self._slots[:num_tokens] = self.local_slots(common.slot_mapping)
        num_pages = (step_lens + (self._size - 1)) // self._size
        first_page = num_pages.cumsum(0) - num_pages
        self._pages[:num_slots] = (first_page.unsqueeze(1) + self._page_numbers).clamp_(max=self._last_page)
        tokens = self._tokens[:num_tokens]
        row = torch.searchsorted(starts[1 : num_slots + 1], tokens, right=True).clamp_(max=num_slots - 1)
        slots = first_page[row] * self._size + tokens - starts[row]
        self._step_slots[:num_tokens] = torch.where(tokens < starts[num_slots], slots, -1)


class DividedMetadataBuilder(MetadataBuilder[DividedMetadata]):
    """Builder of both parts, each by its own backend's builder."""

    def __init__(self, context: AnyBuilder, step: AnyBuilder, tensors: DividedTensors) -> None:
        self._context, self._step, self._tensors = context, step, tensors

    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> DividedMetadata:
        context, step = self._tensors.parts(common)
        return DividedMetadata(
            common=common, context=self._context.build(context, key=key), step=self._step.build(step, key=key)
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
        # Triton is installed where there is a GPU.
        kernels = "triton" if device.type == "cuda" else "torch"
        self._kernels: Any = import_module(f"phonograph.kernels.{kernels}.attention.merge_parts")
        self.tensors = DividedTensors(spec, limits, device, ranks.rank % num_ranks, num_ranks)
        shape = 2, step_pages(spec, limits), spec.block_size, spec.num_kv_heads, spec.head_size
        self._step_cache = torch.zeros(shape, dtype=getattr(torch, spec.kv_cache_dtype), device=device)
        # A kernel writes keys to the cache of the step alone (`kv_places`).
        self._copies = False

    def make_builder(self) -> DividedMetadataBuilder:
        return DividedMetadataBuilder(self._context.make_builder(), self._step.make_builder(), self.tensors)

    def schedule(self, metadata: DividedMetadata) -> None:
        self.tensors.write(metadata.common)
        self._context.schedule(metadata.context)
        self._step.schedule(metadata.step)

    def write_kv(self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, call: AttentionCall[DividedMetadata]) -> None:
        layer, kv_cache, metadata = call
        self._context.write_kv(key_TKD, value_TKD, AttentionCall(layer, kv_cache, metadata.context))
        self._step.write_kv(key_TKD, value_TKD, AttentionCall(layer, self._step_cache, metadata.step))

    def kv_places(
        self, call: AttentionCall[DividedMetadata], slot_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._copies = True
        return self._step_cache, call.metadata.step.common.slot_mapping[: len(slot_mapping)]

    def _copy_step(self, call: AttentionCall[DividedMetadata]) -> None:
        """Copy keys and values of this rank's tokens from the cache of the step."""
        layer, kv_cache, metadata = call
        slots = metadata.step.common.slot_mapping.clamp(min=0)
        key_TKD, value_TKD = (plane.flatten(0, 1).index_select(0, slots) for plane in self._step_cache)
        self._context.write_kv(key_TKD, value_TKD, AttentionCall(layer, kv_cache, metadata.context))

    def forward(
        self,
        query_THD: torch.Tensor,
        call: AttentionCall[DividedMetadata],
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None = None,
    ) -> None:
        if self._copies:
            self._copy_step(call)
        layer, kv_cache, metadata = call
        num_ranks = self._num_ranks
        query_NTHD = share_ranks(query_THD.contiguous(), num_ranks, self._ranks)
        # Of one head a rank, `flatten` returns a view, whose heads lie far apart.
        query_TXD = query_NTHD.transpose(0, 1).flatten(1, 2).contiguous()
        found_TXD, lse_XT = self._attend(self._context, query_TXD, AttentionCall(layer, kv_cache, metadata.context))
        # The log-sum-exps travel with the results.
        parts_NTHF = exchange_ranks(self._kernels.pack_parts(found_TXD, lse_XT, num_ranks), self._ranks)
        own_THD, own_HT = self._attend(self._step, query_THD, AttentionCall(layer, self._step_cache, metadata.step))
        self._kernels.merge_parts(parts_NTHF, own_THD, own_HT, out_THD, lse_HT)

    def _attend(
        self, backend: AnyBackend, query_THD: torch.Tensor, call: AttentionCall[AttentionMetadata]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out_THD = torch.empty_like(query_THD) if backend.clears_padding else torch.zeros_like(query_THD)
        lse_HT = torch.full(query_THD.shape[1::-1], -torch.inf, dtype=torch.float32, device=query_THD.device)
        backend.forward(query_THD, call, out_THD, lse_HT)
        return out_THD, lse_HT
