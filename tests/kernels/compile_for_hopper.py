"""Compiles kernels for compute capability 9.0, without a GPU, and reads their machine code.

ptxas 12.8 got one of ours wrong: where two products of the tensor cores read shared memory at one address by two
descriptors that differ in their swizzle, it left a part of the second descriptor in registers that nothing wrote. Such
a read can be seen in the machine code, and only there. A program of its own, since the interpreter, which other tests
run kernels in, is chosen when Triton is imported. Prints JSON: by kernel how many instructions, those
that read what nothing wrote, and in order those that wait for the kernel before ("wait"), that let the next begin
("let") and, of products through a ring, that have the copy engine bring something ("ask"); of the attention of long
prompts those that wait for the products of keys ("keys") or all of them ("all"), and exponentials ("exp"); of experts
the instructions that `_MORE` names.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import prefill_problem
import torch
import triton
from decode_problem import Case, Problem
from far_gpu import FarGpu
from triton import knobs
from triton.runtime.jit import JITFunction

from phonograph.kernels.routing import Routing
from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.torch.state.gated_delta import DeltaSizes
from phonograph.kernels.torch.state.mamba2 import MambaSizes
from phonograph.kernels.triton.attention import decode as attention_decode
from phonograph.kernels.triton.attention import decode_plan as attention_plan
from phonograph.kernels.triton.attention import prefill as attention_prefill
from phonograph.kernels.triton.attention import prefill_hopper as attention_prefill_hopper
from phonograph.kernels.triton.attention import shared_runs as attention_runs
from phonograph.kernels.triton.experts import expert_products, row_products_fp4
from phonograph.kernels.triton.experts import route as route_module
from phonograph.kernels.triton.experts.expert_lists import ExpertLists
from phonograph.kernels.triton.experts.expert_plan import expert_config, row_config
from phonograph.kernels.triton.gemm import launch_product
from phonograph.kernels.triton.gemm.hopper import gemm_ring, gemv_integer
from phonograph.kernels.triton.gemm.product import Product
from phonograph.kernels.triton.gemm.product_plan import GemmRingConfig, GemvIntegerConfig
from phonograph.kernels.triton.gemm.run_product import GemmScratch
from phonograph.kernels.triton.launch.shared_memory import shared_memory
from phonograph.kernels.triton.state import causal_conv, gated_delta, mamba2
from phonograph.kernels.triton.step import pinned_words

_MORE = {
    "_gemm_ring_kernel": {"UTMALDG": "ask"},
    "_gemv_integer_kernel": {"UTMALDG": "ask"},
    "expert_few_rows_kernel": {
        "HMMA": "product",
        "HMUL2": "scale",
        "HFMA2": "scale",
        "LDG.E.EF.128": "read 16",
        "STS": "exchange",
        "SHFL": "exchange",
        "STL": "spill",
    },
    "_gate_up_fp4_row_kernel": (
        _FP4_ROW := {"HMUL2": "scale", "HFMA2": "scale", "LDG.E.EF.128": "read 16", "STL": "spill"}
    ),
    "_down_fp4_row_kernel": _FP4_ROW,
    "_expert_kernel": {
        "HGMMA": "product",
        "HMUL2": "scale",
        "HFMA2": "scale",
        "LDGSTS.E.BYPASS.128": "copy 16",
        "LDGSTS.E [": "copy 4",
        "STS": "exchange",
        "STL": "spill",
    },
    "_route_kernel": {"HGMMA": "product", "STL": "spill"},
    "delta_chunk_kernel": (
        _SCAN := {
            "HGMMA": "product",
            "HMMA": "product",
            "LDGSTS": "copy",
            "STL": "spill",
        }
    ),
    "delta_scan_kernel": _SCAN,
    "delta_decode_kernel": {"LDG": "read", "STL": "spill"},
    "mamba_chunk_kernel": _SCAN,
    "mamba_segment_kernel": _SCAN,
    "_send_kernel": {"LDG": "read", "STG": "write", "BAR.SYNC": "barrier", "MEMBAR": "fence"},
    "_prefill_kernel": {"DEPBAR.LE gsb0, 0x2": "keys", "DEPBAR.LE gsb0, 0x0": "all", "MUFU.EX2": "exp"},
}
"""Instructions of a kernel that are told, beside those of all."""
_WITHOUT_PRODUCTS = "_plan_kernel", "_merge_kernel", "_compare_kernel"
"""Kernels that are compiled on the way. Nothing in their machine code is looked at."""
_HALF = (228 - 2) // 2 * 1024
"""Shared memory of each of two programs on a multiprocessor, which keeps 1 KiB for each."""
_ZERO = 63
"""The uniform register that is always zero."""


def read_code(cubin: bytes, more: dict[str, str]) -> tuple[int, list[str], list[str]]:
    """Count instructions, those that read a uniform register that none before them writes, and, by their
    names, those of programmatic dependent launch and those of `more`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        found = subprocess.run(
            [knobs.nvidia.nvdisasm.path, "-c", "-ndf", file.name], capture_output=True, text=True, check=True
        ).stdout
    lines = [match[1].strip() for match in re.finditer(r"^\s*/\*[0-9a-f]{4,}\*/\s*([^;]*);", found, re.MULTILINE)]
    written, unwritten = {_ZERO}, list[str]()
    words = {"PREEXIT": "let", "ACQBULK": "wait"} | more
    launches = [words[found[0]] for line in lines if (found := re.search("|".join(map(re.escape, words)), line))]
    for line in lines:
        match = re.match(r"(?:@!?U?P\w+ )?([A-Z0-9_.]+)\s*(.*)", line)
        if match is None:
            continue
        operation, operands = match[1], [operand.strip() for operand in match[2].split(",")]
        if operation.startswith("R2UR") and operands[0].startswith("P"):  # a predicate is written first
            operands = operands[1:]
        writes = re.match(r"(?:U(?!TMA|BLK)|R2UR|S2UR|REDUX|VOTEU)", operation) is not None
        reads: set[int] = set()
        for operand in operands[writes:]:
            for number in map(int, re.findall(r"(?<![A-Z])UR(\d+)", operand)):
                if "gdesc[" in operand:
                    # Four registers: of the matrix on the left, which may lie in registers, and of that on the right.
                    first = 2 if operands[1].startswith("R") else 0
                    reads.update(range(number + first, number + 4))
                else:
                    reads.add(number)
        if not reads <= written:
            unwritten.append(line)
        if writes and (target := re.match(r"UR(\d+)", operands[0])):
            wide = ".64" in operation or ".WIDE" in operation
            written.update(range(int(target[1]), int(target[1]) + 1 + wide))
    return len(lines), unwritten, launches


def main() -> None:
    triton.runtime.driver.set_active(FarGpu(90))
    for module in (attention_decode, attention_plan, attention_runs, attention_prefill_hopper):
        module.pdl_options = lambda: {"PDL": True, "launch_pdl": True}
    attention_decode.fp8_in_one_instruction = lambda: True
    run = JITFunction.run
    kernels: dict[str, Any] = {}
    name = ""

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        kernels[f"{self.__name__} {name}"] = run(self, *args, grid=grid, warmup=True, **keywords)

    JITFunction.run = only_compile
    drafts = Case(
        batch=((1, 30), (16, 90)), num_query_heads=8, head_size=128, block_size=64, dtype=torch.bfloat16, num_sms=132
    )
    for changes in (
        {},
        {"kv_dtype": torch.float8_e5m2, "head_size": 64},
        {"kv_dtype": torch.float8_e4m3fn, "head_size": 32, "dtype": torch.float16},
        {"head_size": 512},
        {"batch": ((1, 90),) * 4, "kv_dtype": torch.float8_e4m3fn, "dtype": torch.float32, "max_query_len": 1},
        # Has the loop of keys that no sequences share too.
        {"batch": ((1, 90),) * 4, "shared": ((0, 0), *[(0, 64)] * 3), "kv_dtype": torch.float8_e4m3fn, "sinks": True},
    ):
        case = Case(**{**vars(drafts), **changes})
        name = str(case)
        problem = Problem(case, torch.device("cpu"))
        problem.run(problem.plan())
    attention_prefill._HOPPER_TOKENS = 0
    attention_prefill.gluon_usable = lambda: True
    for head_size, window, sinks in ((128, (-1, -1), False), (64, (100, -1), True)):
        long = prefill_problem.Case(
            num_heads=8, head_size=head_size, block_size=64, window=window, sinks=sinks, dtype=torch.bfloat16
        )
        name = str(long)
        device = torch.device("cpu")
        prefill_problem.Batch(long, device).attend(prefill_problem.make_plan(long, device))
    attention_prefill._HOPPER_TOKENS = 1 << 30
    attention_prefill.pdl_options = lambda: {"PDL": True, "launch_pdl": True}
    for head_size in (128, 512):
        long = prefill_problem.Case(num_heads=8, head_size=head_size, block_size=64, dtype=torch.bfloat16)
        name = f"long {long}"
        prefill_problem.Batch(long, device).attend(prefill_problem.make_plan(long, device))
    launch_product.pdl_options = lambda: {"PDL": True, "launch_pdl": True}
    for mode, splits in ((0, 1), (1, 3), (2, 1), (3, 1)):
        name = f"mode {mode}"
        x, out = (torch.empty(20, size, dtype=torch.bfloat16) for size in (1024, 256))
        weight = torch.empty(512, 1024, dtype=torch.bfloat16)
        parts = GemmScratch.make(device)[:2]
        gemm_ring.launch(Product(x, weight, None, out, mode), GemmRingConfig(32, 64, 128, splits, 2), parts)
    for mode, splits in ((0, 1), (1, 3), (2, 1), (3, 1)):
        name = f"mode {mode}"
        x, out = (torch.empty(1, size, dtype=torch.bfloat16) for size in (1024, 256))
        scales = torch.empty(512, 8, dtype=torch.bfloat16)
        words = Grouped(torch.empty(512, 128, dtype=torch.int32), scales, None, 4, 128, interleaved=True)
        weight = words if mode >= 2 else words.rows(0, 256)
        gemv_integer.launch(Product(x, weight, None, out, mode), GemvIntegerConfig(64, 2, splits, 2, 2, 1), parts)
    expert_products.pdl_options = row_products_fp4.pdl_options = lambda: {"PDL": True, "launch_pdl": True}
    routing, size = Routing(32, 4), 2880
    shapes = (1, True), (1, False), (32, False), (128, True), (128, False), (2048, True), (4096, True), (4096, False)
    for tokens, gated in shapes:
        config = expert_config(tokens, routing, fp4=True)
        name = f"tokens {tokens} tail {config.tail} gated {gated}"
        pairs, outputs = tokens * routing.top_k, 32 * size * (1 + gated)
        words = torch.empty(ExpertLists.num_words(tokens, routing))
        lists = ExpertLists.over(words, tokens, routing, ExpertLists.counters(tokens, device))
        exponents = torch.empty(23, outputs, dtype=torch.int32).t()
        weight = Grouped(torch.empty(outputs, size // 8, dtype=torch.int32), exponents, None, 4, 32, interleaved=True)
        rows, out = (torch.empty(count, size, dtype=torch.bfloat16) for count in (tokens if gated else pairs, pairs))
        launch = expert_products.gate_up_products if gated else expert_products.down_products
        launch(rows, weight, lists, routing, config, out)
        if tokens == 1:
            name, tile = f"one row gated {gated}", row_config(size, size, fp4=True)
            if gated:
                row_products_fp4.gate_up_row_fp4(rows, weight, lists, tile.gate_up, out)
            else:
                row_products_fp4.add_down_row_fp4(rows, weight, lists, tile.down, out[:1])
    route_module.pdl_options = pinned_words.pdl_options = launch_product.pdl_options
    for experts, width in ((32, 2880), (128, 2048), (256, 2048)):
        name, routing = f"experts {experts}", Routing(experts, 8)
        words = torch.empty(ExpertLists.num_words(4096, routing))
        lists = ExpertLists.over(words, 4096, routing, ExpertLists.counters(4096, device))
        rows, router = (torch.empty(count, width, dtype=torch.bfloat16) for count in (4096, experts))
        route_module.route(rows, router, routing, lists, block=128)
    net = MambaSizes(128, 64, 1, 128)
    name, heads, rows = "long", torch.empty(128), [torch.empty(size, dtype=torch.int32) for size in (9, 8, 8)]
    projected, scratch, out = (
        torch.empty(600, width, dtype=torch.bfloat16)
        for width in (net.inner + net.channels + 128, sum(net.scratch_widths), net.inner)
    )
    checkpoints, taps = torch.empty(3, 8, dtype=torch.int32), torch.empty(net.channels, 4)
    pool = torch.empty(9, 3, net.channels, dtype=torch.bfloat16), torch.empty(9, 128, 64, 128)
    weights = taps, None, heads, heads, heads, torch.empty(net.inner)
    for module in (causal_conv, gated_delta, mamba2):
        module.pdl_options = launch_product.pdl_options
    mamba2.mamba2(projected, *weights, *rows, checkpoints, *pool, out, net, 1e-5, scratch)
    delta = DeltaSizes(16, 32, 128, 128, by_head=False)
    projected, scratch, out = (
        torch.empty(64, width, dtype=torch.bfloat16)
        for width in (delta.channels + 4096 + 64, sum(delta.scratch_widths), 4096)
    )
    inputs = projected.split([delta.channels + 4096, 64], 1)
    weights = torch.empty(delta.channels, 4), torch.empty(32), torch.empty(32), torch.empty(128)
    pool = torch.empty(9, 3, delta.channels, dtype=torch.bfloat16), torch.empty(9, 32, 128, 128)
    for case, known in {"long": {}, "single": {"single": True}, "decodes": {"single": True, "early": True}}.items():
        name = case
        gated_delta.gated_delta(*inputs, *weights, *rows, checkpoints, *pool, out, delta, 1e-6, scratch, **known)
    name, words = "tag", torch.empty(68, dtype=torch.int32)
    pinned_words.send_words(words, words[:64], words[None], more=words[:3])
    limit = shared_memory()
    two_each = [name for name in kernels if name.startswith("_attention_kernel") and " long" not in name]
    assert len(two_each) == 6
    too_large = {name: size for name in two_each if (size := kernels[name].metadata.shared) > _HALF}
    assert not too_large, f"of {_HALF} bytes, half of a multiprocessor's shared memory: {too_large}"
    too_large = {name: size for name, kernel in kernels.items() if (size := kernel.metadata.shared) > limit}
    assert not too_large, f"of {limit} bytes of shared memory: {too_large}"
    report = {
        name: read_code(kernel.asm["cubin"], _MORE.get(name.split()[0], {}))
        for name, kernel in kernels.items()
        if name.split()[0] not in _WITHOUT_PRODUCTS
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
