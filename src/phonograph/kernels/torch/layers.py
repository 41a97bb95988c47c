"""Norm, rotary embedding and gated activation of the decoder, in torch.

They are written for the tape, where each recorded call costs microseconds at replay: few operators, each with an `out=`
overload or in place, no host reads and nothing that depends on the data. The formulas are the same as in transformers,
with float32 inside the norm.

Shapes: T tokens, H heads, D head size, I intermediate size; `...` is any leading shape.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702
"""Limit of gates and ups, and slope of the sigmoid, in `clamped_swiglu_and_mul`."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: torch.Tensor) -> torch.Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        x: [..., N]
        weight: broadcasts against x: [N], or [H, N] for a norm of each head; of x's dtype or float32; None for 1
        eps: float32 scalar on the same device; a Python number would take three more operators

    Returns:
        A new tensor of x's shape and dtype. The normalised value is rounded to that dtype before the weight, unless the
        weight is in float32.
    """
    # Naming the dtype that x already has would cost a quarter of the call.
    dtype = None if x.dtype is torch.float32 else torch.float32
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    inverse_rms = torch.addcmul(eps, length, length, value=1.0 / x.shape[-1]).rsqrt_()
    normal = torch.mul(x, inverse_rms)
    if weight is None:
        return normal if normal.dtype == x.dtype else normal.to(x.dtype)
    if normal.dtype == x.dtype:
        return normal.mul_(weight)
    if weight.dtype is torch.float32:
        return normal.mul_(weight).to(x.dtype)
    return normal.to(x.dtype).mul_(weight)


def layer_norm(x: torch.Tensor, weight_2N: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension (Ba et al., arXiv:1607.06450).

    Args:
        x: [..., N]
        weight_2N: weight and bias, of x's dtype
        eps: added to the variance

    Returns:
        A new tensor of x's shape and dtype.
    """
    return functional.layer_norm(x, weight_2N.shape[1:], weight_2N[0], weight_2N[1], eps)


def pool_rows(
    rows_TE: torch.Tensor, query_start_loc: torch.Tensor, numbers_T: torch.Tensor, pooling: str
) -> torch.Tensor:
    """Reduce the rows of each prompt to its first, its last or their mean.

    Args:
        rows_TE: rows of all tokens, padding after the last prompt.
        query_start_loc: int32 [R+1]; empty slots get a row of finite numbers.
        numbers_T: int32 [T], 0 to T - 1.
        pooling: "first", "last" or "mean".

    Returns:
        float32 [R, E].
    """
    starts, ends, num_tokens = query_start_loc[:-1], query_start_loc[1:], len(rows_TE)
    if pooling != "mean":
        rows = starts if pooling == "first" else ends - 1
        return rows_TE.index_select(0, rows.clamp(0, num_tokens - 1)).float()
    # Padding rows belong to a slot after the last one.
    owners_T = torch.searchsorted(ends, numbers_T, right=True)
    sums_RE = torch.zeros(len(query_start_loc), rows_TE.shape[1], dtype=torch.float32, device=rows_TE.device)
    sums_RE.index_add_(0, owners_T, rows_TE.float())
    return sums_RE[:-1] / (ends - starts).clamp(min=1)[:, None]


def rope(x_THD: torch.Tensor, cos_T11h: torch.Tensor, sin_T1h: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (d, d + h) of each head by its token's angles (Su et al. 2021, arXiv:2104.09864).

    `cos_T11h`, `sin_T1h` are the h cosines and sines of each token, in x's dtype. Numbers of a head from 2h on are
    copied. `x_THD` may be a strided view; query and key heads go through one call. Returns a new, contiguous [T, H, D].
    """
    rotated = 2 * cos_T11h.shape[-1]
    if rotated < x_THD.shape[-1]:
        return torch.cat([rope(x_THD[..., :rotated], cos_T11h, sin_T1h), x_THD[..., rotated:]], -1)
    x_TH2h = x_THD.unflatten(-1, (2, -1))
    out_TH2h = torch.mul(x_TH2h, cos_T11h)
    first_THh, second_THh = x_TH2h.unbind(2)
    out_first_THh, out_second_THh = out_TH2h.unbind(2)
    out_first_THh.addcmul_(second_THh, sin_T1h, value=-1)
    out_second_THh.addcmul_(first_THh, sin_T1h)
    return out_TH2h.flatten(2)


def silu_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up of the fused projection [T, 2I], gates first. Returns a new [T, I]."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
    return functional.silu(gate_TI).mul_(up_TI)


def gelu_tanh_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """Compute gelu(gate) * up as `silu_and_mul`, with the approximation by tanh (Hendrycks 2016, arXiv:1606.08415)."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
    return functional.gelu(gate_TI, approximate="tanh").mul_(up_TI)


def clamped_swiglu_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """Compute gate * sigmoid(1.702 * gate) * (up + 1) of clamped gates and ups, gates first; as `silu_and_mul`.

    Gates are at most 7, ups between -7 and 7 (gpt-oss, arXiv:2508.10925).
    """
    gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
    gate_TI = gate_TI.clamp(max=SWIGLU_LIMIT)
    up_TI = up_TI.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return torch.sigmoid(gate_TI * SWIGLU_SLOPE).mul_(gate_TI).mul_(up_TI.add_(1))


def gelu_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """Compute gelu(gate) * up as `silu_and_mul`, with the error function."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, -1)
    return functional.gelu(gate_TI).mul_(up_TI)


def finish_logits(logits_NV: torch.Tensor, factor: float, softcap: float) -> torch.Tensor:
    """Multiply logits by their factor and cap them, in place; a softcap of 0 caps nothing. Returns them."""
    scale = factor / (softcap or 1.0)
    if scale != 1:
        logits_NV.mul_(scale)
    return logits_NV.tanh_().mul_(softcap) if softcap else logits_NV


ACTIVATIONS = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
    "gelu": gelu_and_mul,
    "clamped_swiglu": clamped_swiglu_and_mul,
}
"""Activations of gates by their names in a model's specification."""


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square_()


UNGATED = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
    "relu2": _relu2,
}
"""Activations of feed-forwards without gates."""
