"""The reference attention in torch: every feature, float32 inside, what all other backends are compared with.

Attention and the KV write are each one opaque operator. A graph records such an operator as a single call with its
Python arguments frozen and runs it again on the same tensors with other contents, as a device kernel would run: so the
operators take nothing about the batch but tensors, and read their contents when they run.

They are defined through torch.library.Library because torch.library.custom_op costs several times more per call, and
these calls happen in every layer of every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from phonograph.kernels.reference.decode import decode
from phonograph.kernels.reference.prefill import prefill
from phonograph.kernels.reference.scoring import Scoring

_library = torch.library.Library("phonograph", "FRAGMENT")
_library.define(
    "reference_attention(Tensor query, Tensor kv_cache, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, "
    "Tensor(a!) out, Tensor(b!)? lse, Tensor? alibi_slopes, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, "
    "float scale, int window_left, int window_right, float softcap, bool causal) -> ()"
)
_library.define(
    "reference_kv_write(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping, "
    "Tensor? k_scale, Tensor? v_scale) -> ()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The leading sequences of one query and at least one key are decodes; whichever comes later is no less right as a
    prefill. sequences: (slot, first token, end of tokens, seq_len) of all that have queries."""

    num_tokens: int
    num_decodes: int
    max_decode_len: int
    sequences: list[tuple[int, int, int, int]]


@lru_cache(maxsize=2)
def _read(query_start_loc: bytes, seq_lens: bytes) -> _Batch:
    """What the two tensors say, from their contents; the layers of a step share it."""
    starts, lens = np.frombuffer(query_start_loc, np.int32).tolist(), np.frombuffer(seq_lens, np.int32).tolist()
    num_decodes = 0
    while num_decodes < len(lens) and starts[num_decodes + 1] == num_decodes + 1 and lens[num_decodes] > 0:
        num_decodes += 1
    sequences = [
        (index, start, stop, seq_len)
        for index, (start, stop, seq_len) in enumerate(zip(starts, starts[1:], lens, strict=False))
        if start < stop
    ]
    return _Batch(
        num_tokens=starts[-1],
        num_decodes=num_decodes,
        max_decode_len=max(lens[:num_decodes], default=0),
        sequences=sequences,
    )


def _attention(
    query_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    causal: bool,
) -> None:
    scoring = Scoring(
        scale=scale,
        softcap=softcap,
        left=window_left,
        right=window_right,
        slopes_H=alibi_slopes,
        sinks_H=sinks,
        k_scale_K=k_scale,
        v_scale_K=v_scale,
    )
    lens = seq_lens.cpu().numpy().tobytes()
    batch = _read(query_start_loc.cpu().numpy().tobytes(), lens)
    if batch.num_tokens < query_THD.shape[0]:
        out_THD[batch.num_tokens :] = 0
        if lse_HT is not None:
            lse_HT[:, batch.num_tokens :] = -torch.inf
    # The way of many single queries is made for the CPU; elsewhere they go one by one.
    decodes = batch.num_decodes if query_THD.device.type == "cpu" else 0
    if decodes:
        decode(
            query_THD[:decodes],
            kv_cache,
            block_table[:decodes],
            lens[: 4 * decodes],
            batch.max_decode_len,
            scoring,
            out_THD[:decodes],
            None if lse_HT is None else lse_HT[:, :decodes],
        )
    for index, start, stop, seq_len in batch.sequences[decodes:]:
        prefill(
            query_THD[start:stop],
            kv_cache,
            block_table[index],
            seq_len,
            causal,
            scoring,
            out_THD[start:stop],
            None if lse_HT is None else lse_HT[:, start:stop],
        )


def _kv_write(
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    k_scale_K: torch.Tensor | None,
    v_scale_K: torch.Tensor | None,
) -> None:
    # Padding may sit in either: the mapping can be shorter than the keys, and its padded entries are -1.
    kept = (slot_mapping_T >= 0).nonzero().squeeze(1)
    whole = kept.shape[0] == key_TKD.shape[0]
    slots = slot_mapping_T if whole else slot_mapping_T[kept]
    blocks, offsets = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    for plane, new_TKD, scale_K in ((kv_cache[0], key_TKD, k_scale_K), (kv_cache[1], value_TKD, v_scale_K)):
        rows = new_TKD if whole else new_TKD[kept]
        if scale_K is not None:
            rows = rows.float() / scale_K.unsqueeze(1)
        if plane.dtype.itemsize == 1:
            # Conversion to these types does not saturate by itself.
            largest = torch.finfo(plane.dtype).max
            rows = rows.float().clamp(-largest, largest).to(plane.dtype).view(torch.uint8)
            plane = plane.view(torch.uint8)
        else:
            rows = rows.to(plane.dtype)
        plane.index_put_((blocks, offsets), rows)


for _device in ("CPU", "CUDA"):
    _library.impl("reference_attention", _attention, _device)
    _library.impl("reference_kv_write", _kv_write, _device)

attention = torch.ops.phonograph.reference_attention.default
kv_write = torch.ops.phonograph.reference_kv_write.default
