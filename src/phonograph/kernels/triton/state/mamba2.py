"""Mamba 2 of a step on a GPU: the twin of `kernels/torch/state/mamba2.py`, in five to seven launches.

1. Convolution of all tokens, and 2. the last inputs of each sequence (`causal_conv.py`); one launch for single tokens.
3. Scan of sequences of up to 16 tokens in the step, token by token (`mamba_step.py`).
4. Scan of longer ones, by chunks (`mamba_chunk.py`); left out where no sequence can be longer. Two launches before it
   have the states between segments of them (`mamba_segments.py`), where one may be longer than a segment.
5. Gates and norm of the outputs, in place: a program has a token and a group of the norm, or all of an output.

All read lengths, slots and checkpoints on the device, so that a captured graph serves any batch.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from phonograph.kernels.torch.state.mamba2 import SEGMENT, MambaSizes
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options
from phonograph.kernels.triton.state.causal_conv import NO_NET, causal_conv
from phonograph.kernels.triton.state.delta_rows import places_size
from phonograph.kernels.triton.state.mamba_chunk import mamba_chunk_kernel
from phonograph.kernels.triton.state.mamba_segments import mamba_pass_kernel, mamba_segment_kernel
from phonograph.kernels.triton.state.mamba_step import mamba_step_kernel

_MOST_STEPS = 16
_STEP_BLOCK = 2048
"""Most numbers of the state in an item of few tokens."""
_CHUNKS, _WIDE_CHUNKS = (8192, 64, 2), (4096, 32, 1)
"""Most numbers of the state in an item of many tokens, tokens of a chunk, and stages of its copies. Those of float32,
whose products take more registers, are smaller."""
_CHUNK_WARPS = 4
_PASS_BLOCK = 2048
"""Numbers of the state in an item of the states between segments."""
_STEP_PROGRAMS, _CHUNK_PROGRAMS = 1056, 264
"""Most programs: 8 and 2 for each SM of an H200. More would end at once where rows are empty or belong to the other."""


def mamba2(
    projected_TF: torch.Tensor,
    taps_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    decay_H: torch.Tensor,
    skip_H: torch.Tensor,
    time_bias_H: torch.Tensor,
    norm_X: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    slots_R: torch.Tensor,
    checkpoints_3R: torch.Tensor,
    history_SPC: torch.Tensor,
    state_SHVK: torch.Tensor,
    out_TX: torch.Tensor,
    net: MambaSizes,
    eps: float,
    scratch_TY: torch.Tensor,
    *,
    single: bool = False,
) -> None:
    """Mix the tokens of each sequence with its state, and write the new states; see the torch twin.

    Args:
        projected_TF: rows may be apart from one another, as those of `checkpoints_3R`.
        taps_CW: as in the twin; all others too, and contiguous.
        bias_C: see there.
        decay_H: see there.
        skip_H: see there.
        time_bias_H: see there.
        norm_X: see there.
        query_start_loc: see there.
        seq_lens_R: see there.
        slots_R: see there.
        checkpoints_3R: see there.
        history_SPC: see there.
        state_SHVK: see there.
        out_TX: contiguous; receives zeros for padding.
        net: sizes.
        eps: epsilon of the norm.
        scratch_TY: contiguous; `net.scratch_widths` numbers of each token.
        single: see `StepStates`.
    """
    num_tokens, num_reqs = len(projected_TF), len(slots_R)
    rows = query_start_loc, seq_lens_R, slots_R, checkpoints_3R
    # States first, where they are aligned whatever the number of tokens is.
    words, conv_TC = scratch_TY.view(-1).split([num_tokens * width for width in net.scratch_widths])
    gates_TX, x_TC, times_TH = projected_TF.split([net.inner, net.channels, net.heads], 1)
    causal_conv(x_TC, taps_CW, *rows, history_SPC, conv_TC, NO_NET, bias_C, single=single)
    weights, strides = (decay_H, skip_H, time_bias_H), (projected_TF.stride(0), checkpoints_3R.stride(0))
    args = conv_TC, times_TH, *weights, *rows, state_SHVK, out_TX
    keys, size = (max(16, triton.next_power_of_2(one)) for one in (net.key_size, net.head_size))
    heads = {"H": net.heads, "V": net.head_size, "K": net.key_size}
    sizes: dict[str, Any] = {**heads, "G": net.groups, "KEYS": keys}
    lengths = {"ROWS": places_size(num_reqs), "MOST": _MOST_STEPS}

    def items(block: int) -> int:
        return net.heads * -(-net.head_size // block)

    def grid(num_rows: int, block: int, programs: int) -> tuple[int]:
        return (min(num_rows * items(block), programs),)

    values = min(size, _STEP_BLOCK // keys)
    mamba_step_kernel[grid(num_reqs, values, _STEP_PROGRAMS)](
        *args, num_reqs, *strides, **sizes, **lengths, VALUES=values, num_warps=4, **pdl_options()
    )
    if most_long := 0 if single else min(num_reqs, num_tokens // (_MOST_STEPS + 1)):
        block, chunk, stages = _WIDE_CHUNKS if projected_TF.dtype is torch.float32 else _CHUNKS
        values, num_segments = min(size, block // keys), num_tokens // SEGMENT
        states = words.view(torch.float32)
        decays = states[num_segments * net.heads * net.head_size * net.key_size :]
        lengths |= {"SEGMENT": SEGMENT, "PROGRAMS": _CHUNK_PROGRAMS}
        sizes |= {"VALUES": values, "CHUNK": chunk, "STAGES": stages}
        if num_segments:
            mamba_segment_kernel[grid(num_segments, values, _CHUNK_PROGRAMS)](
                conv_TC, times_TH, decay_H, time_bias_H, query_start_loc, states, decays, num_reqs, strides[0],
                **sizes, **lengths, num_warps=_CHUNK_WARPS,
            )  # fmt: skip
            parts = max(1, _PASS_BLOCK // net.key_size)
            mamba_pass_kernel[grid(num_segments, parts, _STEP_PROGRAMS)](
                *rows, state_SHVK, states, decays, num_reqs, strides[1], **heads, **lengths,
                ITEMS=items(values), BLOCK=_PASS_BLOCK, num_warps=4,
            )  # fmt: skip
        mamba_chunk_kernel[grid(most_long + num_segments, values, _CHUNK_PROGRAMS)](
            *args, states, num_reqs, *strides, **sizes, **lengths, num_warps=_CHUNK_WARPS
        )
    groups = max(1, net.norm_groups)
    width = net.inner // groups
    _gated_norm_kernel[(num_tokens, groups)](
        out_TX, gates_TX, norm_X, query_start_loc, num_reqs, eps, projected_TF.stride(0), X=net.inner, WIDTH=width,
        GATES_LAST=net.gates_last, BLOCK=triton.next_power_of_2(width), num_warps=8 if width > 2048 else 4,
        **pdl_options(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_reqs"])
def _gated_norm_kernel(
    out_ptr, gates_ptr, norm_ptr, starts_ptr, num_reqs, eps, gates_stride, X: tl.constexpr, WIDTH: tl.constexpr,
    GATES_LAST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = column < WIDTH
    column += tl.program_id(1) * WIDTH
    # Outputs of padding have no contents yet.
    is_token = mask & (token < tl.load(starts_ptr + num_reqs))
    out = out_ptr + token * X + column
    gate = tl.load(gates_ptr + token * gates_stride + column, is_token, other=0.0).to(tl.float32)
    mixed, gate = tl.load(out, is_token, other=0.0).to(tl.float32), gate * tl.sigmoid(gate)
    if not GATES_LAST:
        mixed *= gate
    if norm_ptr is not None:
        mixed *= tl.rsqrt(tl.sum(mixed * mixed) / WIDTH + eps) * tl.load(norm_ptr + column, mask, other=0.0)
    if GATES_LAST:
        mixed *= gate
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask)
