"""Words over the bus: both directions, any count, nothing beside them; on a GPU from and to pinned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phonograph.kernels.triton.step.pinned_words import copy_words, send_words
from phonograph.kernels.triton.step.step_layout import EARLY_ROW

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


@pytest.mark.parametrize(("count", "num_more"), [(1, 0), (5, 3), (1023, 3), (1024, 1), (2500, 3)])
def test_a_row_gets_its_tag_last(
    count: int, num_more: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row and tag are those of the upload, other rows are left alone, and without a tag nothing is written."""
    on_gpu = device.type == "cuda"
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (count + num_more,), dtype=torch.int32)
    source, more = (torch.full((size + 2,), POISON, dtype=torch.int32, device=device) for size in (count, num_more))
    source[1:-1], more[1:-1] = words[:count], words[count:]
    rows = torch.full((4, count + num_more + 1), POISON, dtype=torch.int32, pin_memory=on_gpu)
    upload = torch.arange(40, 52, dtype=torch.int32, device=device)
    written: list[int] = []
    if not on_gpu:
        from triton.runtime import interpreter

        memory: Any = interpreter._interpreter
        store = memory.store

        def noted(addresses: Any, value: Any, mask: Any) -> Any:
            written.extend(addresses[mask.astype(bool)].ravel().tolist())
            return store(addresses, value, mask)

        monkeypatch.setattr(memory, "store", noted)
    for tag in (0, 12345):
        upload[EARLY_ROW : EARLY_ROW + 2] = torch.tensor([2, tag], dtype=torch.int32)
        send_words(upload, source[1:-1], rows, more=more[1:-1] if num_more else None)
        if on_gpu:
            torch.cuda.synchronize()
        assert bool((rows[[0, 1, 3]] == POISON).all())
        assert rows[2].tolist() == ([*words.tolist(), tag] if tag else [POISON] * (count + num_more + 1))
    if not on_gpu:
        assert written.count(written[-1]) == 1 and written[-1] == rows[2].data_ptr() + 4 * (count + num_more)
