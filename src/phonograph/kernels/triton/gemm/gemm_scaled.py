"""Matrix products on FP8 tensor cores, by torch: weights with one scale an output, and rows with a scale each.

The product of two numbers is exact, so that the result is as accurate as the rows.

Shapes: M rows, N outputs, K inputs.
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

import torch

from phonograph.kernels.scaled_products import Fp8Rows, takes_scaled_product
from phonograph.kernels.torch.grouped import Grouped


def takes(weight: Grouped) -> bool:
    """Return True if products with `weight` may have FP8 activations."""
    return weight.has_output_scales() and takes_scaled_product(*weight.packed_OW.shape)


def scaled_product(rows: Fp8Rows, weight: Grouped, bias_N: torch.Tensor | None, out_MN: torch.Tensor) -> torch.Tensor:
    """Compute out = rows @ weight^T + bias, and return `out`."""
    return torch._scaled_mm(
        rows.values_MK,
        weight.packed_OW.t(),
        rows.scales_M1,
        weight.scales_OG.t(),
        bias_N,
        out_dtype=out_MN.dtype,
        use_fast_accum=True,
        out=out_MN,
    )
