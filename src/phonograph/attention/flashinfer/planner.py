"""FlashInfer's wrappers, one for each shape of graph and two for eager steps, and their plans.

In the library's graph mode the launches of a wrapper's `run` have grids and addresses that depend on slots and tokens
alone. They read everything else from the wrapper's integer workspace and from the index buffers. `plan` rewrites these
on the stream, behind the previous step and before the replay. Three rules keep that right:

- *Kernels are compiled at the first plan of a kind* (by nvcc and ninja, cached on disk), so in `build`, outside any
  capture. The runner also runs each kind of graph eagerly first, which loads them.
- *A wrapper's pinned copy of its plan* is overwritten by its next plan, perhaps before the device has read it. So a
  fence is recorded behind each plan and waited for before the next.
- *Padding rows* are, in a graph, the queries of a slot without keys, for which the kernels write zeros. So the last
  query offset is always the number of rows. `run` checks that, and it fixes the sizes at the first plan.

Memory: `Sizes.floats` once, `Sizes.*_integers` on the device and pinned for each wrapper of a graph, 16 MiB of each for
the two eager ones, and int32 page numbers of max_num_seqs sequences of max_model_len tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.flashinfer.host_plans import Fence, HostPlan
from phonograph.attention.flashinfer.library import PACKAGE, FlashInferLibrary, Wrapper
from phonograph.attention.flashinfer.workspace_sizes import Sizes
from phonograph.core.limits import Limits
from phonograph.errors import BackendError


@dataclass(frozen=True, slots=True)
class Part:
    """Planned wrapper, and the rows of the batch that it reads and may write."""

    wrapper: Wrapper
    first: int
    end: int


class Planner:
    """Owner of the wrappers and of their buffers. They share buffers, as one stream runs everything.

    Attributes:
        indices: page numbers of the batch; `page_indices` fills it at the head of each step.
    """

    def __init__(
        self, library: FlashInferLibrary, spec: AttentionSpec, limits: Limits, device: torch.device, sizes: Sizes
    ) -> None:
        self._library, self._spec, self._sizes = library, spec, sizes
        slots = limits.max_num_seqs

        def zeros(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=device)

        # Zeros, so that an entry that was never written is a valid page.
        self.indices = zeros(sizes.pages())
        # Page numbers for the plans of graphs, whose wrappers have the buffer already and would copy it to itself.
        self._in_graph = self.indices[:0]
        # Separate for decodes and prefills, as a mixed graph has both.
        self._decode_pages, self._decode_last_page = zeros(slots + 1), zeros(slots)
        self._queries, self._pages, self._last_page = zeros(slots + 2), zeros(slots + 2), zeros(slots + 1)
        self._floats = torch.zeros(sizes.floats(), dtype=torch.uint8, device=device)
        self._fences: dict[int, Fence] = {}
        self._decode: dict[int, Wrapper] = {}
        self._prefill: dict[tuple[int, int], Wrapper] = {}
        self._eager_decode = self._make_decode()
        self._eager_prefill = self._make_prefill()

    def decode(self, host: HostPlan, slots: int) -> Part:
        """Plan `slots` sequences of one row each, for a graph. Rows of sequences without keys get zeros."""
        if slots not in self._decode:
            self._decode[slots] = self._make_decode(
                self._sizes.decode_integers(slots),
                use_cuda_graph=True,
                paged_kv_indptr_buffer=self._decode_pages[: slots + 1],
                paged_kv_indices_buffer=self.indices,
                paged_kv_last_page_len_buffer=self._decode_last_page[:slots],
            )
        self._plan_decode(self._decode[slots], host, slots, self._in_graph)
        return Part(self._decode[slots], 0, slots)

    def prefill(self, host: HostPlan, slots: int, rows: int, *, max_query_len: int, causal: bool) -> Part:
        """Plan `slots` sequences and the padding behind them, in `rows` rows, for a graph.

        FA3 leaves rows before the first query alone. FA2 merges from row 0 on, so it gets no such rows.
        """
        if (slots, rows) not in self._prefill:
            self._prefill[slots, rows] = self._make_prefill(
                self._sizes.prefill_integers(rows, slots + 1),
                use_cuda_graph=True,
                qo_indptr_buf=self._queries[: slots + 2],
                paged_kv_indptr_buf=self._pages[: slots + 2],
                paged_kv_indices_buf=self.indices,
                paged_kv_last_page_len_buf=self._last_page[: slots + 1],
            )
        wrapper = self._prefill[slots, rows]
        self._plan_prefill(wrapper, host, slice(0, slots + 1), self._in_graph, max_query_len, causal)
        return Part(wrapper, 0, rows)

    def eager(
        self, host: HostPlan, num_seqs: int, *, num_decodes: int, max_query_len: int, causal: bool
    ) -> tuple[Part, ...]:
        """Plan a batch at its actual size: first the sequences of one row, then the rest."""
        parts: list[Part] = []
        if num_decodes:
            self._plan_decode(self._eager_decode, host, num_decodes, self.indices)
            parts.append(Part(self._eager_decode, 0, num_decodes))
        first, end = int(host.queries[num_decodes]), int(host.queries[num_seqs])
        if end > first:
            host.queries[num_decodes : num_seqs + 1] -= first
            rest = slice(num_decodes, num_seqs)
            self._plan_prefill(self._eager_prefill, host, rest, self.indices, max_query_len, causal)
            parts.append(Part(self._eager_prefill, first, end))
        return tuple(parts)

    def _make_decode(self, integers: int | None = None, **buffers: Any) -> Wrapper:
        # Tensor cores for every group size: plans of the other kernels miscount sequences without keys.
        return self._make(self._library.decode, "fa2", integers, use_tensor_cores=True, **buffers)

    def _make_prefill(self, integers: int | None = None, **buffers: Any) -> Wrapper:
        return self._make(self._library.prefill, self._sizes.routine, integers, **buffers)

    def _make(self, make: Callable[..., Wrapper], routine: str, integers: int | None, **others: Any) -> Wrapper:
        wrapper = make(self._floats, self._spec.layout.value, backend=routine, **others)
        if integers is not None:
            workspace = torch.zeros(integers, dtype=torch.uint8, device=self._floats.device)
            wrapper.reset_workspace_buffer(self._floats, workspace)
        return wrapper

    def _plan_decode(self, wrapper: Wrapper, host: HostPlan, slots: int, indices: torch.Tensor) -> None:
        lens = host.lens[:slots]
        self._plan(wrapper, host, host.pages[: slots + 1], indices, host.last_page[:slots], seq_lens=lens)

    def _plan_prefill(
        self, wrapper: Wrapper, host: HostPlan, slots: slice, indices: torch.Tensor, max_query_len: int, causal: bool
    ) -> None:
        ends = slice(slots.start, slots.stop + 1)
        self._plan(
            wrapper,
            host,
            host.queries[ends],
            host.pages[ends],
            indices,
            host.last_page[slots],
            seq_lens=host.lens[slots],
            causal=causal,
            max_token_per_sequence=max_query_len,
        )

    def _plan(self, wrapper: Wrapper, host: HostPlan, *lengths: torch.Tensor, **others: Any) -> None:
        spec = self._spec
        fence = self._fences.get(id(wrapper))
        if fence is not None:
            fence.wait()
        try:
            wrapper.plan(
                *lengths,
                spec.num_query_heads,
                spec.num_kv_heads,
                spec.head_size,
                spec.block_size,
                # Each layer passes its scale to `run`, which multiplies the two.
                sm_scale=1.0,
                window_left=spec.windows[0][0],
                logits_soft_cap=spec.softcap,
                q_data_type=getattr(torch, spec.dtype),
                kv_data_type=getattr(torch, spec.kv_cache_dtype),
                **others,
            )
        except Exception as error:
            if fence is not None:
                raise
            raise BackendError(
                f"{PACKAGE} {self._library.version} cannot plan (its first plan of a kind makes kernels, with nvcc and "
                f"ninja): {error}"
            ) from error
        if fence is None:
            fence = self._fences[id(wrapper)] = Fence(self._floats.device)
        fence.record()
        host.fence.record()
