"""Page numbers laid end to end."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from phonograph.kernels.triton.attention import page_indices as pages
from phonograph.kernels.triton.attention.page_indices import page_indices


@pytest.mark.parametrize("block", [16, 1024])  # with the first, rows and columns take several turns
@pytest.mark.parametrize(("rows", "columns", "page_size"), [(1, 1, 16), (7, 40, 16), (3, 300, 48), (50, 3, 128)])
def test_page_indices(
    rows: int, columns: int, page_size: int, block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_BLOCK", block)
    check(rows, columns, page_size, device)


def check(rows: int, columns: int, page_size: int, device: torch.device) -> None:
    rng = np.random.default_rng(rows)
    lens = rng.integers(0, columns * page_size + 1, rows)
    lens[rng.random(rows) < 0.3] = 0
    table = torch.from_numpy(rng.integers(0, 10**6, (rows, columns + 3))).int()[:, :columns]
    out = torch.full((rows * columns + 5,), -7, dtype=torch.int32, device=device)
    page_indices(table.to(device), torch.from_numpy(lens).int().to(device), out, page_size=page_size)
    wanted = torch.cat([row[: math.ceil(length / page_size)] for row, length in zip(table, lens, strict=True)])
    assert torch.equal(out[: len(wanted)].cpu(), wanted)
    assert (out[len(wanted) :] == -7).all()


def test_a_batch_without_sequences_launches_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device refuses a grid of no programs."""
    monkeypatch.delattr(pages, "_indices_kernel")
    none = torch.zeros(0, 4, dtype=torch.int32, device=device)
    page_indices(none, none[:, 0], none[:, 0], page_size=16)
