"""FlashInfer as a backend: decodes and prefills through wrappers, planned in `build` from lengths on the host.

While `build` runs, the device's tensors still hold the previous step. So lengths come from their host copies. The host
has no page numbers; a kernel writes them at the head of the step (`schedule`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from phonograph.attention.attention_spec import AttentionSpec, KVLayout
from phonograph.attention.backend import AttentionCall, AttentionLayer
from phonograph.attention.composite.capabilities import decode_part
from phonograph.attention.flashinfer.capabilities import FlashInferCapabilities, prefill_routine
from phonograph.attention.flashinfer.host_plans import HostPlan, HostPlans
from phonograph.attention.flashinfer.library import FlashInferLibrary, load_library
from phonograph.attention.flashinfer.planner import Part, Planner
from phonograph.attention.flashinfer.workspace_sizes import Sizes, splits_mixed
from phonograph.attention.kv_write import GpuBackend
from phonograph.attention.metadata import (
    AttentionMetadata,
    CommonMetadata,
    MetadataBuilder,
    cut_on_host,
    leading_decodes,
)
from phonograph.core.limits import Limits
from phonograph.errors import BackendError
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.kernels.triton.attention.page_indices import page_indices

_NO_GPU = (9, 0), 2
"""Capability and multiprocessors that tests without a GPU assume."""
_LEAST_LSE = -4.9e4
"""Bound below which an LSE in base 2 means minus infinity, for which its kernels write -5e4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferMetadata(AttentionMetadata):
    """Batch with the planned wrappers.

    Attributes:
        indices: buffer of the page numbers.
        parts: what runs, in order.
        end: rows from here on are padding, and no part runs on them.
    """

    indices: torch.Tensor
    parts: tuple[Part, ...]
    end: int


class FlashInferMetadataBuilder(MetadataBuilder[FlashInferMetadata]):
    """Builder that plans the wrappers of the next step.

    A replay reads the plan that is in the buffers, so every replay needs a build. The runner builds exactly once for
    each step, capture and verification included, and refuses a replay without a build.

    Args:
        splits: True if decodes of a mixed graph have their own launch.
    """

    def __init__(
        self, library: FlashInferLibrary, spec: AttentionSpec, device: torch.device, limits: Limits, *, splits: bool
    ) -> None:
        capability, num_sms = _NO_GPU
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        routine = prefill_routine(spec, capability)
        self._spec = spec
        self._splits = splits and splits_mixed(spec)
        self._sizes = Sizes(spec=spec, limits=limits, routine=routine, num_sms=num_sms)
        self._planner = Planner(library, spec, limits, device, self._sizes)
        self._host_plans = HostPlans(limits.max_num_seqs, device)

    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> FlashInferMetadata:
        if key is None or key.graphs is GraphSet.PIECEWISE:
            parts, end = self._eager(common), common.num_tokens
        else:
            # The decode part of a split batch may have rows of other parts too.
            end = min(key.num_tokens, common.slot_mapping.shape[0])
            parts = self._in_graph(common, key, end)
        return FlashInferMetadata(common=common, indices=self._planner.indices, parts=parts, end=end)

    def _eager(self, common: CommonMetadata) -> tuple[Part, ...]:
        num_seqs = common.num_reqs
        starts = common.query_start_loc_cpu[: num_seqs + 1]
        return self._planner.eager(
            self._host_plan(starts, common.seq_lens_cpu[:num_seqs], common.num_tokens),
            num_seqs,
            num_decodes=leading_decodes(starts, 1),
            max_query_len=common.max_query_len,
            causal=self._causal(common),
        )

    def _in_graph(self, common: CommonMetadata, key: GraphKey, num_rows: int) -> tuple[Part, ...]:
        starts, lens = common.query_start_loc_cpu, common.seq_lens_cpu
        if key.query_len == 1:
            return (self._planner.decode(self._host_plan(starts, lens, num_rows), len(lens)),)
        assert self._sizes.routine == "fa3" or key.graphs is GraphSet.DECODE, "FA2 is not declared for mixed graphs"
        decodes: tuple[Part, ...] = ()
        first_page, max_query_len = 0, common.max_query_len
        if self._splits and key.graphs is GraphSet.MIXED:
            cut, slots = cut_on_host(starts, lens, 1), decode_part(num_rows, len(lens), 1).num_reqs
            # The decode wrapper writes a row for each slot. Rows of slots without a decode are padding, or belong to
            # prefills, whose launch comes later.
            host = self._host_plan(cut.decode_starts[: slots + 1], cut.decode_lens[:slots], slots)
            decodes = (self._planner.decode(host, slots),)
            first_page = int((-(-cut.decode_lens // self._spec.block_size)).sum())
            starts, lens, max_query_len = cut.prefill_starts, cut.prefill_lens, cut.max_prefill_query_len
        host = self._host_plan(starts, lens, num_rows, first_page)
        causal = self._causal(common)
        prefills = self._planner.prefill(host, len(lens), num_rows, max_query_len=max_query_len, causal=causal)
        return (*decodes, prefills)

    def _host_plan(self, starts: np.ndarray, lens: np.ndarray, num_rows: int, first_page: int = 0) -> HostPlan:
        host = self._host_plans.take()
        host.fill(starts, lens, num_rows=num_rows, page_size=self._spec.block_size, first_page=first_page)
        return host

    def _causal(self, common: CommonMetadata) -> bool:
        return common.causal or self._spec.windows[0][1] == 0


class FlashInferBackend(GpuBackend[FlashInferMetadata]):
    """FlashInfer's wrappers. The first run of a layer whose scales differ by head raises BackendError.

    FA3 would split no sequence and take a tile for each query head of a decode, so decodes of a mixed graph use the
    decode wrapper.

    Args:
        splits_mixed: True if they do. A part of a split batch has only one kind of sequence.
    """

    capabilities = FlashInferCapabilities()
    clears_padding = False

    def __init__(self, spec: AttentionSpec, device: torch.device, limits: Limits, *, splits_mixed: bool = True) -> None:
        super().__init__(spec, device, limits)
        self._splits_mixed = splits_mixed
        self._library = load_library()
        self._scales: dict[tuple[int, str], tuple[torch.Tensor, float]] = {}

    def make_builder(self) -> FlashInferMetadataBuilder:
        return FlashInferMetadataBuilder(self._library, self.spec, self.device, self.limits, splits=self._splits_mixed)

    def schedule(self, metadata: FlashInferMetadata) -> None:
        common = metadata.common
        page_indices(common.block_table, common.seq_lens, metadata.indices, page_size=self.spec.block_size)

    def forward(
        self,
        query_THD: torch.Tensor,
        call: AttentionCall[FlashInferMetadata],
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None = None,
    ) -> None:
        layer, metadata = call.layer, call.metadata
        keys, values = call.kv_cache.unbind(0)
        if self.spec.layout is KVLayout.HND:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        k_scale = self._scale(layer, "k_scale", layer.k_scale)
        v_scale = self._scale(layer, "v_scale", layer.v_scale)
        lse_TH = None if lse_HT is None else self._base_2(lse_HT, metadata.end)
        for part in metadata.parts:
            rows = slice(part.first, part.end)
            part.wrapper.run(
                query_THD[rows],
                (keys, values),
                q_scale=layer.scale,
                k_scale=k_scale,
                v_scale=v_scale,
                out=out_THD[rows],
                lse=None if lse_TH is None else lse_TH[rows],
                return_lse=lse_TH is not None,
                # Some of its blocks end without waiting for the previous kernel, but our next kernel relies on that.
                enable_pdl=False,
            )
        if lse_HT is not None and lse_TH is not None:
            lse_HT.copy_((lse_TH * math.log(2)).masked_fill_(lse_TH < _LEAST_LSE, -math.inf).t())

    def _base_2(self, lse_HT: torch.Tensor, end: int) -> torch.Tensor:
        """Return an LSE [T, H] in base 2 for the wrappers, which keeps the rows before the first query."""
        lse_TH = torch.empty_like(lse_HT.t(), memory_format=torch.contiguous_format)
        torch.mul(lse_HT.t(), 1 / math.log(2), out=lse_TH)
        lse_TH[end:] = -math.inf
        return lse_TH

    def _scale(self, layer: AttentionLayer, name: str, scale_K: torch.Tensor | None) -> float | None:
        """Return the scale of all heads, read from the device once for each layer."""
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
