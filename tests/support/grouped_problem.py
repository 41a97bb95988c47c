"""Products with weights in groups, and what they are in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import torch
from product_problem import (
    Case,
    gelu_of,
    linear,
    linear_add,
    linear_gated,
    poisoned,
    random_tensor,
    rows_in_memory,
    silu_of,
)

from phonograph.kernels.fp8_activations import ScaledScratch
from phonograph.kernels.torch.grouped import Grouped, dequantize, interleave
from phonograph.kernels.triton.gemm.product import GELU, SILU
from phonograph.kernels.triton.gemm.product_plan import KernelConfig
from phonograph.kernels.triton.gemm.run_product import GemmScratch

Tiles = TypeVar("Tiles")


def random_tiles(rng: random.Random, kind: Callable[..., Tiles]) -> tuple[Tiles, int]:
    """Return tiles for words of 4 bits, and inputs of which each split has a step at least.

    `kind` is `GemvIntegerConfig`, or `GemmRingSmallMConfig` with its rows.
    """
    units, warps_k = rng.choice([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
    block_n, warps_n = rng.choice([(16, 1), (32, 1), (32, 2), (64, 2)])
    splits = rng.randint(1, 4)
    config = kind(block_n, units, splits, rng.randint(1, 5), warps_n, warps_k)
    return config, rng.randint(splits * units * 16, 600) * 8


class GroupedCase(Case):
    """A product whose weights are random numbers of a format; `weight` has the numbers that they mean.

    `kind` is "fp8", or "int4" or "int8" and any of "interleaved", "reordered", "with zeros" and "with offsets".
    """

    def __init__(
        self,
        rows: int,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        group: int,
        kind: str = "int4",
        pairs: bool = False,
    ) -> None:
        super().__init__(rows, outputs, inputs, dtype, device, pairs=pairs)
        weight_rows, groups = self.weight.shape[0], -(-inputs // group)
        generator = torch.Generator().manual_seed(6)
        scales = random_tensor(groups, weight_rows, dtype=dtype, device=device, seed=8).t() / (5 * inputs**0.5)
        if kind == "fp8":
            # All numbers of the type but those that are not a number, the smallest included.
            drawn = torch.randint(0, 254, (weight_rows, inputs), generator=generator, dtype=torch.uint8)
            values = (drawn + (drawn >= 127)).to(device).view(torch.float8_e4m3fn)
            # As models have them: one scale an output is in float32.
            scales = scales.float() / 16 if groups == 1 else scales / 16
            self.grouped = Grouped(values, scales, None, 8, group)
            self.weight = values.double() * scales.double().repeat_interleave(group, 1)[:, :inputs]
            return
        bits = 8 if "int8" in kind else 4
        if bits == 8:
            scales = scales / 16
        packed = torch.randint(-(2**31), 2**31, (weight_rows, -(-groups * group * bits // 32)), generator=generator)
        zeros_OG = torch.randint(0, 1 << bits, (groups, weight_rows), generator=generator, dtype=torch.uint8).t()
        self.grouped = Grouped(
            packed.to(torch.int32).to(device),
            scales,
            zeros_OG.to(device) if "zeros" in kind else None,
            bits,
            group,
        )
        exact = self.grouped._replace(scales_OG=scales.double())
        if "offsets" in kind:
            offsets = random_tensor(groups, weight_rows, dtype=dtype, device=device, seed=9).t() / inputs**0.5
            self.grouped = self.grouped._replace(offsets_OG=offsets)
            exact = exact._replace(offsets_OG=offsets.double())
        self.weight = dequantize(exact)[:, :inputs]
        if "interleaved" in kind:
            words = interleave(self.grouped.packed_OW)
            self.grouped = self.grouped._replace(packed_OW=words, interleaved=True)
        if "reordered" in kind:
            order_K = torch.randperm(inputs, generator=generator).to(device)
            self.grouped = self.grouped._replace(order_I=order_K)
            self.weight = torch.empty_like(self.weight).index_copy_(1, order_K, self.weight)


def grouped_scratch(case: GroupedCase) -> GemmScratch:
    """Return poisoned scratch for a product and for those of as many inputs and outputs."""
    size = max(case.weight.numel(), case.x.numel())
    room = torch.full((size,), torch.nan, dtype=case.dtype, device=case.x.device)
    return poisoned(case.x.device)._replace(dequantized=room)


def scratch_of(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> GemmScratch:
    scaled = ScaledScratch(
        torch.full((rows_in_memory(rows) * inputs,), torch.nan, device=device).to(torch.float8_e4m3fn),
        torch.full((rows,), torch.nan, device=device),
        torch.full((rows * outputs,), torch.nan, dtype=dtype, device=device),
    )
    return poisoned(device)._replace(scaled=scaled)


def check_products(
    made: Callable[..., GroupedCase], config: KernelConfig, scratch: GemmScratch, *, gated: bool = True
) -> None:
    """Check a product with a bias, one that is added, and with `gated` one with each activation.

    `made` returns a new case, with `pairs=True` one of gates and ups.
    """
    plain = made()
    linear(plain.x, plain.grouped, plain.bias, plain.out, scratch=scratch, config=config)
    plain.check(plain.product(plain.x, bias=True))
    added = made()
    added.out.copy_(added.residual)
    linear_add(added.x, added.grouped, None, added.out, scratch=scratch, config=config)
    added.check(added.product(added.x, bias=False) + added.residual.double())
    if gated:
        for mode, wanted in ((SILU, silu_of), (GELU, gelu_of)):
            pairs = made(pairs=True)
            assert linear_gated(
                pairs.x, pairs.grouped, pairs.bias, pairs.out, scratch=scratch, config=config, mode=mode
            )
            pairs.check(wanted(pairs.product(pairs.x, bias=True)))
