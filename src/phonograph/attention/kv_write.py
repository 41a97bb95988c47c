"""What backends on a GPU share: the KV write, by a kernel of ours that serves every cache layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from phonograph.attention.backend import AttentionBackend, AttentionLayer
from phonograph.attention.metadata import AttentionMetadata
from phonograph.kernels.triton.attention.rope_and_kv_write import write_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMetadata(AttentionMetadata):
    """slot_mapping: as CommonMetadata has it"""

    slot_mapping: torch.Tensor


GpuMetadataT = TypeVar("GpuMetadataT", bound=GpuMetadata)


class GpuBackend(AttentionBackend[GpuMetadataT]):
    """A backend with our KV write."""

    def write_kv(
        self,
        layer: AttentionLayer,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: GpuMetadataT,
    ) -> None:
        write_kv(key_TKD, value_TKD, kv_cache, metadata.slot_mapping, layer.k_scale, layer.v_scale)
