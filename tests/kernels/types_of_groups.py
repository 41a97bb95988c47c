"""Products of weights in groups in bfloat16, as far as Triton's own IR, whose types it checks, without a GPU.

The interpreter multiplies bfloat16 wrongly, and has other rules for types. Prints the number of kernels as JSON.

A program of its own, since the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
import triton
from far_gpu import FarGpu
from grouped_problem import GroupedCase
from test_grouped_products import CONFIGS, SIZES
from triton import knobs
from triton.runtime.jit import JITFunction

from phonograph.kernels.triton.gemm import gemm_grouped_small_m, gemm_tiled, launch_product
from phonograph.kernels.triton.gemm.product import ADD, SILU, Product
from phonograph.kernels.triton.gemm.product_plan import GemmTiledConfig

_META = {"name": "", "shared": 0, "tmem_size": 0, "global_scratch_size": 0, "global_scratch_align": 1}
_META |= {"profile_scratch_size": 0, "profile_scratch_align": 1, "num_warps": 4}


def only_types(_: Any, stages: dict[str, Any], *__: Any) -> None:
    """End a compilation at Triton's IR."""
    stages["ttgir"] = lambda _, metadata: metadata.update(_META) or ""
    stages["llir"] = stages["ptx"] = lambda *_: ""
    stages["cubin"] = lambda *_: b""


def main() -> None:
    triton.runtime.driver.set_active(FarGpu(90))
    launch_product.pdl_options = lambda: {"PDL": True, "launch_pdl": True}
    knobs.runtime.add_stages_inspection_hook = only_types
    run, count = JITFunction.run, 0

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        nonlocal count
        run(self, *args, grid=grid, warmup=True, **keywords)
        count += 1

    JITFunction.run = only_compile
    parts = torch.empty(1 << 16), torch.empty(64, dtype=torch.int32)
    for rows, outputs, inputs, group, kind in SIZES:
        for pairs in (False, True):
            case = GroupedCase(
                rows, outputs, inputs, torch.bfloat16, torch.device("cpu"), group=group, kind=kind, pairs=pairs
            )
            weight = case.grouped._replace(order_I=None)
            product = Product(case.x, weight, case.bias, case.out, SILU if pairs else ADD)
            for config in CONFIGS[: 1 if pairs else 2]:
                if isinstance(config, GemmTiledConfig):
                    one = config._replace(splits=1) if pairs else config
                    gemm_tiled.launch(product, one, None if pairs else parts)
                else:
                    gemm_grouped_small_m.launch(product, config)
    print(json.dumps({"kernels": count}))


main()
