"""Base of the backends that write the KV cache with our Triton kernel, which serves every cache layout."""

from __future__ import annotations

import torch

from phonograph.attention.backend import AttentionBackend, AttentionCall
from phonograph.attention.metadata import MetadataT
from phonograph.kernels.triton.attention.rope_and_kv_write import write_kv


class GpuBackend(AttentionBackend[MetadataT]):
    """Backend with our KV write."""

    def write_kv(self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, call: AttentionCall[MetadataT]) -> None:
        slot_mapping_T, layer = call.metadata.common.slot_mapping, call.layer
        write_kv(key_TKD, value_TKD, call.kv_cache, slot_mapping_T, layer.k_scale, layer.v_scale)
