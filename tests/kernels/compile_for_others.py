"""Shared memory of attention kernels, compiled for GPUs with less of it than Hopper, without a GPU.

Prints the bytes of each kernel as JSON, by compute capability.

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
from triton import knobs
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.nvidia.compiler import get_ptx_version_from_options
from triton.runtime.jit import JITFunction

from phonograph.kernels.triton.attention import decode as attention_decode
from phonograph.kernels.triton.attention import decode_plan as attention_plan
from phonograph.kernels.triton.attention import prefill as attention_prefill

_BYTES = {80: 163 * 1024, 86: 99 * 1024, 120: 99 * 1024}
_BFLOAT16, _FP8 = torch.bfloat16, torch.float8_e5m2


def without_code(_: Any, stages: dict[str, Any], options: Any, __: Any, capability: int) -> None:
    """End a compilation at the pass that lays out shared memory; the rest takes half of the time.

    The passes before it are those of Triton's `make_llir`.
    """

    def lay_out(module: Any, metadata: dict[str, Any]) -> str:
        manager = ir.pass_manager(module.context)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.ttgpuir.add_allocate_warp_groups(manager)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        ptx_version = get_ptx_version_from_options(options, capability)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, ptx_version)
        manager.run(module, "lay_out")
        metadata["shared"], metadata["name"] = module.get_int_attr("ttg.shared"), ""
        return ""

    stages.update(llir=lay_out, ptx=lambda *_: "", cubin=lambda *_: b"")


def compile_attention(capability: int) -> dict[str, int]:
    """Return the bytes of each kernel: all cases for 8.6, the largest cases for the others."""
    triton.runtime.driver.set_active(FarGpu(capability))
    for module in (attention_decode, attention_plan, attention_prefill):
        module.pdl_options = lambda: dict.fromkeys(("PDL", "launch_pdl"), capability >= 90)
    attention_decode.fp8_in_one_instruction = lambda: capability >= 89
    attention_decode.shared_memory = attention_prefill.shared_memory = lambda: _BYTES[capability]
    run = JITFunction.run
    found: dict[str, int] = {}
    name = ""

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        if self.__name__ == "_attention_kernel":
            self.device_caches.clear()  # of the GPU before
            found[name] = run(self, *args, grid=grid, warmup=True, **keywords).metadata.shared

    JITFunction.run = only_compile
    device = torch.device("cpu")
    # Heads of one query head each have the smallest tile of queries, and the longest ring.
    for head_size, num_heads, kv_dtype in (
        (512, 2, None),
        (256, 2, None),
        (256, 8, _FP8),
        (8, 8, None),
        (128, 2, None),
        (512, 8, _FP8),
    )[: _few(capability)]:
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
        (False, 128, 64),
        (True, 512, 16),
        (True, 256, 16),
        (True, 8, 16),
        (True, 128, 64),
        (True, 256, 64),
        (True, 512, 64),
    )[: _few(capability)]:
        attention_prefill._FEW_TOKENS = few << 30
        long = prefill_problem.Case(num_heads=8, head_size=head_size, block_size=block_size, dtype=_BFLOAT16)
        name = f"long {few=} {head_size=} {block_size=}"
        prefill_problem.Batch(long, device).attend(prefill_problem.make_plan(long, device))
    JITFunction.run = run
    return found


def _few(capability: int) -> int | None:
    return None if capability == 86 else 3


def main() -> None:
    knobs.runtime.add_stages_inspection_hook = without_code
    report = {capability: (limit, compile_attention(capability)) for capability, limit in _BYTES.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
