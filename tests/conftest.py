"""For all tests: those marked `gpu` are skipped where there is no GPU, and a slow machine is no failure."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("phonograph", deadline=None)
settings.load_profile("phonograph")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
