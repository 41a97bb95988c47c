"""Gated delta net of a step on a GPU: the twin of `kernels/torch/state/gated_delta.py`, in four launches.

1. Convolution of all tokens, and 2. the last inputs of each sequence (`causal_conv.py`).
3. Sequences of up to 16 tokens in the step, token by token (`delta_step.py`).
4. Longer ones, by chunks (`delta_chunk.py`); left out where no sequence can be longer.

All read lengths, slots and checkpoints on the device, so that a captured graph serves any batch. Programs of rows that
belong to the other launch end at once.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton

from phonograph.kernels.torch.state.gated_delta import NORM_EPS, DeltaSizes
from phonograph.kernels.triton.state.causal_conv import causal_conv
from phonograph.kernels.triton.state.delta_chunk import delta_chunk_kernel
from phonograph.kernels.triton.state.delta_rows import places_size
from phonograph.kernels.triton.state.delta_step import delta_step_kernel

_CHUNK = 64
_MOST_STEPS = 16


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
    out_TX.zero_()
    strides = projected_TF.stride(0), gates_TB.stride(0), checkpoints_3R.stride(0)
    weights = decay_H, time_bias_H, norm_V
    args = conv_TC, projected_TF, gates_TB, *weights, *rows, state_SHKV, out_TX, eps, *strides
    sizes = {"G": net.key_heads, "H": net.value_heads, "K": net.key_size, "V": net.value_size}
    sizes |= {"BY_HEAD": net.by_head, "TILED": net.tiled}
    settings = {
        **sizes,
        "C": net.channels,
        "KEYS": max(16, triton.next_power_of_2(net.key_size)),
        "VALUES": max(16, triton.next_power_of_2(net.value_size)),
        "MOST": _MOST_STEPS,
        "NORM_EPS": NORM_EPS,
        "num_warps": 8,
    }
    delta_step_kernel[(num_reqs, net.value_heads)](*args, **settings)
    if most_long := min(num_reqs, num_tokens // (_MOST_STEPS + 1)):
        precision = "ieee" if projected_TF.dtype is torch.float32 else "tf32"
        settings |= {"CHUNK": _CHUNK, "PRECISION": precision, "ROWS": places_size(num_reqs)}
        delta_chunk_kernel[(most_long, net.value_heads)](*args, num_reqs, **settings)
