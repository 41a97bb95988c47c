"""FlashInfer's wrappers without FlashInfer: its signatures (0.6.14), its checks, its arithmetic of sizes, the oracle.

What a graph freezes is frozen here: within `recording`, `run` keeps a launch with the addresses of that time, and
within `replaying` it launches those instead. All else a launch reads where the kernels do: FA2 the index buffers, FA3
the list of work in the integer workspace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from phonograph.attention.backend import AttentionLayer
from phonograph.testing.oracle import dense_attention

NUM_SMS = 2
_INF = 5e4
Launch = tuple[Callable[[], None], torch.Tensor | None]
_recorded: list[Launch] | None = None
_replayed: Iterator[Launch] | None = None
plans: list[object] = []
"""Wrappers in the order in which they were planned."""


def install(monkeypatch) -> ModuleType:
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    plans.clear()
    return module


@contextmanager
def recording() -> Iterator[list[Launch]]:
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


@contextmanager
def replaying(recorded: list[Launch]) -> Iterator[None]:
    global _replayed
    _replayed = iter(recorded)
    try:
        yield
        assert next(_replayed, None) is None
    finally:
        _replayed = None


class _Wrapper:
    def _make(self, floats, kv_layout, use_cuda_graph, backend, queries, pages, indices, last_page):
        assert backend in ("fa2", "fa3")
        assert floats.dtype == torch.uint8
        self.backend, self.layout, self.in_graph, self.floats = backend, kv_layout, use_cuda_graph, floats
        self.queries, self.pages, self.indices, self.last_page = queries, pages, indices, last_page
        self.integers = torch.full((8 << 20,), 255, dtype=torch.uint8, device=floats.device)
        self.max_rows = None
        if use_cuda_graph:
            self.slots = len(last_page)
            assert len(pages) == self.slots + 1

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self.floats, self.integers = float_workspace_buffer, int_workspace_buffer

    def _planned(
        self, queries, pages, indices, last_page, heads, kv_heads, dim, page_size, lens, causal, window, cap, scale
    ):
        plans.append(self)
        slots = len(last_page)
        for tensor in (queries, pages, last_page, lens):
            assert tensor.device.type == "cpu" and tensor.dtype == torch.int32 and len(tensor) >= slots
        assert len(pages) == len(queries) == slots + 1 and len(lens) == slots > 0
        assert (queries.diff() >= 0).all() and (pages.diff() >= 0).all()
        expected = torch.where(lens > 0, (lens - 1) % page_size + 1, 0)
        counted = torch.where(pages.diff() > 0, (pages.diff() - 1) * page_size + last_page, 0)
        assert torch.equal(counted, lens) and torch.equal(last_page[lens > 0], expected[lens > 0])
        rows = int(queries[-1])
        if self.in_graph:
            assert slots == self.slots, "the batch size is fixed in a graph"
            assert len(indices) <= len(self.indices)
            if self.max_rows is None:
                self.max_rows = rows
            assert rows <= self.max_rows, "more rows than at the first plan"
            self.queries.copy_(queries)
            self.pages.copy_(pages)
            self.last_page.copy_(last_page)
            self.indices[: len(indices)].copy_(indices)
        else:
            self.queries, self.pages, self.last_page = queries.clone(), pages.clone(), last_page.clone()
            self.indices = indices
        info = SimpleNamespace(
            heads=heads, kv_heads=kv_heads, page_size=page_size, causal=causal, window=window, cap=cap, scale=scale
        )
        sizes = self._fa2_sizes if self.backend == "fa2" else self._fa3_sizes
        sizes(queries, pages, heads, kv_heads, dim, page_size, window, rows)
        self.rows, self.info = rows, info
        if self.backend == "fa3":
            work = torch.cat([queries, pages, lens])
            self.integers[: work.nbytes].copy_(work.view(torch.uint8))

    def _fa2_sizes(self, queries, pages, heads, kv_heads, dim, page_size, window, rows):
        """PrefillPlan of scheduler.cuh: raises where it would."""
        group, slots = heads // kv_heads, len(queries) - 1
        most = 2 * NUM_SMS // kv_heads
        packed = queries.diff().long() * group
        keys = pages.diff().long()
        if self.in_graph:
            longest = (self.max_rows - slots + 1) % 2**32 * group
            tile = _tile(longest, dim)
            bound = -(-self.max_rows * group // tile) + slots - 1
        else:
            tile = _tile(int(packed.sum()) // slots, dim)
            bound = None
        if window >= 0:
            keys = torch.minimum(keys, torch.tensor(-(-(window + tile) // page_size)))
        low, high = max(128 // page_size, 1), max(1, int(keys.max()))
        longest_keys = high
        tiles = -(-packed // tile)
        while low < high:
            middle = (low + high) // 2
            if int((tiles * -(-keys.clamp(min=1) // middle)).sum()) > most:
                low = middle + 1
            else:
                high = middle
        count = int((tiles * -(-keys.clamp(min=1) // low)).sum())
        padded = count if bound is None else max(most, bound)
        assert count <= padded
        assert int(queries[0]) == 0, "FA2 merges from row 0 on"
        integers = _Allocator(self.integers)
        for words in (padded, padded, padded, slots + 1):
            integers.take(4 * words)
        integers.take(4, 1)
        if self.in_graph:
            integers.take(4)
        if self.in_graph or low < longest_keys:
            floats = _Allocator(self.floats)
            floats.take(heads * padded * tile * dim * 4)
            floats.take(heads * padded * tile * 4)
            integers.take(4 * ((self.max_rows or rows) + 1))
            integers.take(padded)

    def _fa3_sizes(self, queries, pages, heads, kv_heads, dim, page_size, window, rows):
        """PrefillSM90Plan."""
        tile = 192 if dim == 64 else 128
        works = -(-(self.max_rows or rows) // tile) + len(queries) - 2
        if works <= 4096:
            works *= heads
        integers = _Allocator(self.integers)
        for words in (*[works] * 6, NUM_SMS + 1, works):
            integers.take(4 * words)

    def _run(self, q, cache, q_scale, k_scale, out, lse, return_lse, enable_pdl):
        if _replayed is not None:
            launch, frozen_lse = next(_replayed)
            if lse is not None:  # a temporary, which in a graph stays where it is
                frozen_lse.copy_(lse)
            launch()
            if lse is not None:
                lse.copy_(frozen_lse)
            return
        assert enable_pdl is False
        assert (lse is not None) == return_lse
        assert q.shape[0] == self.rows, "q does not match the plan"
        assert out.shape == q.shape and out.is_contiguous() and q.stride()[1:] == (q.shape[2], 1)
        assert lse is None or (lse.shape == q.shape[:2] and lse.is_contiguous() and lse.dtype == torch.float32)
        keys, values = cache
        assert keys.stride() == values.stride()
        info = self.info
        assert keys.dtype == info.kv_dtype and q.dtype == info.q_dtype
        assert keys.shape[1 if self.layout == "NHD" else 2] == info.page_size
        scale = info.scale * q_scale * (1.0 if k_scale is None else k_scale)
        frozen = (self.queries, self.pages, self.indices, self.last_page, self.integers, len(self.last_page), info)

        def launch() -> None:
            self._launch(q, keys, values, out, lse, scale, *frozen)

        if _recorded is not None:
            assert self.in_graph
            _recorded.append((launch, lse))
        launch()

    def _launch(
        self, q, keys, values, out, lse, scale, queries, pages, indices, last_page, integers, slots, info
    ) -> None:
        if self.backend == "fa3":
            work = integers[: 4 * (3 * slots + 2)].view(torch.int32)
            queries, pages, lens = work.split([slots + 1, slots + 1, slots])
        else:
            counts = pages.diff()
            lens = torch.where(counts > 0, (counts - 1) * info.page_size + last_page, 0)
        layer = AttentionLayer(index=0, scale=scale, window=(info.window, -1), softcap=info.cap)
        if self.layout == "HND":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        for slot, length in enumerate(lens.tolist()):
            rows = slice(int(queries[slot]), int(queries[slot + 1]))
            if rows.start == rows.stop:
                continue
            if length == 0:
                out[rows] = 0
                if lse is not None:
                    lse[rows] = -_INF if self.backend == "fa3" else -np.inf
                continue
            own = indices[int(pages[slot]) : int(pages[slot + 1])].long()
            one, two = (plane[own].flatten(0, 1)[:length].double().numpy() for plane in (keys, values))
            got, got_lse = dense_attention(q[rows].double().numpy(), one, two, layer, causal=info.causal)
            out[rows] = torch.from_numpy(got).to(out.dtype)
            if lse is not None:
                lse[rows] = torch.from_numpy(got_lse.T / np.log(2)).float()


class _Allocator:
    def __init__(self, buffer: torch.Tensor) -> None:
        self._left, self._at = buffer.numel(), 0

    def take(self, size: int, alignment: int = 16) -> None:
        self._at = -(-self._at // alignment) * alignment + size
        assert self._at <= self._left, "Buffer overflow. Increase the workspace buffer size."


def _tile(packed: int, dim: int) -> int:
    if packed > 64 and dim < 256:
        return 128
    return 64 if packed > 16 else 16


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        assert use_tensor_cores, "plans of the other kernels lose count of sequences without keys"
        self._make(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            backend,
            None,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        if use_cuda_graph:
            self.queries = torch.arange(self.slots + 1, dtype=torch.int32)

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
    ):
        lens = seq_lens
        self._planned(
            torch.arange(len(last_page_len) + 1, dtype=torch.int32),
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            lens,
            False,
            window_left,
            logits_soft_cap,
            sm_scale,
        )
        self.info.q_dtype, self.info.kv_dtype = q_data_type, kv_data_type

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        assert not args
        self._run(q, paged_kv_cache, q_scale, k_scale, out, lse, return_lse, enable_pdl)
        if v_scale is not None:
            out *= v_scale


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        self._make(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            backend,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        self._planned(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            seq_lens,
            causal,
            window_left,
            logits_soft_cap,
            sm_scale,
        )
        self.info.q_dtype, self.info.kv_dtype = q_data_type, kv_data_type

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
    ):
        assert not args
        self._run(q, paged_kv_cache, q_scale, k_scale, out, lse, return_lse, enable_pdl)
        if v_scale is not None:
            out *= v_scale
