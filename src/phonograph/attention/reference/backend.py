"""The torch reference: every feature, oracle of all other backends, and the default on CPUs.

Its operators read query lengths and sequence lengths out of the batch's tensors when they run, so a graph that contains
them serves any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.attention.attention_spec import AttentionKind, AttentionSpec
from phonograph.attention.backend import AttentionBackend, AttentionCall
from phonograph.attention.capabilities import Declaration, DeclaredCapabilities
from phonograph.attention.metadata import AttentionMetadata, CommonMetadata, MetadataBuilder
from phonograph.core.device import DeviceSpec
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSupport, Support
from phonograph.kernels.torch.attention import paged as reference
from phonograph.kernels.torch.attention.schedule import new_handle


class ReferenceCapabilities(DeclaredCapabilities):
    name = "reference"
    skips_freed_blocks = True
    takes_length_bounds = True
    varies = "its decodes share sums that are as long as the longest of them"
    declared = Declaration(
        devices=("cpu", "cuda"),
        dtypes=("float32", "float16", "bfloat16"),
        kv_dtypes=("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        kinds=tuple(AttentionKind),
        windows=True,
        softcap=True,
        lse=True,
        non_causal=True,
        alibi=True,
        sinks=True,
    )

    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        if device.kind != "cpu":
            return Support(
                GraphSupport.NEVER,
                f"on {device.kind} its operators copy query_start_loc and seq_lens to the host: no capture allows that",
            )
        return Support(
            GraphSupport.ALWAYS,
            "its operator reads each batch from tensors; nothing is frozen",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMetadata(AttentionMetadata):
    """Batch with a schedule, which the tensor `handle` identifies."""

    handle: torch.Tensor


class ReferenceMetadataBuilder(MetadataBuilder[ReferenceMetadata]):
    """Builder with one schedule for all graphs. Each step computes it before its layers read it."""

    def __init__(self, device: torch.device) -> None:
        self._handle = new_handle(self, device)

    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> ReferenceMetadata:
        return ReferenceMetadata(common=common, handle=self._handle)


class ReferenceBackend(AttentionBackend[ReferenceMetadata]):
    capabilities = ReferenceCapabilities()

    def __init__(self, spec: AttentionSpec, device: torch.device, limits: Limits) -> None:
        super().__init__(spec, device, limits)
        self.reads_on_host = device.type != "cpu"

    def make_builder(self) -> ReferenceMetadataBuilder:
        return ReferenceMetadataBuilder(self.device)

    def schedule(self, metadata: ReferenceMetadata) -> None:
        common = metadata.common
        reference.schedule(
            common.query_start_loc,
            common.seq_lens,
            common.block_table,
            common.slot_mapping,
            metadata.handle,
            self.spec.block_size,
        )

    def write_kv(self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, call: AttentionCall[ReferenceMetadata]) -> None:
        layer = call.layer
        reference.kv_write(key_TKD, value_TKD, call.kv_cache, call.metadata.handle, layer.k_scale, layer.v_scale)

    def forward(
        self,
        query_THD: torch.Tensor,
        call: AttentionCall[ReferenceMetadata],
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None = None,
    ) -> None:
        layer, metadata = call.layer, call.metadata
        reference.attention(
            query_THD,
            call.kv_cache,
            metadata.common.block_table,
            metadata.handle,
            out_THD,
            lse_HT,
            layer.alibi_slopes,
            layer.sinks,
            layer.k_scale,
            layer.v_scale,
            layer.scale,
            *layer.window,
            layer.softcap,
            metadata.common.causal,
        )
