"""Gates on the output of attention: each number is multiplied by the sigmoid of its gate.

Shapes: T tokens, H query heads, D head size. The gates of a head follow its queries in the projection:

    a token's projection | q0 | gate 0 | q1 | gate 1 | ... | keys | values |
"""

# pyright: basic, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options

_BLOCK = 1024


def gate_heads(out_TX: torch.Tensor, projected_TF: torch.Tensor, head_size: int) -> None:
    """Multiply attention's output [T, H * D] by sigmoid(gate), in place.

    Args:
        out_TX: rows may be apart from one another.
        projected_TF: the projection with the gates; rows may be apart from one another.
        head_size: D.
    """
    num_tokens, width = out_TX.shape
    _gate_heads_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
        out_TX, projected_TF, width, out_TX.stride(0), projected_TF.stride(0), D=head_size, BLOCK=_BLOCK,
        **pdl_options(), num_warps=4,
    )  # fmt: skip


@triton.jit
def _gate_heads_kernel(
    out_ptr, projected_ptr, width, out_stride, projected_stride, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate_column = column // D * 2 * D + D + column % D
    gate = tl.load(projected_ptr + token * projected_stride + gate_column, mask, other=0.0).to(tl.float32)
    pointer = out_ptr + token * out_stride + column
    x = tl.load(pointer, mask, other=0.0)
    tl.store(pointer, (x.to(tl.float32) * tl.sigmoid(gate)).to(x.dtype), mask)
