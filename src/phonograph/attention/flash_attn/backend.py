"""FlashAttention as backends, one for each version, with the plan of a step in one persistent buffer.

Versions differ in their builders (`builders.py`), packages in their `Library`.

Over an FP8 cache a kernel of ours rounds queries to FP8 before each launch. The scale is the checkpoint's, or 1. It is
not computed from the queries: the error hardly depends on it while queries are below 448, the largest e4m3 value, and a
token's result would depend on the chunk that it comes in.
"""

from __future__ import annotations

import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.flash_attn.builders import (
    FlashAttentionMetadataBuilder,
    Version2Builder,
    Version3Builder,
    Version4Builder,
)
from phonograph.attention.flash_attn.capabilities import (
    FlashAttention2Capabilities,
    FlashAttention3Capabilities,
    FlashAttention4Capabilities,
)
from phonograph.attention.flash_attn.libraries import FlashAttentionCall, FlashAttentionMetadata
from phonograph.attention.flash_attn.providers import make_library
from phonograph.attention.flash_attn.sizes import plan_length
from phonograph.attention.kv_write import GpuBackend
from phonograph.attention.metadata import CommonMetadata
from phonograph.core.limits import Limits
from phonograph.errors import BackendError
from phonograph.kernels.triton.attention.quantize_query import quantize_queries


class FlashAttentionBackend(GpuBackend[FlashAttentionMetadata]):
    """Base of all versions.

    Raises:
        ConfigError: the library is not installed.
        BackendError: the library lacks an argument that this spec needs.
    """

    clears_padding = False
    builder: type[FlashAttentionMetadataBuilder]

    def __init__(self, spec: AttentionSpec, device: torch.device, limits: Limits) -> None:
        super().__init__(spec, device, limits)
        self._library = make_library(self.capabilities.version, spec)
        self._plan = torch.zeros(plan_length(limits), dtype=torch.int32, device=device)
        self.quantizes_queries = spec.has_fp8_cache
        if self.quantizes_queries:
            shape = limits.max_num_batched_tokens, spec.num_query_heads, spec.head_size
            self._queries = torch.zeros(shape, dtype=getattr(torch, spec.kv_cache_dtype), device=device)
        if spec.lse:
            self._token_numbers = torch.arange(limits.max_num_batched_tokens, dtype=torch.int32, device=device)
            self._without_keys = torch.zeros(limits.max_num_batched_tokens, dtype=torch.bool, device=device)

    def make_builder(self) -> FlashAttentionMetadataBuilder:
        return self.builder(self.spec, self.limits)

    def schedule(self, metadata: FlashAttentionMetadata) -> None:
        """Write the library's plan, if it has one, into the buffer that eager steps, graphs and pieces share.

        Before it come the rows that keep the caller's LSE, which are the same for all layers.

        A graph's own memory would be reused by later pieces before attention, which runs outside, reads the plan. The
        rest of the buffer is zeroed each time: blocks of the launch would act on entries of an earlier plan.
        """
        if self.spec.lse:
            self._find_rows_without_keys(metadata.common)
        if not metadata.launch.planned:
            return
        made = self._library.schedule(metadata, self.spec.windows[0])
        if made is None:
            return
        size = made.shape[0]
        if size > self._plan.shape[0]:
            raise BackendError(
                f"attention backend {self.capabilities.label}: its schedule has {size} numbers for "
                f"{metadata.common.seq_lens.shape[0]} request slots; one semaphore and four for each are known"
            )
        metadata.plan.part = self._plan[:size]
        metadata.plan.part.copy_(made)
        self._plan[size:].zero_()

    def forward(
        self,
        query_THD: torch.Tensor,
        call: FlashAttentionCall,
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None = None,
    ) -> None:
        metadata = call.metadata
        plan = metadata.plan.part if metadata.launch.planned else None
        key_BSKD, value_BSKD = call.kv_cache.unbind(0)
        if self.quantizes_queries:
            rounded_THD = self._queries[: query_THD.shape[0]]
            quantize_queries(query_THD, call.layer.q_scale, rounded_THD)
            query_THD = rounded_THD
        lse = self._library.attend(query_THD, key_BSKD, value_BSKD, call, plan, out_THD)
        if lse is not None and lse_HT is not None:
            torch.where(self._without_keys[: lse_HT.shape[1]], lse_HT, lse.view_as(lse_HT), out=lse_HT)

    def _find_rows_without_keys(self, common: CommonMetadata) -> None:
        """Find rows of no query of this launch too. The library leaves those of its new LSE unwritten."""
        starts, rows = common.query_start_loc, self._token_numbers
        lens = torch.nn.functional.pad(common.seq_lens, (0, 1))
        no_keys = lens[torch.searchsorted(starts[1:], rows, right=True)] == 0
        torch.logical_or(no_keys, rows < starts[:1], out=self._without_keys)


class FlashAttention2Backend(FlashAttentionBackend):
    capabilities = FlashAttention2Capabilities()
    builder = Version2Builder


class FlashAttention3Backend(FlashAttentionBackend):
    capabilities = FlashAttention3Capabilities()
    builder = Version3Builder


class FlashAttention4Backend(FlashAttentionBackend):
    capabilities = FlashAttention4Capabilities()
    builder = Version4Builder


BACKENDS = {"2": FlashAttention2Backend, "3": FlashAttention3Backend, "4": FlashAttention4Backend}
"""By version."""
