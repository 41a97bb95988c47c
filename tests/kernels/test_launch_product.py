"""Arguments of product kernels, which a launch chooses by the names of the kernel's parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.gemm.launch_product import launch_product
from phonograph.kernels.triton.gemm.product import ADD, SILU, DeferredNorm, NextNorm, Norm, Parts, Product
from phonograph.kernels.triton.gemm.product_plan import GemmTiledConfig

SPLIT = GemmTiledConfig(16, 64, 64, 3, 4, 3, 0)


class Kernel:
    """Stand-in with the parameters given, which keeps the grid and the arguments of its launch."""

    def __init__(self, *names: str) -> None:
        self.arg_names = names
        self.grid: tuple[int, ...] = ()
        self.arguments: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Kernel:
        self.grid = grid
        return self

    def __call__(self, **arguments: Any) -> None:
        self.arguments = arguments


def product(mode: int = ADD, **others: Any) -> Product:
    return Product(torch.zeros(20, 128), torch.zeros(256, 128), None, torch.zeros(20, 128), mode, **others)


def parts(num_sums: int, num_tiles: int) -> Parts:
    return torch.zeros(num_sums), torch.zeros(num_tiles, dtype=torch.int32)


@pytest.mark.parametrize(
    ("mode", "room", "splits"),
    [
        (ADD, parts(3 * 4 * 64 * 16, 4), 3),
        (ADD, parts(3 * 4 * 64 * 16 - 1, 4), 1),
        (ADD, parts(3 * 4 * 64 * 16, 3), 1),
        (ADD, None, 1),
        (SILU, parts(1 << 16, 64), 1),
    ],
    ids=["room", "too few sums", "too few counters", "no scratch", "gated"],
)
def test_inputs_are_split_only_where_scratch_has_room(mode: int, room: Parts | None, splits: int) -> None:
    """20 rows and 128 outputs are four tiles. Without splits, the kernel gets no scratch."""
    kernel = Kernel("x_ptr", "partial_ptr", "arrived_ptr", "M", "BLOCK_N", "SPLITS")
    launch_product(kernel, product(mode), SPLIT, room)
    assert kernel.grid == (4, splits) and kernel.arguments["SPLITS"] == splits
    assert kernel.arguments["M"] == 20 and kernel.arguments["BLOCK_N"] == 64
    assert (kernel.arguments["partial_ptr"] is None) == (splits == 1)
    assert kernel.arguments["num_warps"] == 4 and "N" not in kernel.arguments


def test_an_operand_without_a_parameter_is_not_ignored() -> None:
    sums = torch.zeros(2, 16)
    following = NextNorm(torch.zeros(128), torch.zeros(20, 128), DeferredNorm(sums, 1e-5))
    groups = Grouped(torch.zeros(128, 16, dtype=torch.int32), torch.zeros(128, 1), None, 4, 128)
    for one in (
        product(norm=Norm(torch.zeros(128), 1e-5)),
        product(norm=DeferredNorm(sums, 1e-5)),
        product(next_norm=following),
        product()._replace(weight=groups),
    ):
        with pytest.raises(AssertionError):
            launch_product(Kernel("x_ptr"), one, SPLIT)
