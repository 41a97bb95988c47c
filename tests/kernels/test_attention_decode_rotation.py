"""Attention that norms and rotates decodes itself and writes their keys, against all of that in double precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import decode_problem
import pytest
import torch
import triton
import triton.language as tl
from decode_problem import NAN, ONES, Case, Problem, RotatingProblem
from triton.language.extra import cuda as tl_cuda

RAGGED = ((1, 300), (1, 1), (1, 17), (1, 129), (1, 128), (0, 0))


BASE = Case(batch=RAGGED, max_query_len=1)
CASES = [
    BASE,
    replace(BASE, batch=((1, 513),), padding=0, num_sms=4),
    replace(BASE, batch=((1, 1), (1, 2), (1, 64), (1, 65)), num_sms=3, sinks=True),
    replace(BASE, batch=((1, 0), (1, 5), (0, 0))),
    replace(BASE, batch=((0, 0), (0, 0)), padding=3),
    replace(BASE, num_query_heads=14, num_sms=3, lse=False),
    replace(BASE, num_query_heads=64, head_size=16),
    replace(BASE, num_query_heads=2, hnd=True, block_size=48),
    replace(BASE, window=(70, 0), sinks=True),
    replace(BASE, window=(0, 0)),
    replace(BASE, head_size=72),
    replace(BASE, head_size=256, batch=((1, 150), (1, 33))),
    replace(BASE, head_size=64, dtype=torch.float16, block_size=64),
    replace(BASE, head_size=128, dtype=torch.float16, num_query_heads=16, num_kv_heads=8, block_size=64),
]


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decodes(case: Case, norms: bool, device: torch.device) -> None:
    problem = RotatingProblem(case, device, norms=norms)
    problem.check(problem.plan())


def test_what_has_no_slot_is_attended_and_not_written(device: torch.device) -> None:
    problem = RotatingProblem(BASE, device, without_slot=(0, 2))
    problem.check(problem.plan())
    assert problem.slot_mapping.tolist().count(-1) == 2


def test_one_plan_serves_any_batch(device: torch.device) -> None:
    plan = Problem(BASE, device).plan()
    for batch in (RAGGED, ((1, 700),), ((1, 3), (0, 0)), RAGGED[::-1], RAGGED):
        RotatingProblem(replace(BASE, batch=batch), device).check(plan)


FEW = ((1, 1), (1, 16), (1, 127), (1, 128), (1, 129), (1, 4096), (1, 30000))


@pytest.mark.gpu
@pytest.mark.parametrize(("block_size", "dtype"), [(16, torch.bfloat16), (64, torch.bfloat16), (48, torch.float16)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 8, 128), (32, 8, 64), (28, 4, 128), (64, 2, 128), (4, 2, 256)]
)
@pytest.mark.parametrize("norms", [True, False])
def test_models(
    heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, norms: bool, device: torch.device
) -> None:
    base = Case(
        batch=FEW,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_size=dim,
        block_size=block_size,
        dtype=dtype,
        num_sms=132,
        max_query_len=1,
    )
    for case in (base, replace(base, batch=ONES), replace(base, batch=ONES[:8], window=(100, 0), sinks=True)):
        problem = RotatingProblem(case, device, norms=norms)
        problem.check(problem.plan())


@triton.jit
def _late_copy(source, target, patience, BLOCK: tl.constexpr):
    """Lets the next kernel begin at once, and copies after some milliseconds."""
    tl_cuda.gdc_launch_dependents()
    tl_cuda.gdc_wait()
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(patience):
        tl.debug_barrier()
        tl.store(target + offset, tl.load(target + offset, volatile=True))
    tl.store(target + offset, tl.load(source + offset))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [ONES[:8], ((1, 1), (0, 0)), ((1, 0), (1, 3)), ((1, 30000),)], ids=len)
def test_it_waits_for_the_product_before(
    batch: tuple[tuple[int, int], ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel just before writes the projection late, when this one runs already: who reads it sooner reads NaN."""
    base = Case(
        batch=batch,
        num_query_heads=16,
        num_kv_heads=8,
        head_size=128,
        block_size=64,
        dtype=torch.bfloat16,
        num_sms=132,
        max_query_len=1,
        padding=1,
    )
    problem = RotatingProblem(base, device)
    fresh = problem.fused.clone()
    attend = decode_problem.decode_attention

    def after_a_late_write(*args: Any, **keywords: Any) -> None:
        problem.fused.fill_(NAN)
        assert fresh.numel() % 1024 == 0
        _late_copy[(fresh.numel() // 1024,)](fresh, problem.fused, 3000, BLOCK=1024, launch_pdl=True)
        attend(*args, **keywords)

    monkeypatch.setattr(decode_problem, "decode_attention", after_a_late_write)
    problem.check(problem.plan())
