"""Gated delta net of a step on a GPU: the twin of `kernels/torch/state/gated_delta.py`, in six launches.

1. Convolution of all tokens, and 2. the last inputs of each sequence (`causal_conv.py`).
3. Sequences of up to 16 tokens in the step, token by token (`delta_step.py`).
4. Relations between the tokens of each chunk of 64, for longer sequences (`delta_chunk.py`).
5. Their states and outputs, chunk by chunk (`delta_scan.py`).
6. Norm and gates of all outputs, in place (`delta_norm.py`).

Graphs of decodes have two: the third convolves too, and the last one writes the last inputs.

All read lengths, slots and checkpoints on the device, so that a captured graph serves any batch. The fourth and the
fifth are left out where no sequence can be longer, and the second where none has more than one token.

Scratch has two parts beside the outputs of the convolution. Pairs [T, H, 3, 64] have, for a token and each token of its
chunk, the inverse of the system times the rate, as the sum of two numbers, and the score; float32 needs one number, and
leaves a third of the room empty. Factors [T, H, 4] are float32: factors of the products of a token's key and query with
the state before the chunk, a factor of its correction in the state after it, and the decay of the state in it.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import torch
import triton

from phonograph.kernels.torch.state.delta_rule import CHUNK
from phonograph.kernels.torch.state.gated_delta import NORM_EPS, DeltaSizes
from phonograph.kernels.triton.launch.pdl import pdl_options
from phonograph.kernels.triton.state.causal_conv import HISTORY_CHANNELS, causal_conv
from phonograph.kernels.triton.state.delta_chunk import delta_chunk_kernel
from phonograph.kernels.triton.state.delta_norm import delta_norm_kernel
from phonograph.kernels.triton.state.delta_rows import places_size
from phonograph.kernels.triton.state.delta_scan import delta_scan_kernel
from phonograph.kernels.triton.state.delta_step import delta_decode_kernel, delta_step_kernel

_MOST_STEPS = 16
_STEP_BLOCK, _DECODE_BLOCK, _NORM_BLOCK = 4096, 8192, 1024
"""Most numbers of the state in an item of few tokens and in one of a decode, and of the outputs in a program of the
last launch."""
_SCAN_VALUES, _SCAN_STAGES = 32, 2
"""Most values of a head in an item of the scan, and stages of its copies."""
_STEP_PROGRAMS, _CHUNK_PROGRAMS, _SCAN_PROGRAMS = 528, 264, 264
"""Most programs: 4, 2 and 2 for each SM of an H200."""


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
    scratch_TY: torch.Tensor,
    *,
    single: bool = False,
    early: bool = False,
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
        scratch_TY: contiguous; `net.scratch_widths` numbers of each token.
        single: see `StepStates`.
        early: see there.
    """
    num_tokens, num_reqs = len(projected_TF), len(slots_R)
    # Factors first, where they are aligned whatever the number of tokens is.
    words, pairs, conv_TC = scratch_TY.view(-1).split([num_tokens * width for width in net.scratch_widths])
    factors = words.view(torch.float32)
    rows = query_start_loc, seq_lens_R, slots_R, checkpoints_3R
    decodes = early and single
    if not decodes:
        causal_conv(projected_TF, taps_CW, *rows, history_SPC, conv_TC, net, single=single)
    strides, is_wide = (gates_TB.stride(0), checkpoints_3R.stride(0)), projected_TF.dtype is torch.float32
    keys, values = (max(16, triton.next_power_of_2(size)) for size in (net.key_size, net.value_size))
    heads: dict[str, Any] = {"G": net.key_heads, "H": net.value_heads, "K": net.key_size}
    items: dict[str, Any] = {"TILED": net.tiled, "KEYS": keys}
    weights, by_head, norm = (decay_H, time_bias_H), {"BY_HEAD": net.by_head}, {"NORM_EPS": NORM_EPS}
    stride = {"STRIDE": projected_TF.stride(0)}
    block = min(values, max(16, (_DECODE_BLOCK if decodes else _STEP_BLOCK) // keys))
    most_items = num_reqs * net.value_heads * triton.cdiv(net.value_size, block)
    if decodes:
        delta_decode_kernel[(most_items,)](
            projected_TF, gates_TB, taps_CW, *weights, *rows, history_SPC, state_SHKV, out_TX, *strides, **stride,
            W=taps_CW.shape[1], V=net.value_size, VALUES=block, **heads, **items, **by_head, **norm, **pdl_options(),
            num_warps=4,
        )  # fmt: skip
    else:
        items |= {"MOST": _MOST_STEPS, "ROWS": places_size(num_reqs)}
        delta_step_kernel[(min(most_items, _STEP_PROGRAMS),)](
            conv_TC, gates_TB, *weights, *rows, state_SHKV, out_TX, num_reqs, *strides, V=net.value_size, VALUES=block,
            **heads, **items, **by_head, **norm, **pdl_options(), num_warps=4,
        )  # fmt: skip
    if most_long := 0 if single else min(num_reqs, num_tokens // (_MOST_STEPS + 1)):
        # One rounded number would make errors of one sign, which add up where keys are alike.
        items |= {"PARTS": 1 if is_wide else 2, "CHUNK": CHUNK, "C": net.channels}
        most_items = (num_tokens // CHUNK + 2 * most_long) * net.value_heads
        delta_chunk_kernel[(min(most_items, _CHUNK_PROGRAMS),)](
            conv_TC, gates_TB, *weights, *rows, pairs, factors, num_reqs, *strides, **heads, **items, **by_head, **norm,
            num_warps=4,
        )  # fmt: skip
        block = min(values, _SCAN_VALUES)
        most_items = most_long * net.value_heads * triton.cdiv(net.value_size, block)
        delta_scan_kernel[(min(most_items, _SCAN_PROGRAMS),)](
            conv_TC, pairs, factors, *rows, state_SHKV, out_TX, num_reqs, checkpoints_3R.stride(0), V=net.value_size,
            VALUES=block, STAGES=1 if is_wide else _SCAN_STAGES, **heads, **items, num_warps=4,
        )  # fmt: skip
    num_heads = min(triton.next_power_of_2(net.value_heads), max(1, _NORM_BLOCK // values))
    blocks = triton.cdiv(net.value_heads, num_heads) + (triton.cdiv(net.channels, HISTORY_CHANNELS) if decodes else 0)
    delta_norm_kernel[(num_tokens, blocks)](
        projected_TF, norm_V, *rows, history_SPC, out_TX, num_reqs, eps, checkpoints_3R.stride(0), **stride,
        W=taps_CW.shape[1] if decodes else 0, V=net.value_size, HEADS=num_heads, VALUES=values,
        CHANNELS=HISTORY_CHANNELS, **heads, **by_head, **pdl_options(), num_warps=4,
    )  # fmt: skip
