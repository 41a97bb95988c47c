"""Norm and gates of a gated delta net's outputs, in place: the last launch of `gated_delta`.

A program has a token and some heads of values. After a step with few rows (`delta_step.py`), further programs write
the last inputs of each sequence. The torch twin has the shapes.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_let_next_start, pdl_wait
from phonograph.kernels.triton.state.causal_conv import append_input
from phonograph.kernels.triton.state.delta_rows import gate_column


@triton.jit(do_not_specialize=["num_reqs"])
def delta_norm_kernel(
    projected_ptr, norm_ptr, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, history_ptr, out_ptr, num_reqs, eps,
    checkpoints_stride, STRIDE: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    W: tl.constexpr, BY_HEAD: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr, CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norm the outputs of each head and multiply by their gates; outputs of padding become 0.

    STRIDE: see `causal_conv.py`.
    W: taps, where programs after those of heads write last inputs; 0 for none.
    HEADS: heads of a program, a power of two.
    VALUES: power of two, at least V.
    CHANNELS: channels of a program for last inputs, a power of two.
    """
    pdl_let_next_start(PDL)
    block = tl.program_id(1) - (H + HEADS - 1) // HEADS
    if W > 0:  # noqa: SIM102 (one is known when compiled, the other is not)
        if (block >= 0) & (tl.program_id(0) < num_reqs):
            append_input(
                projected_ptr, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, history_ptr, checkpoints_stride,
                tl.program_id(0), block, STRIDE, 2 * G * K + H * V, W, CHANNELS, G, H, K, V, BY_HEAD, PDL,
            )  # fmt: skip
            return
    token, value = tl.program_id(0).to(tl.int64), tl.arange(0, VALUES)[None, :]
    weights = tl.load(norm_ptr + value, value < V, other=0.0)
    pdl_wait(PDL)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    mask = (head < H) & (value < V)
    is_token = token < tl.load(starts_ptr + num_reqs)
    out = out_ptr + (token * H + head) * V + value
    gates = projected_ptr + token * STRIDE + gate_column(head, G, H, K, V, BY_HEAD)
    mixed = tl.load(out, mask, other=0.0).to(tl.float32)
    gate = tl.load(gates + value, mask, other=0.0).to(tl.float32)
    mixed *= tl.rsqrt(tl.sum(mixed * mixed, 1) / V + eps)[:, None] * weights
    # Outputs of padding have no contents yet.
    mixed = tl.where(is_token, mixed * (gate * tl.sigmoid(gate)), 0.0)
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask)
