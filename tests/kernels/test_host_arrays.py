"""Arrays of the host on their way to a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phonograph.kernels import host_arrays


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, bool], ids=str)
def test_arrays_and_tensors_arrive(dtype: type, device: torch.device) -> None:
    array = np.random.default_rng(3).integers(0, 2, (5, 7)).astype(dtype)
    for source in (array, torch.tensor(array), array[1:, ::2]):
        sent = host_arrays._pinned(source, device)
        assert sent.is_pinned() == (device.type == "cuda")
        assert sent.to(device, non_blocking=True).tolist() == source.tolist()
        target = torch.empty(sent.shape, dtype=sent.dtype, device=device)
        host_arrays.send(source, target)
        for found in (target, host_arrays.to_device(source, device)):
            assert found.device.type == device.type and found.tolist() == source.tolist()
