"""Matrix products on FP8 tensor cores: rows are rounded to FP8 with a scale each, and torch multiplies them.

Weights are FP8 with one scale an output. The product of two numbers is exact, so that the result is as accurate as the
rows.

Shapes: M rows, N outputs, K inputs.
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

import torch

from phonograph.kernels.scaled_products import ScaledScratch, takes_scaled_product
from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.elementwise.fp8_rows import quantize_rows


def takes(weight: Grouped) -> bool:
    """Return True if products with `weight` may have FP8 activations, where there is scratch for them."""
    return weight.has_output_scales() and takes_scaled_product(*weight.packed_OW.shape)


def scaled_product(
    x_MK: torch.Tensor,
    weight: Grouped,
    scratch: ScaledScratch,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute out = x @ weight^T + bias, and return `out`, which is in scratch if there is none.

    `out` may overlay `x`, of which only the rounded rows are multiplied.
    """
    (num_rows, num_inputs), num_outputs = x_MK.shape, weight.packed_OW.shape[0]
    rows_MK = scratch.rows[: num_rows * num_inputs].view(num_rows, num_inputs)
    scales_M1 = scratch.scales_T[:num_rows].view(num_rows, 1)
    if out_MN is None:
        out_MN = scratch.product[: num_rows * num_outputs].view(num_rows, num_outputs)
    quantize_rows(x_MK, rows_MK, scales_M1)
    return torch._scaled_mm(
        rows_MK,
        weight.packed_OW.t(),
        scales_M1,
        weight.scales_OG.t(),
        bias_N,
        out_dtype=out_MN.dtype,
        use_fast_accum=True,
        out=out_MN,
    )
