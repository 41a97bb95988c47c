"""Products with weights in groups, each of which starts before the one before has ended and must wait for it."""

from __future__ import annotations

import pytest
import torch
from grouped_problem import GroupedCase
from product_problem import linear, random_tensor

from phonograph.kernels.triton.gemm.product_plan import (
    GemmGroupedSmallMConfig,
    GemmRingConfig,
    GemmRingSmallMConfig,
    GemmTiledConfig,
    GemvIntegerConfig,
    KernelConfig,
)
from phonograph.kernels.triton.gemm.run_product import GemmScratch

CONFIGS: dict[str, tuple[int, KernelConfig]] = {
    "integer-row": (1, GemvIntegerConfig(64, 2, 1, 3, 2, 1)),
    "few-ring": (5, GemmRingSmallMConfig(8, 32, 4, 1, 2, 1, 2)),
    "grouped-rows": (5, GemmGroupedSmallMConfig(8, 16, 8, 2, 1, 4)),
    "ring": (12, GemmRingConfig(16, 64, 128, 1, 3)),
    "tiles": (12, GemmTiledConfig(16, 64, 128, 1, 4, 3, 0)),
}
"""rows and tiles of each kernel"""


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_chain_replayed_with_other_contents(name: str, device: torch.device) -> None:
    rows, config = CONFIGS[name]
    size = 2048
    case = GroupedCase(rows, size, size, torch.bfloat16, device, group=128, kind="int4 interleaved")
    x = torch.zeros(rows, size, dtype=torch.bfloat16, device=device)
    buffers, scratch = [torch.zeros_like(x) for _ in range(8)], GemmScratch.make(device)

    def chain() -> None:
        before = x
        for buffer in buffers:
            linear(before, case.grouped, None, buffer, scratch=scratch, config=config)
            before = buffer

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for seed in range(10):
        x.copy_(random_tensor(rows, size, dtype=torch.bfloat16, device=device, seed=seed))
        for buffer in buffers:
            buffer.fill_(float("nan"))
        graph.replay()
        before = x
        for buffer in buffers:
            wanted = case.product(before, bias=False)
            assert (buffer.double() - wanted).norm() <= 2e-2 * wanted.norm()
            before = buffer
