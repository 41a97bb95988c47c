"""Ranks by NCCL: each operation gets the options that torch has for it. `tests/engine/test_gpu_ranks.py` runs them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

pytest.importorskip("triton", reason="Triton is not installed")
from phonograph.kernels.triton.ranks.nccl_ranks import NcclRanks


class OneRank:
    """torch's process group of NCCL with one rank, on the host."""

    Options = SimpleNamespace

    def __init__(self, *_: Any) -> None:
        self.options: list[str] = []

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self.options.append(type(options).__name__)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
        assert options.rootRank == 0
        self.options.append(type(options).__name__)

    def _allgather_base(self, out: torch.Tensor, part: torch.Tensor, options: Any) -> None:
        out.copy_(part)
        self.options.append(type(options).__name__)

    def abort(self) -> None:
        pass


def test_operations_have_options_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", OneRank, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    ranks = NcclRanks(tmp_path, 0, 1, torch.device("cpu"))
    assert ranks._nccl.options == ["AllreduceOptions", "AllgatherOptions", "BroadcastOptions"]
    logits = torch.full((2, 3), torch.nan)
    ranks.gather(torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]), logits)
    assert logits.tolist() == [[1, 2, 3], [5, 6, 7]], "columns of padding are left out"
