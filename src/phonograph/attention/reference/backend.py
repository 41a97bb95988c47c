"""The torch reference backend: every feature, float32 inside, the oracle for all others and the CPU's default.

Its operators read query lengths and sequence lengths out of the batch's tensors when they run. So its metadata is those
tensors and a handle, and a graph that holds its calls serves any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.attention.backend import AttentionBackend, AttentionKind, AttentionLayer, AttentionSpec, Capabilities
from phonograph.attention.capabilities import Declaration
from phonograph.attention.metadata import AttentionMetadata, CommonMetadata, MetadataBuilder
from phonograph.core.device import DeviceSpec
from phonograph.graphs.modes import GraphKey, GraphSupport, Support
from phonograph.kernels.torch.attention import paged as reference

_DECLARED = Declaration(
    devices=("cpu", "cuda"),
    dtypes=("float32", "float16", "bfloat16"),
    kv_dtypes=("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    kinds=tuple(AttentionKind),
    alibi=True,
    sinks=True,
)


class ReferenceCapabilities(Capabilities):
    name = "reference"
    varies = "its decodes share sums that are as long as the longest of them"

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        return _DECLARED.refusals(spec, device)

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        if device.kind != "cpu":
            return Support(
                GraphSupport.NEVER,
                f"on {device.kind} its operators copy query_start_loc and seq_lens to the host: no capture allows that",
            )
        return Support(
            GraphSupport.ALWAYS,
            "its operator reads query_start_loc and seq_lens out of their tensors each time it runs, so nothing about "
            "the batch is frozen",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMetadata(AttentionMetadata):
    """The tensors of CommonMetadata by the same names, persistent if those are; `handle` stands for the schedule."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    handle: torch.Tensor
    causal: bool


class ReferenceMetadataBuilder(MetadataBuilder[ReferenceMetadata]):
    """One schedule serves all graphs: each step makes it anew before its layers read it."""

    def __init__(self, device: torch.device) -> None:
        self._handle = reference.new_handle(self, device)

    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> ReferenceMetadata:
        return ReferenceMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table,
            slot_mapping=common.slot_mapping,
            handle=self._handle,
            causal=common.causal,
        )


class ReferenceBackend(AttentionBackend[ReferenceMetadata]):
    capabilities = ReferenceCapabilities()

    def make_builder(self) -> ReferenceMetadataBuilder:
        return ReferenceMetadataBuilder(self.device)

    def schedule(self, metadata: ReferenceMetadata) -> None:
        reference.schedule(
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.slot_mapping,
            metadata.handle,
            self.spec.block_size,
        )

    def write_kv(
        self,
        layer: AttentionLayer,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: ReferenceMetadata,
    ) -> None:
        reference.kv_write(key_TKD, value_TKD, kv_cache, metadata.handle, layer.k_scale, layer.v_scale)

    def forward(
        self,
        layer: AttentionLayer,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: ReferenceMetadata,
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None = None,
    ) -> None:
        reference.attention(
            query_THD,
            kv_cache,
            metadata.block_table,
            metadata.handle,
            out_THD,
            lse_HT,
            layer.alibi_slopes,
            layer.sinks,
            layer.k_scale,
            layer.v_scale,
            layer.scale,
            layer.window[0],
            layer.window[1],
            layer.softcap,
            metadata.causal,
        )
