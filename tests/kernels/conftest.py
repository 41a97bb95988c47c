"""The device that kernels are tested on: the GPU, or the CPU through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from bounded_memory import bounded_memory

from phonograph.kernels.triton.launch.pdl import gluon_usable


@pytest.fixture
def hopper_gpu() -> None:
    if not gluon_usable():
        pytest.skip("needs a Hopper GPU")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Kernels in the interpreter touch memory of their arguments only."""
    if torch.cuda.is_available():
        yield
        return
    with bounded_memory():
        yield
