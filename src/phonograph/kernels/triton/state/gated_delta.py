"""Gated delta net of a step on a GPU: the twin of `kernels/torch/state/gated_delta.py`, in five launches.

1. Convolution of all tokens, and 2. the last inputs of each sequence (`causal_conv.py`).
3. Sequences of up to 16 tokens in the step, token by token (`delta_step.py`).
4. Longer ones, by chunks (`delta_chunk.py`); left out where no sequence can be longer.
5. Norm and gates of the outputs, in place (`delta_norm.py`).

All read lengths, slots and checkpoints on the device, so that a captured graph serves any batch.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton

from phonograph.kernels.torch.state.gated_delta import NORM_EPS, DeltaSizes
from phonograph.kernels.triton.state.causal_conv import causal_conv
from phonograph.kernels.triton.state.delta_chunk import delta_chunk_kernel
from phonograph.kernels.triton.state.delta_norm import delta_norm_kernel
from phonograph.kernels.triton.state.delta_rows import places_size
from phonograph.kernels.triton.state.delta_step import delta_step_kernel

_CHUNK = 64
_MOST_STEPS = 16
_STEP_BLOCK = 4096
"""Most numbers of the state in an item of few tokens."""
_STEP_PROGRAMS = 1056
"""Most programs: 8 for each SM of an H200."""
_NORM_BLOCK = 1024
"""Most numbers of the outputs in a program of the last launch."""


def gated_delta(
    projected_TF: torch.Tensor,
    gates_TB: torch.Tensor,
    taps_CW: torch.Tensor,
    decay_H: torch.Tensor,
    time_bias_H: torch.Tensor,
    norm_V: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    slots_R: torch.Tensor,
    checkpoints_3R: torch.Tensor,
    history_SPC: torch.Tensor,
    state_SHKV: torch.Tensor,
    out_TX: torch.Tensor,
    net: DeltaSizes,
    eps: float,
    conv_TC: torch.Tensor,
) -> None:
    """Mix the tokens of each sequence with its state, and write the new states; see the torch twin.

    Args:
        projected_TF: rows may be apart from one another, as those of `gates_TB` and `checkpoints_3R`.
        gates_TB: as in the twin; all others too, and contiguous.
        taps_CW: see there.
        decay_H: see there.
        time_bias_H: see there.
        norm_V: see there.
        query_start_loc: see there.
        seq_lens_R: see there.
        slots_R: see there.
        checkpoints_3R: see there.
        history_SPC: see there.
        state_SHKV: see there.
        out_TX: contiguous; receives zeros for padding.
        net: sizes.
        eps: epsilon of the norm of the output.
        conv_TC: scratch, contiguous.
    """
    num_tokens, num_reqs = len(projected_TF), len(slots_R)
    rows = query_start_loc, seq_lens_R, slots_R, checkpoints_3R
    causal_conv(projected_TF, taps_CW, *rows, history_SPC, conv_TC, net)
    strides = gates_TB.stride(0), checkpoints_3R.stride(0)
    args = conv_TC, gates_TB, decay_H, time_bias_H, *rows, state_SHKV, out_TX, num_reqs, *strides
    sizes = {"G": net.key_heads, "H": net.value_heads, "K": net.key_size, "V": net.value_size, "BY_HEAD": net.by_head}
    keys, values = (max(16, triton.next_power_of_2(size)) for size in (net.key_size, net.value_size))
    settings = {"KEYS": keys, "MOST": _MOST_STEPS, "NORM_EPS": NORM_EPS, "ROWS": places_size(num_reqs)}
    settings |= {**sizes, "TILED": net.tiled}
    block = min(values, max(16, _STEP_BLOCK // keys))
    items = num_reqs * net.value_heads * triton.cdiv(net.value_size, block)
    delta_step_kernel[(min(items, _STEP_PROGRAMS),)](*args, **settings, VALUES=block, num_warps=4)
    if most_long := min(num_reqs, num_tokens // (_MOST_STEPS + 1)):
        precision = "ieee" if projected_TF.dtype is torch.float32 else "tf32"
        delta_chunk_kernel[(most_long, net.value_heads)](
            *args, **settings, C=net.channels, VALUES=values, CHUNK=_CHUNK, PRECISION=precision, num_warps=8
        )
    heads = min(triton.next_power_of_2(net.value_heads), max(1, _NORM_BLOCK // values))
    delta_norm_kernel[(num_tokens, triton.cdiv(net.value_heads, heads))](
        projected_TF, norm_V, query_start_loc, out_TX, num_reqs, eps, projected_TF.stride(0), **sizes, HEADS=heads,
        VALUES=values, num_warps=4,
    )  # fmt: skip
