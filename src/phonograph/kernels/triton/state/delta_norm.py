"""Norm and gates of a gated delta net's outputs, in place: the last launch of `gated_delta`.

A program has a token and some heads of values. The torch twin has the shapes.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_begin
from phonograph.kernels.triton.state.delta_rows import gate_column


@triton.jit(do_not_specialize=["num_reqs"])
def delta_norm_kernel(
    projected_ptr, norm_ptr, starts_ptr, out_ptr, num_reqs, eps, STRIDE: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BY_HEAD: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norm the outputs of each head and multiply by their gates; outputs of padding become 0.

    STRIDE: see `causal_conv.py`.
    HEADS: heads of a program, a power of two.
    VALUES: power of two, at least V.
    """
    pdl_begin(PDL)
    token, value = tl.program_id(0).to(tl.int64), tl.arange(0, VALUES)[None, :]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    mask = (head < H) & (value < V)
    # Outputs of padding have no contents yet.
    is_token = mask & (token < tl.load(starts_ptr + num_reqs))
    out = out_ptr + (token * H + head) * V + value
    mixed = tl.load(out, is_token, other=0.0).to(tl.float32)
    mixed *= tl.rsqrt(tl.sum(mixed * mixed, 1) / V + eps)[:, None] * tl.load(norm_ptr + value, value < V, other=0.0)
    gates = projected_ptr + token * STRIDE + gate_column(head, G, H, K, V, BY_HEAD)
    gate = tl.load(gates + value, is_token, other=0.0).to(tl.float32)
    tl.store(out, (mixed * (gate * tl.sigmoid(gate))).to(out_ptr.dtype.element_ty), mask)
