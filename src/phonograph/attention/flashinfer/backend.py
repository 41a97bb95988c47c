"""FlashInfer as a backend: decodes and prefills each through a wrapper, planned in `build` from the host's lengths.

The device's tensors still hold the step before when `build` runs, so lengths come from their host copies, and page
numbers, which the host does not have, are laid out by a kernel at the head of the step (`schedule`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from phonograph.attention.backend import AttentionBackend, AttentionLayer, AttentionSpec, BatchLimits, KVLayout
from phonograph.attention.flashinfer.capabilities import FlashInferCapabilities, prefill_routine
from phonograph.attention.flashinfer.library import Library, load_library
from phonograph.attention.flashinfer.planner import Part, Planner
from phonograph.attention.flashinfer.staging import HostPlans
from phonograph.attention.flashinfer.workspace import Sizes
from phonograph.attention.metadata import AttentionMetadata, CommonMetadata, MetadataBuilder
from phonograph.errors import BackendError
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.kernels.triton.page_indices import page_indices
from phonograph.kernels.triton.rope_kv import write_kv

_NO_GPU = (9, 0), 2
"""Capability and multiprocessors that tests without a GPU pretend."""
_LEAST_LSE = -4.9e4
"""Its kernels write -5e4 for minus infinity, in base 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferMetadata(AttentionMetadata):
    """Tensors of CommonMetadata by the same names, where page numbers go, and what runs on which rows, in order.

    num_rows: rows of the batch with its padding
    """

    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    indices: torch.Tensor
    parts: tuple[Part, ...]
    num_rows: int


class FlashInferMetadataBuilder(MetadataBuilder):
    """Plans the wrappers that the coming step runs.

    A replay reads whatever plan is in the buffers, so each has to be planned for: the runner builds exactly once for
    what it runs next, capture and verification included, and refuses to replay what nothing was built for.
    """

    def __init__(self, library: Library, spec: AttentionSpec, device: torch.device, limits: BatchLimits) -> None:
        capability, num_sms = _NO_GPU
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        routine = prefill_routine(spec, capability)
        self._spec = spec
        self._sizes = Sizes(spec=spec, limits=limits, routine=routine, num_sms=num_sms)
        self._planner = Planner(library, spec, limits, device, self._sizes)
        self._host_plans = HostPlans(limits.max_num_seqs, device)

    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> FlashInferMetadata:
        num_rows = common.slot_mapping.shape[0]
        return FlashInferMetadata(
            seq_lens=common.seq_lens,
            block_table=common.block_table,
            slot_mapping=common.slot_mapping,
            indices=self._planner.indices,
            parts=self._parts(common, key, num_rows),
            num_rows=num_rows,
        )

    def _parts(self, common: CommonMetadata, key: GraphKey | None, num_rows: int) -> tuple[Part, ...]:
        host = self._host_plans.take()
        causal = common.causal or self._spec.windows[0][1] == 0
        size = self._spec.block_size
        planner, longest = self._planner, common.max_query_len
        if key is None or key.graphs is GraphSet.PIECEWISE:
            host.fill(common, common.num_reqs, num_decodes=common.num_decodes, num_rows=num_rows, page_size=size)
            return planner.eager(
                host,
                num_seqs=common.num_reqs,
                num_decodes=common.num_decodes,
                rows=num_rows,
                max_query_len=longest,
                causal=causal,
            )
        slots = len(common.seq_lens_cpu)
        # With speculation a query of one token in a decode graph is one like the others.
        num_decodes = common.num_decodes if key.query_len <= 1 else 0
        host.fill(common, slots, num_decodes=num_decodes, num_rows=num_rows, page_size=size)
        if key.query_len == 1:
            return (planner.decode(host, slots),)
        if key.graphs is GraphSet.DECODE:
            return (planner.prefill(host, slots, num_rows, max_query_len=longest, causal=causal),)
        assert self._sizes.routine == "fa3", "FA2 merges partial results from row 0 on, where the decodes are"
        # Decodes get rows 0 to `num_decodes`, and zeros the rows behind, which prefills then fill. Slots beyond the
        # tokens are empty.
        decodes = planner.decode(host, min(slots, num_rows))
        return decodes, planner.prefill(host, slots, num_rows, max_query_len=longest, causal=causal)


class FlashInferBackend(AttentionBackend):
    """Raises BackendError at the first run of a layer whose scales differ from head to head."""

    capabilities = FlashInferCapabilities()

    def __init__(self, spec: AttentionSpec, device: torch.device, limits: BatchLimits) -> None:
        super().__init__(spec, device, limits)
        self._library = load_library()
        self._scales: dict[tuple[int, str], tuple[torch.Tensor, float]] = {}

    def make_builder(self) -> FlashInferMetadataBuilder:
        return FlashInferMetadataBuilder(self._library, self.spec, self.device, self.limits)

    def schedule(self, metadata: AttentionMetadata) -> None:
        assert isinstance(metadata, FlashInferMetadata)
        page_indices(metadata.block_table, metadata.seq_lens, metadata.indices, page_size=self.spec.block_size)

    def write_kv(
        self,
        layer: AttentionLayer,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        assert isinstance(metadata, FlashInferMetadata)
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
        assert isinstance(metadata, FlashInferMetadata)
        assert metadata.num_rows == query_THD.shape[0], "the metadata is of another batch"
        keys, values = kv_cache.unbind(0)
        if self.spec.layout is KVLayout.HND:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        k_scale = self._scale(layer, "k_scale", layer.k_scale)
        v_scale = self._scale(layer, "v_scale", layer.v_scale)
        lse_TH = None if lse_HT is None else lse_HT.new_empty(lse_HT.shape[::-1])
        for part in metadata.parts:
            rows = slice(part.first, part.end)
            part.wrapper.run(
                query_THD[rows],
                (keys, values),
                q_scale=layer.scale,
                k_scale=k_scale,
                out=out_THD[rows],
                lse=None if lse_TH is None else lse_TH[rows],
                return_lse=lse_TH is not None,
                # Some of its blocks end without waiting for the kernel before, on which ours after it would rely.
                enable_pdl=False,
            )
        if v_scale is not None:
            # Not by the wrappers: each would multiply all of its rows, and parts overlap.
            out_THD.mul_(v_scale)
        if lse_HT is not None and lse_TH is not None:
            lse_HT.copy_(lse_TH.t().mul(math.log(2)).masked_fill(lse_TH.t() < _LEAST_LSE, -math.inf))

    def _scale(self, layer: AttentionLayer, name: str, scale_K: torch.Tensor | None) -> float | None:
        """The one scale of all heads, read from the device once for each layer."""
        if scale_K is None:
            return None
        known = self._scales.get((layer.index, name))
        if known is None or known[0] is not scale_K:
            heads: list[float] = scale_K.tolist()
            if len(set(heads)) > 1:
                raise BackendError(
                    f"attention backend flashinfer: {name} of layer {layer.index} differs from head to head "
                    f"({min(heads):.3g} to {max(heads):.3g}); its wrappers take one for a layer, triton takes both"
                )
            known = self._scales[layer.index, name] = scale_K, heads[0]
        return known[1]
