"""Prefill attention by warps with work of their own, against its definition in float32."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import gluon_on_threads
import pytest
import torch
from prefill_problem import Batch, Case, make_plan, run
from product_problem import linear

from phonograph.kernels.triton.attention import prefill as attention_prefill
from phonograph.kernels.triton.gemm.product_plan import GemmTiledConfig

hopper = pytest.importorskip("phonograph.kernels.triton.attention.prefill_hopper")

PLAIN = Case(head_size=64, block_size=64)
LONG = ((1, 9), (20, 1100), (33, 150), (0, 0))
CASES = {
    "plain": PLAIN,
    "heads of 128": replace(PLAIN, head_size=128),
    "one query head for each KV head": replace(PLAIN, num_heads=2),
    "three query heads": replace(PLAIN, num_heads=6),
    "blocks of 128, heads outside": replace(PLAIN, block_size=128, heads_outside=True),
    "one KV head": replace(PLAIN, num_heads=4, num_kv_heads=1),
    "all see all": replace(PLAIN, causal=False),
    "window": replace(PLAIN, window=(20, 0), head_size=128),
    "window on both sides": replace(PLAIN, window=(20, 11), causal=False),
    "window to the right": replace(PLAIN, window=(-1, 3), causal=False),
    "long window, sinks": replace(PLAIN, batch=LONG, window=(600, -1), sinks=True),
    "cut": replace(PLAIN, batch=LONG, num_heads=2, num_kv_heads=1, num_sms=4),
    "cut, sinks": replace(PLAIN, batch=LONG, num_heads=2, num_kv_heads=1, num_sms=4, sinks=True, head_size=128),
    "decodes alone": replace(PLAIN, batch=((1, 70), (16, 16))),
    "many tiles": replace(PLAIN, batch=((300, 300), (17, 80), (150, 222)), num_sms=3),
}


BORDERS = {
    "first token": replace(PLAIN, batch=tuple((17, 17 + context) for context in range(120, 136)), num_sms=3),
    "window": replace(
        PLAIN, batch=tuple((17, 17 + context) for context in range(305, 321)), num_sms=3, window=(200, 0)
    ),
}
"""Prompts whose first token sees all keys of a tile of 128, or one less; whose last token's window begins with a tile
that the first token sees, or one key later."""


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 16, 17, rng.randint(18, 60), rng.randint(18, 140)]) for _ in range(rng.randint(1, 7))]
    batch = tuple((length, length + rng.choice([0, rng.randint(0, 900)]) if length else 0) for length in lengths)
    causal = rng.random() < 0.7
    left, right = rng.choice([-1, rng.randint(0, 300)]), 0 if causal else rng.choice([-1, rng.randint(0, 50)])
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4, 8])
    return replace(
        PLAIN,
        batch=batch,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_size=rng.choice([64, 128]),
        block_size=rng.choice([64, 128]),
        heads_outside=kv_heads > 1 and rng.random() < 0.3,
        causal=causal,
        window=(left, right),
        sinks=rng.random() < 0.3,
        num_sms=rng.randint(1, 9),
    )


def check(case: Case, device: torch.device, **limits: int) -> None:
    launch, launched = hopper.attend_on_hopper, list[int]()

    def noting(plan: object, *args: object, **keywords: object) -> None:
        launched.append(1)
        launch(plan, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_prefill, "_HOPPER_TOKENS", 0)
        patch.setattr(hopper, "attend_on_hopper", noting)
        run(case, device, 1e-2 if case.dtype == torch.bfloat16 else 2e-3, **limits)
    assert launched


def check_queries_without_keys(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request has any, but an item of none must not hold up the others, and no block's contents show: zeros."""
    monkeypatch.setattr(attention_prefill, "_HOPPER_TOKENS", 0)
    case = replace(PLAIN, batch=((40, 0), (400, 200), (33, 150)), num_sms=1)
    plan = make_plan(case, device)
    # Block 0, which stands for no block, belongs to no request.
    batch = next(one for seed in range(99) if (one := Batch(case, device, seed)).kv_cache[:, 0].isnan().all())
    batch.plan(plan)
    entries = plan.entries[: int(plan.header[0]), :4].tolist()
    assert [0, 0, 0, 0] in entries and [1, 0, 0, 0] in entries
    batch.attend(plan)
    assert (batch.out_THD[:240] == 0).all() and (batch.lse_HT[:, :240] == -torch.inf).all()
    rest = batch.out_THD[240:473]
    assert torch.isfinite(rest).all() and (rest.float().norm(dim=-1) > 0).all()


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items, rings, turns and masks as they are written, but not layouts or the visibility of writes."""
    monkeypatch.setattr(hopper, "_prefill_kernel", gluon_on_threads.launcher(hopper, "_prefill_kernel"))
    monkeypatch.setattr(attention_prefill, "gluon_usable", lambda: True)


@pytest.mark.usefixtures("on_threads")
@pytest.mark.parametrize("name", CASES)
def test_on_threads(name: str) -> None:
    check(CASES[name], torch.device("cpu"))


@pytest.mark.usefixtures("on_threads")
@pytest.mark.parametrize("name", BORDERS)
def test_borders_on_threads(name: str) -> None:
    check(BORDERS[name], torch.device("cpu"))


@pytest.mark.usefixtures("on_threads")
@pytest.mark.parametrize("seed", range(12))
def test_any_case_on_threads(seed: int) -> None:
    check(random_case(seed), torch.device("cpu"), max_num_tokens=1200)


@pytest.mark.usefixtures("on_threads")
def test_queries_without_keys_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    check_queries_without_keys(torch.device("cpu"), monkeypatch)


@pytest.mark.usefixtures("on_threads")
@pytest.mark.parametrize("broken", ["arrive", "wait"])
def test_threads_detect_errors(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring whose places are never free stops; one that is overwritten too soon gives wrong sums."""
    monkeypatch.setattr(gluon_on_threads, "_PATIENCE", 0.5)
    if broken == "arrive":
        monkeypatch.setattr(gluon_on_threads._Mbarrier, "arrive", lambda barrier, **_: None)
    else:
        wait = gluon_on_threads._Mbarrier.wait

        # Groups that do not wait either could read the same item for ever.
        def wait_unless_loading(barrier: object, parity: object) -> None:
            if "_load" not in threading.current_thread().name:
                wait(barrier, parity)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(gluon_on_threads._Mbarrier, "wait", wait_unless_loading)
    with pytest.raises((AssertionError, gluon_on_threads._Stuck)):
        check(CASES["many tiles"], torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_on_the_device(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check(replace(CASES[name], dtype=dtype), device)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("name", BORDERS)
def test_borders_on_the_device(name: str, device: torch.device) -> None:
    check(BORDERS[name], device)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
def test_keys_that_the_kernel_before_writes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long product writes the cache. The attention starts before the product has ended and must wait for it."""
    monkeypatch.setattr(attention_prefill, "_HOPPER_TOKENS", 0)
    case = replace(PLAIN, batch=((128, 128),), num_heads=2, num_kv_heads=1, dtype=torch.bfloat16)
    plan, batch = make_plan(case, device), Batch(case, device)
    batch.plan(plan)
    rows = batch.kv_cache.view(-1, case.head_size)
    weight = torch.randn(case.head_size, 8192, device=device).to(case.dtype) / 8192**0.5
    x = torch.randn(len(rows), 8192, device=device).to(case.dtype)

    def step() -> None:
        linear(x, weight, None, rows, config=GemmTiledConfig(64, 64, 128, 1, 4, 3, 0))
        batch.attend(plan)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        x.normal_()
        for tensor in (batch.kv_cache, batch.out_THD, batch.lse_HT):
            tensor.fill_(torch.nan)
        graph.replay()
        batch.dense = [batch.kv_cache[:, batch.block_table[0, :2]].flatten(1, 2).double()]
        batch.check(1e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("seed", range(100, 140))
def test_any_case_on_the_device(seed: int, device: torch.device) -> None:
    check(random_case(seed), device, max_num_tokens=1200)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
def test_queries_without_keys_on_the_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check_queries_without_keys(device, monkeypatch)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("batch", [((2048, 2048),), ((512, 6000), (1, 3000), (333, 333), (2000, 2100))], ids=str)
def test_real_sizes(batch: tuple[tuple[int, int], ...], head_size: int, device: torch.device) -> None:
    case = Case(batch=batch, num_heads=32, num_kv_heads=8, head_size=head_size, block_size=64, dtype=torch.bfloat16)
    check(replace(case, num_sms=132), device, max_num_tokens=4096)
