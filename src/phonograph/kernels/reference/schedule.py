"""What all layers of a step share, made once at its head from the contents of the batch's tensors.

On a device this would be a work list in memory that the attention kernels read. Here it is a Python object, which a
one-element tensor, the handle, stands for: graphs record the handle's address, as they would that of the list.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Decodes of like lengths served together; L is the longest of their numbers of visible keys.

    size:     how many; rows: which, None for all of the batch
    columns [size * H * L], row_starts [size * H]: the sparse matrix of queries by cache rows, int32
    pattern:  the same as a tensor, whose values are scratch; scores [size, H, L] views them
    weights [size, H, L], and the same flat: scratch
    num_rows: cache rows that the columns may point at
    hidden [size, 1, L], distance [size, 1, L]: padding, if any; key position - query position
    blocks:   what to gather first, where the cache cannot be read in place
    """

    size: int
    rows: torch.Tensor | None
    columns: torch.Tensor
    row_starts: torch.Tensor
    pattern: torch.Tensor
    scores: torch.Tensor
    weights: torch.Tensor
    flat_weights: torch.Tensor
    num_rows: int
    hidden: torch.Tensor | None
    distance: torch.Tensor
    blocks: torch.Tensor | None


@dataclass(slots=True, kw_only=True)
class Schedule:
    """The leading sequences of one query and at least one key are decodes; whichever comes later is no less right as a
    prefill.

    decode_lens [num_decodes], decode_blocks [num_decodes, blocks]: their seq_lens and block tables, int32
    slots, written: where tokens' keys and values go, and which tokens have a slot (None for all in the mapping)
    sequences: (slot, first token, end of tokens, seq_len) of the others that have queries
    buckets:   of the decodes, by the left window of the layers that asked for them
    """

    num_tokens: int
    num_decodes: int
    decode_lens: np.ndarray
    decode_blocks: np.ndarray
    slots: torch.Tensor
    written: torch.Tensor | None
    sequences: list[tuple[int, int, int, int]]
    buckets: dict[int, list[Bucket]] = field(default_factory=dict[int, list[Bucket]])


@dataclass(slots=True)
class _Held:
    """What a handle stands for, and views of each layer's cache by its address, which stay as they are."""

    schedule: Schedule | None = None
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict[int, tuple[torch.Tensor, torch.Tensor]]
    )


_held: dict[int, _Held] = {}


def new_handle(owner: object, device: torch.device) -> torch.Tensor:
    """A handle whose schedule is kept for as long as `owner` lives."""
    handle = torch.zeros(1, dtype=torch.int64, device=device)
    _held[handle.data_ptr()] = _Held()
    weakref.finalize(owner, _held.pop, handle.data_ptr())
    return handle


def find_schedule(handle: torch.Tensor) -> Schedule:
    """What the handle stands for: the schedule made last."""
    schedule = _held[handle.data_ptr()].schedule
    assert schedule is not None, "attention ran before the step's schedule was made"
    return schedule


def cache_rows(handle: torch.Tensor, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a contiguous cache as [blocks * block size, K, D]; the views are made once a layer."""
    rows = _held[handle.data_ptr()].rows
    found = rows.get(kv_cache.data_ptr())
    if found is None:
        keys, values = kv_cache.view(2, -1, *kv_cache.shape[3:])
        found = rows[kv_cache.data_ptr()] = keys, values
    return found


def make_schedule(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    handle: torch.Tensor,
    block_size: int,
) -> None:
    """Reads the batch and replaces what the handle stands for."""
    starts: list[int] = query_start_loc.tolist()
    lens: list[int] = seq_lens.tolist()
    num_decodes = 0
    # The way of many single queries is made for the CPU; elsewhere they go one by one.
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
    slots = slot_mapping.cpu().numpy()
    written = np.flatnonzero(slots >= 0)
    _held[handle.data_ptr()].schedule = Schedule(
        num_tokens=starts[-1],
        num_decodes=num_decodes,
        decode_lens=np.array(lens[:num_decodes], np.int32),
        decode_blocks=block_table[:num_decodes, :num_blocks].cpu().numpy().copy(),
        slots=torch.from_numpy(slots[written]).to(handle.device),
        written=None if len(written) == len(slots) else torch.from_numpy(written).to(handle.device),
        sequences=sequences,
    )
