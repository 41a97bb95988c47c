"""Decode attention that takes the raw projection, against the two kernels it stands for and against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_problem import NAN, Case, Problem

from phonograph.kernels.projection import FreshTokens
from phonograph.kernels.triton.rope_kv import LARGEST_FP8, rope_and_write_kv

POSITIONS = 70
EPS = 1e-5


class Projection(Problem):
    """A case whose sequences' last keys are still in the projection; NaN is where they go.

    Positions are random, for nothing but the rotation depends on them. Sequences in `unwritten` have a slot of -1, and
    an older key in its place.
    """

    def __init__(self, case: Case, device: torch.device, *, norm: bool, unwritten: tuple[int, ...] = ()) -> None:
        super().__init__(case, device)
        heads, kv_heads, dim = case.num_query_heads, case.num_kv_heads, case.head_size
        generator = torch.Generator().manual_seed(len(str(case)) + 1)
        num_tokens = self.projection.shape[0]
        angles = torch.rand(POSITIONS, dim // 2, generator=generator) * 6
        weights = torch.rand(heads + kv_heads, dim, generator=generator) + 0.5
        slots = torch.full((num_tokens,), -1, dtype=torch.int64)
        self.new = [index for index, (query_len, _) in enumerate(case.batch) if query_len]
        for token, index in enumerate(self.new):
            if index not in unwritten:
                slots[token] = self.slots[index][-1]
                self.cache[:, slots[token] // case.block_size, slots[token] % case.block_size] = NAN
        self.fresh = FreshTokens(
            positions_T=torch.randint(POSITIONS, (num_tokens,), generator=generator).to(device),
            rotary_PD=torch.cat((angles.cos(), angles.sin()), 1).to(device),
            # As in the engine's eager steps, it may end where the tokens do.
            slot_mapping_T=slots.to(device)[: len(self.new) + case.padding // 2],
            qk_norm=weights.to(device, case.dtype) if norm else None,
            eps=EPS,
        )

    def separate(self) -> Projection:
        """The same problem, its queries turned and its keys written by the kernel that does nothing else."""
        other = object.__new__(Projection)
        other.__dict__.update(vars(self))
        case, fresh = self.case, self.fresh
        assert fresh is not None
        other.projection, other.cache, other.fresh = self.projection.clone(), self.cache.clone(), None
        width = case.num_query_heads * case.head_size
        other.query = other.projection[:, :width].unflatten(-1, (-1, case.head_size))
        rope_and_write_kv(
            other.projection,
            fresh.positions_T,
            fresh.rotary_PD,
            other.cache,
            fresh.slot_mapping_T,
            num_query_heads=case.num_query_heads,
            num_kv_heads=case.num_kv_heads,
            qk_norm=fresh.qk_norm,
            eps=fresh.eps,
            k_scale=None if self.scales[0] is None else self.scales[0].to(self.device),
            v_scale=None if self.scales[1] is None else self.scales[1].to(self.device),
        )
        return other

    def turned(self) -> torch.Tensor:
        """All heads [T, H + 2K, D] as attention is to see them, by definition; float64."""
        case, fresh = self.case, self.fresh
        assert fresh is not None
        rows = self.projection.double().cpu().unflatten(-1, (-1, case.head_size)).clone()
        qk = rows[:, : case.num_query_heads + case.num_kv_heads]
        if fresh.qk_norm is not None:
            qk = qk / (qk.square().mean(-1, keepdim=True) + EPS).sqrt() * fresh.qk_norm.double().cpu()
        cos, sin = fresh.rotary_PD.double().cpu()[fresh.positions_T.cpu()][:, None].chunk(2, -1)
        x, y = qk.chunk(2, -1)
        rows[:, : qk.shape[1]] = torch.cat((x * cos - y * sin, y * cos + x * sin), -1)
        return rows

    def attend(self, tokens: slice, length: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fresh is None:
            return super().attend(tokens, length, slots)
        raw = self.query
        self.query = self.turned()[:, : self.case.num_query_heads].to(self.case.dtype)
        result = super().attend(tokens, length, slots)
        self.query = raw
        return result

    def check_cache(self, before: torch.Tensor) -> None:
        """The new keys and values are where they belong, and nothing else is new."""
        case, fresh = self.case, self.fresh
        assert fresh is not None
        slots = fresh.slot_mapping_T[: len(self.new)].cpu()
        written = slots[slots >= 0]
        rows = self.turned()[: len(self.new)][slots >= 0, case.num_query_heads :].chunk(2, 1)
        got = self.cache.cpu().flatten(1, 2)
        rest = torch.ones(got.shape[1], dtype=torch.bool)
        rest[written] = False
        before = before.cpu().flatten(1, 2)
        assert torch.equal(got[:, rest].view(torch.uint8), before[:, rest].view(torch.uint8))
        largest = LARGEST_FP8.get(self.cache.dtype)
        # The interpreter drops the carry where rounding to FP8 fills the mantissa.
        eighth = 0.1 if self.device.type == "cuda" else 0.2
        tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(self.cache.dtype, eighth)
        for plane, scale, expected in zip(got, self.scales, rows, strict=True):
            if scale is not None and largest is not None:
                expected = (expected / scale[:, None].double()).clamp(-largest, largest)
            assert (plane[written].double() - expected).norm() <= tolerance * expected.norm()


def compare(case: Case, device: torch.device, *, norm: bool, unwritten: tuple[int, ...] = ()) -> None:
    problem = Projection(case, device, norm=norm, unwritten=unwritten)
    separate, raw, before = problem.separate(), problem.projection.clone(), problem.cache.clone()
    plan = problem.plan()
    problem.check(plan)
    problem.check_cache(before)
    assert torch.equal(problem.projection.view(torch.uint8), raw.view(torch.uint8)), "the projection stays as it is"
    # Once more, on what the first run left: nothing of it goes into the second.
    bits, other_bits = problem.cache.view(torch.uint8).clone(), separate.cache.view(torch.uint8)
    out, lse = problem.run(plan)
    assert torch.equal(problem.cache.view(torch.uint8), bits)
    other, other_lse = separate.run(separate.plan())
    tokens = slice(0, len(problem.new) + case.padding)
    if not norm:
        assert torch.equal(bits, other_bits)
        assert torch.equal(out[tokens], other[tokens])
        assert lse is None or other_lse is None or torch.equal(lse[:-1], other_lse[:-1])
        return
    # The squares of a head are added up in another order: their sum may be rounded to its neighbour, and with it, now
    # and then, an element.
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[case.dtype]
    keys, other_keys = (one.cache.float().nan_to_num() for one in (problem, separate))
    assert (keys - other_keys).norm() <= tolerance * other_keys.norm()
    got, expected = out[tokens].double(), other[tokens].double()
    assert (got - expected).norm() <= 2 * tolerance * expected.norm()


RAGGED = ((1, 300), (1, 1), (1, 17), (1, 16), (1, 129), (1, 64), (1, 65), (0, 0))
SMALL = Case(batch=RAGGED, max_query_len=1)
CASES = [
    SMALL,
    replace(SMALL, num_query_heads=2, head_size=128, dtype=torch.float16, block_size=64),
    replace(SMALL, num_query_heads=8, head_size=64, dtype=torch.float16, hnd=True),
    replace(SMALL, num_query_heads=6, head_size=40, padding=0),
    replace(SMALL, num_query_heads=7, num_kv_heads=1, head_size=80, block_size=64, hnd=True),
    replace(SMALL, batch=((1, 150), (1, 20)), head_size=256, lse=False),
    replace(SMALL, window=(70, 0), sinks=True),
    replace(SMALL, window=(0, 0), block_size=64),
    replace(SMALL, window=(15, -1), causal=False),
    replace(SMALL, softcap=2.5, alibi=True, sinks=True),
    # One sequence among many programs, and many tiles.
    replace(SMALL, batch=((1, 1601),), num_sms=9, padding=3, block_size=64),
    replace(SMALL, batch=((1, 900), (1, 64), (1, 1)), num_sms=13, hnd=True),
    # Rows of several tiles: each writes the same key.
    replace(SMALL, batch=((1, 150), (1, 40)), num_query_heads=71, num_kv_heads=1, num_sms=3),
    # Many sequences for each program.
    replace(SMALL, batch=tuple((1, 1 + 37 * index % 90) for index in range(17)) + ((0, 0),) * 3, num_sms=1),
    replace(SMALL, batch=((0, 0), (0, 0)), padding=5),
    replace(SMALL, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, head_size=64),
    replace(SMALL, dtype=torch.float16, kv_dtype=torch.float8_e5m2, head_size=40, hnd=True),
]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_separate_kernels(case: Case, norm: bool, device: torch.device) -> None:
    compare(case, device, norm=norm)


def test_a_slot_of_nobody_gets_nothing(device: torch.device) -> None:
    compare(replace(SMALL, block_size=64), device, norm=False, unwritten=(0, 3, 4))


def test_one_plan_serves_any_batch(device: torch.device) -> None:
    """What a graph does; entries behind the batch's last sequence are those of batches before."""
    plan = Projection(SMALL, device, norm=True).plan()
    for batch in (RAGGED, ((1, 5),), ((0, 0), (0, 0)), ((1, 400), (1, 33)), RAGGED):
        problem = Projection(replace(SMALL, batch=batch), device, norm=True)
        before = problem.cache.clone()
        problem.check(plan)
        problem.check_cache(before)


ONES = tuple((1, 1 + 613 * index % 2500) for index in range(70)) + ((0, 0),) * 5
LONG = ((1, 1), (1, 16), (1, 127), (1, 128), (1, 129), (1, 4097), (1, 32768), (1, 32769), (1, 64), (0, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("batch", [LONG, ONES, ((1, 32771),), ((1, 777),)], ids=["long", "ones", "one", "short"])
@pytest.mark.parametrize(("block_size", "hnd"), [(16, False), (64, True), (128, False)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(32, 8, 128), (16, 8, 128), (28, 4, 128), (4, 2, 64), (8, 8, 80), (6, 2, 40), (8, 4, 256)],
)
def test_models(
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    hnd: bool,
    batch: tuple[tuple[int, int], ...],
    norm: bool,
    device: torch.device,
) -> None:
    case = Case(
        batch=batch,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_size=dim,
        block_size=block_size,
        hnd=hnd,
        dtype=torch.bfloat16,
        max_query_len=1,
        num_sms=132,
    )
    compare(case, device, norm=norm)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (100, 0), (4096, -1), (0, 0)], ids=str)
def test_features(window: tuple[int, int], kv_dtype: torch.dtype | None, device: torch.device) -> None:
    base = Case(
        batch=LONG,
        num_query_heads=32,
        num_kv_heads=8,
        head_size=128,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        window=window,
        max_query_len=1,
        num_sms=132,
    )
    for softcap, alibi, sinks in ((0.0, False, False), (20.0, False, True), (5.0, True, True)):
        compare(replace(base, softcap=softcap, alibi=alibi, sinks=sinks), device, norm=False)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 3, 16, 32, 71])
def test_groups(group: int, device: torch.device) -> None:
    case = Case(batch=ONES, num_query_heads=2 * group, head_size=64, dtype=torch.bfloat16, num_sms=132, max_query_len=1)
    compare(case, device, norm=False)
    compare(case, device, norm=True)


@pytest.mark.gpu
def test_what_was_written_is_read_at_once(device: torch.device) -> None:
    """Again and again on fresh memory: a load that overtook the store would read NaN or an older key."""
    case = Case(batch=ONES, num_query_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, num_sms=132)
    problem = Projection(replace(case, max_query_len=1), device, norm=False)
    before = problem.cache.clone()
    plan = problem.plan()
    first, _ = problem.run(plan)
    for _ in range(200):
        problem.cache.copy_(before)
        again, _ = problem.run(plan)
        assert torch.equal(first[:-1], again[:-1])
