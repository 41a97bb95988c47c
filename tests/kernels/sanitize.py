"""Launches every Triton kernel at small odd sizes, for a memory or race checker to watch; the tests' own checks apply.

    python tests/kernels/sanitize.py                     # compiles, so that the checker need not watch that
    compute-sanitizer --error-exitcode 1 python tests/kernels/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/kernels/sanitize.py

Without a GPU the interpreter runs the kernels, and memory that is of no argument fails (`bounded_memory`). On a GPU
run with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor is an allocation of its own, with limits that the checker
knows. Exit code 1 where a kernel of the package was not launched.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import prefill_problem as prefill
import test_attention_decode as decode
import test_attention_prefill_hopper as hopper_prefill
import test_dequantize as dequantized
import test_draft_rows as draft_rows
import test_drafts_on_device as drafts
import test_encoder_rows as encoder_rows
import test_expert_fp4 as experts_fp4
import test_expert_kernels as experts
import test_expert_row as expert_row
import test_fp8_rows as fp8_rows
import test_gated_delta as gated_delta
import test_grouped_products as grouped_products
import test_grouped_ring
import test_integer_row
import test_layer_embeddings as layer_embeddings
import test_mamba2 as mamba2
import test_masked_sampling as masked
import test_page_indices as page_indices
import test_prepare
import test_quantize
import test_ring
import test_scaled_products as scaled_products
import test_shared_prefixes
import test_short_conv as short_conv
import test_split_batch
import test_triton_layers as layers
import test_triton_products as products
import test_triton_sampling as sampling
import test_words as words
from bounded_memory import bounded_memory
from product_problem import check_linear, poisoned
from triton.runtime.jit import KernelInterface

from phonograph.kernels import triton as kernels
from phonograph.kernels.routing import Routing
from phonograph.kernels.triton.elementwise import layers as elementwise
from phonograph.kernels.triton.experts.expert_plan import row_config
from phonograph.kernels.triton.launch.pdl import gluon_usable

FOR_HOPPER = (
    "prefill_hopper._prefill_kernel",
    "gemm_ring._gemm_ring_kernel",
    "gemm_ring_small_m._gemm_ring_small_m_kernel",
    "gemv_integer._gemv_integer_kernel",
)
FOR_RANKS = "sum_rows._sum_rows_kernel", "share_rows._share_rows_kernel", "merge_heads._merge_heads_kernel"
"""Write into the memory of other ranks, which no argument holds: test_sum_rows.py, test_peer_attention.py and
test_gpu_ranks.py run them."""


def find_kernels() -> dict[int, str]:
    """All kernels that are launched (others are functions of these), by identity."""
    found: dict[int, str] = {}
    for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for name, value in vars(importlib.import_module(info.name)).items():
            if isinstance(value, KernelInterface) and name.endswith("_kernel"):
                found[id(value)] = f"{info.name.rpartition('.')[2]}.{name}"
    if not gluon_usable():
        hopper = [key for key, name in found.items() if name in FOR_HOPPER]
        print(f"left out, since they need a Hopper GPU: {', '.join(found.pop(key) for key in hopper)}")
    return {key: name for key, name in found.items() if name not in FOR_RANKS}


def watch(launched: set[int]) -> None:
    """Record each launch from now on."""
    classes = {type(value) for value in vars(elementwise).values()}
    for kind in (one for one in classes if issubclass(one, KernelInterface)):
        run = kind.run

        def noting(self: Any, *args: Any, run: Any = run, **keywords: Any) -> Any:
            launched.add(id(self))
            return run(self, *args, **keywords)

        kind.run = noting


def run_all(device: torch.device) -> None:
    # bfloat16 is what is served, but the interpreter multiplies it wrongly.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    short = decode.Case(batch=((1, 300), (1, 1), (3, 70), (16, 129), (0, 0)), dtype=dtype, num_sms=3)
    for case in (
        replace(short, batch=((1, 300), (1, 17), (0, 0)), max_query_len=1, block_size=64, head_size=128),
        replace(short, head_size=72, num_query_heads=7, num_kv_heads=1, sinks=True, window=(40, 0)),
        replace(short, hnd=True, softcap=3.0, alibi=True, kv_dtype=torch.float8_e5m2, lse=False),
    ):
        problem = decode.Problem(case, device)
        problem.check(problem.plan())
    long = prefill.Case(batch=((1, 9), (20, 1100), (33, 150), (0, 0)), num_heads=2, num_kv_heads=1, num_sms=4)
    for case in (
        long,
        replace(long, block_size=64, head_size=64, dtype=dtype),
        replace(long, heads_outside=True, block_size=64, num_heads=4, num_kv_heads=2, sinks=True, window=(600, -1)),
        replace(long, head_size=40, softcap=3.0, alibi=True, causal=False, window=(20, 11)),
    ):
        prefill.run(case, device, 1e-2)
    for norm, tokens in ((False, 1), (True, 17)):
        layers.test_rope_and_kv_write(tokens, 3, 1, 40, norm, True, dtype, device)
    for bits, ordered in ((4, False), (8, True)):
        dequantized.test_writing_out(bits, True, ordered, device)
        dequantized.test_offsets(bits, device)
    words.test_both_ways(1025, True, device)
    with pytest.MonkeyPatch.context() as patch:
        words.test_a_row_gets_its_tag_last(1025, 3, device, patch)
    layers.test_norms(5, 200, dtype, device)
    layers.test_gathered_rows(3, 2500, dtype, device)
    for gelu in (False, True):
        layers.test_activation(3, 2500, gelu, dtype, device)
    layer_embeddings.test_embeddings_of_all_layers(5, 40, dtype, device)
    layer_embeddings.test_gates_of_a_layer(True, dtype, device)
    layer_embeddings.test_joint_norms(3, 5, dtype, device)
    fp8_rows.test_rows(1008, dtype, device)
    encoder_rows.test_layer_norm(384, torch.float16)
    encoder_rows.test_embed("all")
    encoder_rows.test_activations("gelu", 1500)
    encoder_rows.test_means_and_rows_of_prompts(384)
    for batch in gated_delta.BATCHES:
        gated_delta.test_steps_are_those_of_the_torch_set("odd sizes", batch, dtype, device)
        short_conv.test_steps_are_those_of_the_torch_set(200, 3, True, batch, dtype, device)
        mamba2.test_kernels_are_the_torch_set("odd sizes", batch, dtype, device)
    with pytest.MonkeyPatch.context() as monkeypatch:
        mamba2.test_segments_are_the_whole("odd sizes", "long", dtype, device, monkeypatch)
    gated_delta.test_gates_of_attention(dtype, device)
    experts.test_routes("many", 50, 33, device)
    experts.test_counts_of_pairs("shared", 70, 33, device)
    experts.test_lists_of_chosen_experts("many", 101, 32, device)
    experts.test_memory_of_routers_without_a_gate(device)
    experts.test_results_that_are_joined(7, 3, torch.float16, device)
    for config in experts.TILES:
        experts.test_products("many", 9, 7, config, torch.float16, device, experts.CLAMPED_SWIGLU)
    if device.type == "cuda":
        # The threads of the tests' small tile have copies of its logits, and store them to one address: no race.
        expert_row.ROUTE = row_config(2048, 768).route
    expert_row.test_routes("groups", True, True, device)
    for tiles in expert_row.TILES:
        expert_row.test_products("many", tiles, torch.float16, experts.CLAMPED_SWIGLU, device)
    tiles = row_config(192, 320, fp4=True)[1:]
    expert_row.test_products_of_fp4("many", tiles, dtype, experts.CLAMPED_SWIGLU, device)
    for config in experts_fp4.TILES:
        experts_fp4.test_products(Routing(5, 2), 9, 7, config, dtype, device, experts_fp4.SILU)
    products.test_one_row_with_every_epilogue(13, 200, True, torch.float16, device)
    for rows, outputs, inputs, padded, splits in ((5, 31, 263, 8, 3), (21, 33, 256, 16, 1), (3, 45, 320, 8, 3)):
        products.test_tiles_of_rows(rows, outputs, inputs, padded, splits, device)
    for rows, outputs, inputs, config in products.FEW_ROWS[:4]:
        products.test_few_rows(rows, outputs, inputs, config, True, torch.float16, device)
    for config in grouped_products.CONFIGS[:2]:
        grouped_products.test_products(7, 37, 200, 32, "int4 reordered with zeros", config, torch.float16, device)
    if device.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9):
        scaled_products.test_norm_behind_a_product(37, 96, 144, dtype, device)
    if gluon_usable():
        from warps_apart import check_warps_apart

        check_warps_apart(device)
        for case in (*test_grouped_ring.SIZES[1:4:2], *test_grouped_ring.FEW[1:4]):
            test_grouped_ring.check(case, "int4 interleaved with zeros", torch.float16, device)
        for size in test_integer_row.SIZES[1:4]:
            test_integer_row.check(size, "int4 interleaved with zeros", torch.float16, device)
        for rows, outputs, inputs, config in test_ring.SIZES[1:8:2]:
            check_linear(rows, outputs, inputs, torch.bfloat16, device, True, config, poisoned(device))
        hopper_prefill.check(hopper_prefill.CASES["cut"], device)
    for sizes in ((4,), (4, 8, 2)):
        test_prepare.test_steps_of_mixed_batches(device, sizes)
    test_prepare.test_appends_ahead(device)
    for shifts in (False, True):
        draft_rows.test_rows_of_all_passes(device, 40, shifts)
    drafts.test_runs_and_state_are_those_of_the_host(device, 3)
    drafts.test_lookups_are_those_of_the_host(device, 1, 4, 2)
    test_split_batch.test_cut(5, 1)
    page_indices.check(7, 1100, 16, device)
    for case in test_shared_prefixes.CASES[2:4]:
        test_shared_prefixes.test_shared_prefixes(case, device)
    test_quantize.test_queries(5, 8, 2, 64, dtype, True, device)
    sampling.test_filters(device, torch.float16, 4.0)
    sampling.test_row_that_no_level_helps(device)
    sampling.test_rows_without_a_token(device)
    masked.test_the_kernel_masks_the_rows_listed_only(5001, dtype, device)


def main() -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = find_kernels()
    launched: set[int] = set()
    watch(launched)
    with bounded_memory() if device.type == "cpu" else nullcontext():
        run_all(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    missing = sorted(name for kernel, name in wanted.items() if kernel not in launched)
    print(f"{len(wanted) - len(missing)} of {len(wanted)} kernels launched, every result as it should be")
    if missing:
        print(f"not launched: {', '.join(missing)}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
