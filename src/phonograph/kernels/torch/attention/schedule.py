"""Schedule of a step's attention, shared by all layers and made at its head from the batch's tensors.

On a device it would be a work list in memory that attention kernels read. Here it is a Python object. A tensor of one
element, the handle, represents it: graphs record the handle's address, as they would record the list's.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Decodes of similar lengths served together; L is the largest number of visible keys.

    rows:     indices in the batch, None for all of it
    spacing:  rows of memory from one sequence's queries to the next; H if nothing is between them
    columns [size * H * L], row_starts [size * H]: sparse matrix of queries by cache rows, int32
    pattern:  the same as a tensor, with empty rows for the memory between the queries; its values are scratch
    scores [size, H, L]: views of these values; weights [size, H, L], and the same flat: more scratch
    hidden [size, 1, L]: padding, if any; visible [size]: keys that each query sees
    blocks:   blocks to gather first, if the cache cannot be read in place
    """

    rows: torch.Tensor | None
    spacing: int
    columns: torch.Tensor
    row_starts: torch.Tensor
    pattern: torch.Tensor
    scores: torch.Tensor
    weights: torch.Tensor
    flat_weights: torch.Tensor
    hidden: torch.Tensor | None
    visible: torch.Tensor
    blocks: torch.Tensor | None


@dataclass(slots=True, kw_only=True)
class Schedule:
    """Schedule of a step. The leading sequences of one query and at least one key are decodes, all others prefills.

    decode_lens [num_decodes], decode_blocks [num_decodes, blocks]: seq_lens and block tables of the decodes, int32
    slots, written: slots for keys and values, and the tokens that have one (None for all in the mapping)
    sequences: (slot, first token, end of tokens, seq_len) of the prefills that have queries
    buckets:   of the decodes, by left window and spacing of queries, made at a layer's first use
    """

    num_tokens: int
    num_decodes: int
    decode_lens: np.ndarray
    decode_blocks: np.ndarray
    slots: torch.Tensor
    written: torch.Tensor | None
    sequences: list[tuple[int, int, int, int]]
    buckets: dict[tuple[int, int], list[Bucket]] = field(default_factory=dict[tuple[int, int], list[Bucket]])


@dataclass(frozen=True, slots=True)
class CacheViews:
    """Views of one layer's cache as rows.

    keys_DN, values_ND: every head of every token, in any layout; None if heads are not rows of memory
    key_tokens, value_tokens [B * S, K, D]: None unless the cache is contiguous
    """

    keys_DN: torch.Tensor | None
    values_ND: torch.Tensor | None
    key_tokens: torch.Tensor | None
    value_tokens: torch.Tensor | None


@dataclass(slots=True)
class HandleState:
    """State of one handle: the latest schedule, and the views of each layer's cache by its address.

    It holds the handle, so that no other tensor gets its address.
    """

    handle: torch.Tensor
    schedule: Schedule
    views: dict[int, CacheViews] = field(default_factory=dict[int, CacheViews])

    def cache_views(self, kv_cache: torch.Tensor) -> CacheViews:
        """Return the views of a layer's cache, made once."""
        found = self.views.get(kv_cache.data_ptr())
        if found is None:
            found = self.views[kv_cache.data_ptr()] = view_cache(kv_cache)
        return found


states: dict[int, HandleState] = {}
"""By the address of the handle."""


def new_handle(owner: object, device: torch.device) -> torch.Tensor:
    """Return a handle with an empty schedule, which lives as long as `owner`."""
    handle = torch.zeros(1, dtype=torch.int64, device=device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    empty = np.empty(0, np.int32)
    states[handle.data_ptr()] = HandleState(
        handle,
        Schedule(
            num_tokens=0,
            num_decodes=0,
            decode_lens=empty,
            decode_blocks=empty.reshape(0, 0),
            slots=nothing,
            written=None,
            sequences=[],
        ),
    )
    weakref.finalize(owner, states.pop, handle.data_ptr())
    return handle


def view_cache(kv_cache: torch.Tensor) -> CacheViews:
    """Return the views of a cache [2, B, S, K, D]."""
    head_size, strides, offset = kv_cache.shape[4], kv_cache.stride(), kv_cache.storage_offset()
    keys_DN = values_ND = key_tokens = value_tokens = None
    if strides[4] == 1 and strides[1] % head_size == strides[2] % head_size == strides[3] % head_size == 0:
        # Up to the last element of the keys, and of the values.
        num_rows = 1 + sum((kv_cache.shape[i] - 1) * strides[i] for i in (1, 2, 3)) // head_size
        keys_DN = kv_cache.as_strided((head_size, num_rows), (1, head_size), offset)
        values_ND = kv_cache.as_strided((num_rows, head_size), (head_size, 1), offset + strides[0])
    if kv_cache.is_contiguous():
        key_tokens, value_tokens = kv_cache.view(2, -1, *kv_cache.shape[3:])
    return CacheViews(keys_DN, values_ND, key_tokens, value_tokens)


def make_schedule(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    handle: torch.Tensor,
    block_size: int,
) -> None:
    """Replace the schedule of a handle by that of the batch."""
    starts: list[int] = query_start_loc.tolist()
    lens: list[int] = seq_lens.tolist()
    num_decodes = 0
    # The kernel of many single queries is for the CPU; elsewhere they go one by one.
    if query_start_loc.device.type == "cpu":
        while num_decodes < len(lens) and starts[num_decodes + 1] == num_decodes + 1 and lens[num_decodes] > 0:
            num_decodes += 1
    num_blocks = -(-max(lens[:num_decodes], default=0) // block_size)
    sequences: list[tuple[int, int, int, int]] = []
    if starts[-1] > num_decodes:
        spans = zip(starts, starts[1:], lens, strict=False)
        sequences = [
            (index, start, stop, seq_len)
            for index, (start, stop, seq_len) in enumerate(spans)
            if index >= num_decodes and start < stop
        ]
    slots, written = slot_mapping, None
    if min(slot_mapping.tolist(), default=0) < 0:
        written = (slot_mapping >= 0).nonzero().squeeze(1)
        slots = slot_mapping.index_select(0, written)
    states[handle.data_ptr()].schedule = Schedule(
        num_tokens=starts[-1],
        num_decodes=num_decodes,
        decode_lens=np.array(lens[:num_decodes], np.int32),
        decode_blocks=block_table[:num_decodes, :num_blocks].cpu().numpy(),
        slots=slots,
        written=written,
        sequences=sequences,
    )
