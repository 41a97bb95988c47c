"""The device that kernels are tested on: the GPU, or the CPU through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from phonograph.kernels.triton.launch.pdl import gluon_usable


@pytest.fixture
def hopper_gpu() -> None:
    if not gluon_usable():
        pytest.skip("needs a Hopper GPU")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
