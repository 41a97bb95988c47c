"""The parts of a step, from traces made by hand, and their charts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from kernel_entries import kernel_entries

from bench.cases import DecodeCase
from bench.floor import H200, decode_floor, decode_work
from bench.idle_trace import Activity
from bench.kernel_parts import KERNEL_PARTS, kernel_part
from bench.step_trace import PARTS, bench_step, step_parts
from phonograph.engine.llm import LLM
from phonograph.errors import ConfigError, PhonographError

# 2 us of prepare, a gap of 1, a product of 10, attention from within it to 4 after it, a copy, 3 us of nothing.
STEP: list[Activity] = [
    (0.0, 2.0, "_prepare_kernel"),
    (3.0, 13.0, "_gemm_tiled_kernel"),
    (9.0, 17.0, "_attention_kernel"),
    (17.0, 18.0, "Memcpy DtoH"),
]


def trace(steps: int, *, longer: int | None = None) -> list[Activity]:
    found: list[Activity] = []
    for step in range(steps):
        found += [(21.0 * step + start, 21.0 * step + end, name) for start, end, name in STEP]
        if step == longer:
            found.append((21.0 * step + 18.0, 21.0 * step + 20.0, "nvjet_gemm"))
    return found


@pytest.mark.parametrize("longer", [None, 12])
def test_every_microsecond_is_somewhere(longer: int | None) -> None:
    """The first eight steps are left out, the last is only where the trace ends, and a step unlike the others too."""
    found = step_parts(list(reversed(trace(20, longer=longer))))
    assert found.num_steps == (11 if longer is None else 10)
    assert found.parts_us == {"products": 10.0, "attention": 4.0, "rest": 3.0, "gaps": 4.0}
    assert found.step_us == 21.0
    assert found.kernels[0] == ("_gemm_tiled_kernel", 10.0, 1.0)


def test_a_library_that_prepares_too_begins_no_step() -> None:
    library = "void flash::prepare_varlen_num_blocks_kernel<1, true>(int)"
    found = step_parts([*trace(20), *((21.0 * step + 2.0, 21.0 * step + 3.0, library) for step in range(20))])
    assert found.num_steps == 11
    assert found.parts_us == {"products": 10.0, "attention": 5.0, "rest": 3.0, "gaps": 3.0}


def test_no_steps_in_a_trace() -> None:
    assert step_parts(trace(5)).num_steps == 0


def test_every_kernel_of_ours_has_a_part() -> None:
    assert {entry.partition(".")[2] for entry in kernel_entries()} == KERNEL_PARTS.keys()
    assert set(KERNEL_PARTS.values()) | {"gaps"} == set(PARTS)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("_gemm_ring_kernel", "products"),
        ("_prefill_kernel", "attention"),
        ("nvjet_sm90_tst_96x64_64x10_1x2_h_bz_TNN", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", "products"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<>>>", "attention"),
        ("void flash::prepare_varlen_num_blocks_kernel<2, false>(int)", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<>", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>", "rest"),
        ("Memcpy DtoH (Device -> Pinned)", "rest"),
        ("Memset (Device)", "rest"),
        ("memcpy32_post", "rest"),
    ],
)
def test_kernels_by_name(name: str, part: str) -> None:
    assert kernel_part(name) == part


def test_a_kernel_without_a_part_fails_the_report() -> None:
    known = step_parts(trace(20))
    assert known.parts_us["rest"] == 3.0
    unknown = [(21.0 * step + 18.0, 21.0 * step + 19.0, "_new_kernel") for step in range(20)]
    with pytest.raises(PhonographError, match=r"step report: .* _new_kernel; .*kernel_parts\.py"):
        step_parts([*trace(20), *unknown])


def test_work_and_floor(demo_llm: LLM) -> None:
    model = demo_llm.plan.model
    spec = replace(demo_llm.plan.attention, dtype="bfloat16", kv_cache_dtype="bfloat16")
    size = {"num_seqs": 7, "context": 100}
    products, attention = decode_work(model, spec, **size)
    assert products.num_operations == 7 * products.num_bytes
    group = model.layers[0].attention.num_query_heads / model.layers[0].attention.num_kv_heads
    assert attention.num_operations == group * attention.num_bytes
    cache = (
        7
        * 100
        * model.num_layers
        * 2
        * model.layers[0].attention.num_kv_heads
        * model.layers[0].attention.head_size
        * 2
    )
    assert attention.num_bytes == cache
    floor = decode_floor(H200, model, spec, **size)
    assert floor == pytest.approx((products.num_bytes + cache) / H200.bandwidth)


def test_only_on_a_gpu(demo_llm: LLM) -> None:
    with pytest.raises(ConfigError, match="cuda"):
        next(bench_step(demo_llm, [DecodeCase(1, 16)], lambda *_: None))


def test_charts(benchmark_script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    script = benchmark_script("plot_results")
    row = {
        "suite": "step",
        "floor_us": 15.0,
        **{f"{name}_us": value for name, value in zip(PARTS, (10, 4, 3, 4), strict=True)},
    }
    work = {"products": {"bytes": 4e7, "operations": 4e7}, "attention": {"bytes": 1e7, "operations": 4e7}}
    rows = [{**row, "case": case, "work": work} for case in ("1x1024", "32x1024")]
    (tmp_path / "steps.jsonl").write_text(json.dumps({"model": "a/tiny", "rows": rows}) + "\n")
    script.main(["--steps", str(tmp_path / "steps.jsonl"), "--folder", str(tmp_path)])
    steps, roofline = ((tmp_path / f"{name}.svg").read_text() for name in ("steps", "roofline"))
    for chart in (steps, roofline):
        ElementTree.fromstring(chart)
    assert "48%" in steps and ">0.021<" in steps and "tiny" in steps
    # 4e7 bytes in 10 us are 4 TB/s of 4.33.
    assert "1x1024 92%" in roofline and ">TFLOP/s<" in roofline
