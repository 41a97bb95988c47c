"""Compiles attention for GPUs whose programs have less shared memory than Hopper's, without one, and prints as JSON how
many bytes each kernel takes. The argument is the compute capability, as 86.

A program of its own, since the interpreter, which other tests run kernels in, is chosen when Triton is imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import decode_problem
import prefill_problem
import torch
import triton
from far_gpu import FarGpu
from triton.runtime.jit import JITFunction

from phonograph.kernels.triton import attention_decode, attention_plan, attention_prefill

_BYTES = {80: 163 * 1024, 86: 99 * 1024, 120: 99 * 1024}
_BFLOAT16, _FP8 = torch.bfloat16, torch.float8_e5m2


def main() -> None:
    capability = int(sys.argv[1])
    triton.runtime.driver.set_active(FarGpu(capability))
    for module in (attention_decode, attention_plan, attention_prefill):
        module.pdl_usable = lambda: capability >= 90
    attention_decode.fp8_in_one_instruction = lambda: capability >= 89
    attention_decode.shared_memory = attention_prefill.shared_memory = lambda: _BYTES[capability]
    run = JITFunction.run
    found: dict[str, int] = {}
    name = ""

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **keywords)
        found[f"{self.__name__} {name}"] = kernel.metadata.shared

    JITFunction.run = only_compile
    device = torch.device("cpu")
    # Heads of one query head each have the smallest tile of queries, and the longest ring.
    for head_size, num_heads, kv_dtype in ((8, 8, None), (128, 2, None), (256, 2, None), (256, 8, _FP8)):
        case = decode_problem.Case(
            batch=((1, 30), (16, 90)),
            num_query_heads=num_heads,
            head_size=head_size,
            dtype=_BFLOAT16,
            kv_dtype=kv_dtype,
        )
        name = f"short {case}"
        problem = decode_problem.Problem(case, device)
        problem.run(problem.plan())
    for few, head_size, block_size in (
        (True, 8, 16),
        (True, 128, 64),
        (False, 128, 64),
        (True, 256, 16),
        (True, 256, 64),
    ):
        attention_prefill._FEW_TOKENS = few << 30
        long = prefill_problem.Case(num_heads=8, head_size=head_size, block_size=block_size, dtype=_BFLOAT16)
        name = f"long {few=} {head_size=} {block_size=}"
        prefill_problem.Batch(long, device).attend(prefill_problem.make_plan(long, device))
    print(json.dumps({"limit": _BYTES[capability], "found": found}))


if __name__ == "__main__":
    main()
