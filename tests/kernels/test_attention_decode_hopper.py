"""Attention of short queries by warps with work of their own, against its definition in double precision."""

from __future__ import annotations

import random
from dataclasses import replace

import gluon_on_threads
import pytest
import torch
from decode_problem import Case, Problem

from phonograph.kernels.triton import attention_decode

hopper = pytest.importorskip("phonograph.kernels.triton.attention_decode_hopper")

PLAIN = Case(batch=((1, 30), (1, 200), (0, 0), (5, 90), (1, 1)), head_size=64, block_size=64, dtype=torch.float16)
LONG = ((1, 2000), (1, 65), (2, 700))
CASES = {
    "plain": PLAIN,
    "heads of 128": replace(PLAIN, head_size=128),
    "one query head for each KV head": replace(PLAIN, num_query_heads=2),
    "three query heads": replace(PLAIN, num_query_heads=6),
    "blocks of 128, heads outside": replace(PLAIN, block_size=128, hnd=True),
    "one KV head": replace(PLAIN, num_kv_heads=1),
    "rows of two tiles": replace(PLAIN, batch=((16, 100), (1, 70), (9, 9)), num_query_heads=16),
    "all see all": replace(PLAIN, causal=False),
    "window": replace(PLAIN, window=(20, 0), head_size=128),
    "window on both sides": replace(PLAIN, window=(20, 2), causal=False),
    "cut, window, sinks": replace(PLAIN, batch=LONG, window=(600, -1), sinks=True, num_sms=3),
    "cut": replace(PLAIN, batch=LONG, num_query_heads=2, num_kv_heads=1, num_sms=9),
    "cut, sinks": replace(PLAIN, batch=LONG, num_sms=4, sinks=True, head_size=128),
    "many parts": replace(PLAIN, batch=((1, 3000),), num_query_heads=2, num_kv_heads=1, num_sms=20, head_size=128),
    "no LSE, decodes alone": replace(PLAIN, batch=((1, 70), (1, 16), (1, 300)), lse=False, max_query_len=1),
    "long queries left alone": replace(PLAIN, max_query_len=2),
    "nothing": replace(PLAIN, batch=((0, 0),)),
}


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 1, 1, 2, rng.randint(1, 16)]) for _ in range(rng.randint(1, 8))]
    batch = tuple((length, length + rng.choice([0, 63, rng.randint(0, 900)]) if length else 0) for length in lengths)
    causal = rng.random() < 0.7
    left, right = rng.choice([-1, -1, rng.randint(0, 300)]), 0 if causal else rng.choice([-1, rng.randint(0, 9)])
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4, 8, 16])
    return replace(
        PLAIN,
        batch=batch,
        num_query_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_size=rng.choice([64, 128]),
        block_size=rng.choice([64, 128]),
        hnd=kv_heads > 1 and rng.random() < 0.3,
        causal=causal,
        window=(left, right),
        sinks=rng.random() < 0.3,
        lse=rng.random() < 0.5,
        num_sms=rng.randint(1, 12),
    )


def check(case: Case, device: torch.device) -> None:
    launch, launched = hopper.decode_on_hopper, list[int]()

    def noting(*args: object, **keywords: object) -> None:
        launched.append(1)
        launch(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_decode, "_ON_HOPPER", True)
        patch.setattr(hopper, "decode_on_hopper", noting)
        problem = Problem(case, device)
        plan = problem.plan()
        # Twice, as layers follow each other: what one left must not reach the next.
        problem.check(plan)
        problem.check(plan)
    assert len(launched) == 2


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges, rings, masks and merges as they are written, but not layouts or the visibility of writes."""
    monkeypatch.setattr(hopper, "_decode_kernel", gluon_on_threads.launcher(hopper, "_decode_kernel"))
    monkeypatch.setattr(attention_decode, "gluon_usable", lambda: True)
    monkeypatch.setattr(hopper, "pdl_usable", lambda: True)


@pytest.mark.usefixtures("on_threads")
@pytest.mark.parametrize("name", CASES)
def test_on_threads(name: str) -> None:
    check(CASES[name], torch.device("cpu"))


@pytest.mark.usefixtures("on_threads")
@pytest.mark.parametrize("seed", range(12))
def test_any_case_on_threads(seed: int) -> None:
    check(random_case(seed), torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_on_the_device(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check(replace(CASES[name], dtype=dtype), device)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("seed", range(100, 140))
def test_any_case_on_the_device(seed: int, device: torch.device) -> None:
    check(random_case(seed), device)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize(
    "batch", [((1, 33000),), ((1, 1024),) * 64, ((1, 600), (16, 5000), (1, 20000), (4, 4))], ids=["one", "64", "mixed"]
)
def test_real_sizes(batch: tuple[tuple[int, int], ...], head_size: int, device: torch.device) -> None:
    case = Case(batch=batch, num_query_heads=32, num_kv_heads=8, head_size=head_size, block_size=64)
    check(replace(case, dtype=torch.bfloat16, num_sms=132), device)
