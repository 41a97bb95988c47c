"""Places of a tape's intermediates: what is live together never overlaps, and what ended gives its place away."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
import torch

from phonograph.graphs.tape.pool import ALIGNMENT, PoolPlan, plan_pool, storage_id
from phonograph.graphs.tape.tape import TapeRuntime


def plan_of(calls: list[str], sizes: dict[str, int], keep: str = "", own: str = "") -> tuple[dict[str, int], PoolPlan]:
    """Plan calls, each given by the letters of the tensors that it touches; return the places and the plan."""
    tensors = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    planned = {storage_id(tensor) for name, tensor in tensors.items() if name not in own}
    plan = plan_pool([[tensors[name] for name in call] for call in calls], planned, tuple(tensors[n] for n in keep))
    return {name: plan.offsets[storage_id(one)] for name, one in tensors.items() if name not in own}, plan


@pytest.mark.parametrize(
    ("calls", "sizes", "keep", "places", "num_bytes"),
    [
        # A place is free after its last reader, not beside it.
        (["a", "ab", "bc"], {"a": 64, "b": 64, "c": 64}, "", {"a": 0, "b": 64, "c": 0}, 128),
        (["a", "ab", "bc"], {"a": 64, "b": 64, "c": 64}, "a", {"a": 0, "b": 64, "c": 128}, 192),
        # Sizes are rounded up to cache lines, and nothing has none.
        (["abcd"], {"a": 1, "b": 64, "c": 65, "d": 1}, "", {"a": 0, "b": 64, "c": 128, "d": 256}, 320),
        # The smallest gap that fits is taken, the first of equal ones, and the rest of a larger one stays a gap.
        (["abcd", "bd", "bde"], {"a": 128, "b": 64, "c": 64, "d": 64, "e": 64}, "", {"e": 192}, 320),
        (["abc", "bcd", "bce"], {"a": 128, "b": 64, "c": 64, "d": 64, "e": 64}, "", {"d": 0, "e": 0}, 256),
        (["abc", "bcde"], {"a": 128, "b": 64, "c": 64, "d": 64, "e": 64}, "", {"d": 0, "e": 64}, 256),
        (["abcd", "bd", "bde"], {"a": 64, "b": 64, "c": 64, "d": 64, "e": 64}, "", {"e": 0}, 256),
        # Gaps that touch become one; a gap that is too small at the end of the pool grows.
        (["abc", "c", "cd"], {"a": 64, "b": 64, "c": 64, "d": 128}, "", {"d": 0}, 192),
        (["abcde", "bcde", "be", "beg"], {**dict.fromkeys("abcde", 64), "g": 128}, "", {"g": 128}, 320),
        (["ab", "a", "ac"], {"a": 64, "b": 64, "c": 192}, "", {"c": 64}, 256),
        (["ab", "b", "bc"], {"a": 64, "b": 64, "c": 192}, "", {"c": 128}, 320),
    ],
)
def test_places(calls: list[str], sizes: dict[str, int], keep: str, places: dict[str, int], num_bytes: int) -> None:
    found, plan = plan_of(calls, sizes, keep)
    assert {name: found[name] for name in places} == places and plan.num_bytes == num_bytes


def test_tensors_with_memory_of_their_own_have_no_place() -> None:
    found, plan = plan_of(["ab", "b"], {"a": 64, "b": 64}, own="a")
    assert found == {"b": 0} and plan.num_bytes == 64


@pytest.mark.parametrize("seed", range(20))
def test_what_is_live_together_does_not_overlap(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {name: rng.randint(1, 500) for name in "abcdefghijkl"}
    calls = ["".join(rng.sample("abcdefghijkl", rng.randint(1, 4))) for _ in range(14)]
    sizes = {name: size for name, size in sizes.items() if any(name in call for call in calls)}
    keep = rng.choice(sorted(sizes))
    found, plan = plan_of(calls, sizes, keep)
    live = {}
    for name in sizes:
        used = [index for index, call in enumerate(calls) if name in call]
        live[name] = range(used[0], len(calls) if name == keep else used[-1] + 1)
    for one, other in combinations(sizes, 2):
        if live[one].start < live[other].stop and live[other].start < live[one].stop:
            first, second = sorted((one, other), key=found.__getitem__)
            assert found[first] + sizes[first] <= found[second]
    assert all(place % ALIGNMENT == 0 and place + sizes[name] <= plan.num_bytes for name, place in found.items())


def test_poison_is_nan_in_every_format() -> None:
    runtime = TapeRuntime()
    x = torch.randn(64)
    runtime.capture(lambda: ((x + 1) * 2,))
    runtime.poison()
    assert runtime.memory_bytes
    for pool in runtime._pools:
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            assert pool.view(torch.uint8).view(dtype).float().isnan().all()
