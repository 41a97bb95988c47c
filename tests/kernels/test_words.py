"""Words over the bus: both directions, any count, nothing beside them; on a GPU from and to pinned memory."""

from __future__ import annotations

import pytest
import torch

from phonograph.kernels.triton.step.pinned_words import copy_words

POISON = -77


@pytest.mark.parametrize("count", [1, 3, 1023, 1024, 1025, 9001])
@pytest.mark.parametrize("to_device", [True, False])
def test_both_ways(count: int, to_device: bool, device: torch.device) -> None:
    places = [torch.device("cpu"), device] if to_device else [device, torch.device("cpu")]
    source, target = (torch.full((count + 9,), POISON, dtype=torch.int32, device=place) for place in places)
    if device.type == "cuda":
        source, target = (one.pin_memory() if one.device.type == "cpu" else one for one in (source, target))
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (count,), dtype=torch.int32)
    source[1 : count + 1].copy_(words)
    copy_words(source[1:], target[3:], count)  # at addresses that are multiples of 4 bytes only
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(target[3 : count + 3].cpu(), words)
    assert bool((target[:3] == POISON).all()) and bool((target[count + 3 :] == POISON).all())


@pytest.mark.parametrize("count", [1, 3, 1024, 2000])
def test_more_words_go_to_the_end(count: int, device: torch.device) -> None:
    source, more = torch.arange(count, device=device).int(), torch.tensor([-1, -2], dtype=torch.int32, device=device)
    target = torch.full((2004,), POISON, dtype=torch.int32, pin_memory=device.type == "cuda")
    copy_words(source, target, count, more=more)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert target.tolist() == [*range(count), *[POISON] * (2002 - count), -1, -2]
