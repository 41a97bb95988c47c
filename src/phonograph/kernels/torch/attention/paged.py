"""Reference attention in torch: every feature, float32 inside, the oracle of all other backends.

Attention, its schedule and the KV write are each one opaque operator. A graph records an operator as a single call
with frozen Python arguments, and runs it again on the same tensors with other contents, as it would a device kernel. So
the operators take only tensors of the batch, and read their contents when they run.

They are defined through torch.library.Library because torch.library.custom_op costs several times more per call, in
every layer of every step.
"""

from __future__ import annotations

import torch

from phonograph.kernels.torch.attention.decode import decode
from phonograph.kernels.torch.attention.prefill import prefill
from phonograph.kernels.torch.attention.schedule import make_schedule, states
from phonograph.kernels.torch.attention.scoring import Scoring

_library = torch.library.Library("phonograph", "FRAGMENT")
_library.define(
    "reference_schedule(Tensor query_start_loc, Tensor seq_lens, Tensor block_table, Tensor slot_mapping, "
    "Tensor(a!) handle, int block_size) -> ()"
)
_library.define(
    "reference_attention(Tensor query, Tensor kv_cache, Tensor block_table, Tensor handle, "
    "Tensor(a!) out, Tensor(b!)? lse, Tensor? alibi_slopes, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, "
    "float scale, int window_left, int window_right, float softcap, bool causal) -> ()"
)
_library.define(
    "reference_kv_write(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor handle, "
    "Tensor? k_scale, Tensor? v_scale) -> ()"
)


def _attention(
    query_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    handle: torch.Tensor,
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
    state = states[handle.data_ptr()]
    batch = state.schedule
    if batch.num_tokens < query_THD.shape[0]:
        out_THD[batch.num_tokens :] = 0
        if lse_HT is not None:
            lse_HT[:, batch.num_tokens :] = -torch.inf
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
    if batch.num_decodes:
        decode(query_THD, kv_cache, state, scoring, out_THD, lse_HT)
    for index, start, stop, seq_len in batch.sequences:
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
    handle: torch.Tensor,
    k_scale_K: torch.Tensor | None,
    v_scale_K: torch.Tensor | None,
) -> None:
    state = states[handle.data_ptr()]
    slots, written = state.schedule.slots, state.schedule.written
    if written is not None:
        key_TKD, value_TKD = key_TKD.index_select(0, written), value_TKD.index_select(0, written)
    elif len(slots) < len(key_TKD):
        key_TKD, value_TKD = key_TKD[: len(slots)], value_TKD[: len(slots)]
    if kv_cache.dtype is key_TKD.dtype and k_scale_K is None and v_scale_K is None:
        views = state.cache_views(kv_cache)
        if views.key_tokens is not None and views.value_tokens is not None:
            views.key_tokens.index_copy_(0, slots, key_TKD)
            views.value_tokens.index_copy_(0, slots, value_TKD)
            return
    blocks, offsets = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    for plane, rows, scale_K in ((kv_cache[0], key_TKD, k_scale_K), (kv_cache[1], value_TKD, v_scale_K)):
        scaled = rows if scale_K is None else rows.float() / scale_K.unsqueeze(1)
        if plane.dtype.itemsize == 1:
            # Conversion to FP8 does not saturate by itself.
            largest = torch.finfo(plane.dtype).max
            stored = scaled.float().clamp(-largest, largest).to(plane.dtype).view(torch.uint8)
            plane.view(torch.uint8).index_put_((blocks, offsets), stored)
        else:
            plane.index_put_((blocks, offsets), scaled.to(plane.dtype))


for _device in ("CPU", "CUDA"):
    _library.impl("reference_schedule", make_schedule, _device)
    _library.impl("reference_attention", _attention, _device)
    _library.impl("reference_kv_write", _kv_write, _device)

schedule = torch.ops.phonograph.reference_schedule.default
attention = torch.ops.phonograph.reference_attention.default
kv_write = torch.ops.phonograph.reference_kv_write.default
# The tape's replay, which is on a CPU, calls the functions without torch's dispatch.
attention.python_function, kv_write.python_function = _attention, _kv_write  # pyright: ignore[reportAttributeAccessIssue]
