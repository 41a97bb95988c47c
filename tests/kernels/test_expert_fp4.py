"""Experts' products with weights in MXFP4: every code, scales of all sizes, and random layers against float64."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from fp4_weights import meant, random_file, weight_for_gpu

from phonograph.kernels.routing import Routing
from phonograph.kernels.torch import fp4
from phonograph.kernels.torch.grouped import dequantize
from phonograph.kernels.triton.experts.expert_lists import ExpertLists
from phonograph.kernels.triton.experts.expert_plan import ExpertConfig, ExpertTile, FewRowsTile, expert_config
from phonograph.kernels.triton.experts.expert_products import down_products, fitted, gate_up_products
from phonograph.kernels.triton.experts.expert_tile import fp4_bits, power_of_two
from phonograph.kernels.triton.experts.route import route
from phonograph.kernels.triton.gemm.product import RELU2, SILU

TILES = (
    ExpertConfig(16, ExpertTile(16, 128, 1, 1), ExpertTile(32, 256, 1, 1)),
    ExpertConfig(32, ExpertTile(32, 256, 1, 1), ExpertTile(16, 128, 1, 1)),
    ExpertConfig(8, FewRowsTile(16, 1, 2, 1), FewRowsTile(32, 2, 1, 2)),
    ExpertConfig(16, FewRowsTile(32, 4, 1, 4), ExpertTile(32, 256, 1, 1)),
    # Gates and ups in one product.
    ExpertConfig(128, ExpertTile(32, 256, 4, 1), ExpertTile(64, 128, 4, 1), tail=16),
    ExpertConfig(256, ExpertTile(64, 128, 8, 1), ExpertTile(128, 128, 8, 1), tail=32),
)


def routed(x_TE: torch.Tensor, routing: Routing, block: int, count: int) -> ExpertLists:
    """Return the lists of `count` rows, of memory that is NaN."""
    words = torch.full((ExpertLists.num_words(len(x_TE), routing),), torch.nan, device=x_TE.device)
    lists = ExpertLists.over(words, len(x_TE), routing, ExpertLists.counters(len(x_TE), x_TE.device))
    router = torch.randn(routing.num_experts, x_TE.shape[1]).to(x_TE) / x_TE.shape[1] ** 0.5
    real = torch.tensor([count], dtype=torch.int32, device=x_TE.device)
    route(x_TE, router, routing, lists, block=block, num_rows=real)
    return lists


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("routing", "num_tokens", "count", "config"),
    [
        (Routing(5, 2), 1, 1, TILES[0]),
        (Routing(5, 2), 1, 1, TILES[1]),
        (Routing(5, 2), 1, 1, TILES[2]),
        (Routing(15, 4), 9, 7, TILES[0]),
        (Routing(15, 4), 9, 7, TILES[2]),
        (Routing(3, 1, renormalised=False), 50, 50, TILES[2]),
        (Routing(3, 1, renormalised=False), 50, 50, TILES[3]),
        (Routing(3, 1, renormalised=False), 50, 50, TILES[1]),
        (Routing(3, 1, renormalised=False), 50, 50, TILES[4]),
        (Routing(5, 2), 9, 0, TILES[4]),
        (Routing(15, 4), 30, 29, TILES[5]),
        # All rows have one expert; the last item is one row, has as many rows as the tail, and has more.
        *((Routing(1, 1), 300, count, TILES[5]) for count in (257, 288, 289)),
    ],
)
@pytest.mark.parametrize("mode", [SILU, RELU2])
def test_products(
    routing: Routing,
    num_tokens: int,
    count: int,
    config: ExpertConfig,
    dtype: torch.dtype,
    device: torch.device,
    mode: int,
) -> None:
    """Inputs end within a tile, and within a word of exponents. Padding and experts without tokens are NaN."""
    width, inner, num_experts = 192, 64, routing.num_experts
    x_TE = torch.randn(num_tokens, width).to(device, dtype)
    x_TE[count:] = torch.nan
    lists = routed(x_TE, routing, config.block, count)
    parts = 2 if mode == SILU else 1
    files = random_file(num_experts, parts * inner, width), random_file(num_experts, width, inner)
    gate_up, down = (weight_for_gpu(file, device) for file in files)
    experts = lists.experts_Tk[:count].long()
    for expert in set(range(num_experts)) - set(experts.flatten().tolist()):
        for weight, outputs in ((gate_up, parts * inner), (down, width)):
            weight.scales_OG[expert * outputs : (expert + 1) * outputs] = -1
    pairs = num_tokens * routing.top_k
    inner_PI = torch.full((pairs, inner), torch.nan, dtype=dtype, device=device)
    results_PE = torch.full((pairs, width), torch.nan, dtype=dtype, device=device)
    bias = torch.randn(num_experts * width).to(device, dtype)
    gate_up_products(x_TE, gate_up, lists, routing, config, inner_PI, mode=mode)
    down_products(inner_PI, down, lists, routing, config, results_PE, bias)
    gates, outputs = (meant(file).to(device) for file in files)
    for token in range(count):
        for rank, expert in enumerate(experts[token].tolist()):
            first = gates[expert] @ x_TE[token].double()
            gate, up = first.chunk(2)
            wanted = outputs[expert] @ (first.relu().square() if mode == RELU2 else gate * gate.sigmoid() * up)
            wanted += bias.view(num_experts, width)[expert].double()
            wanted *= lists.weights_Tk[token, rank].double()
            found = results_PE[token * routing.top_k + rank].double()
            assert (found - wanted).norm() <= (4e-3 if dtype == torch.float16 else 2e-2) * wanted.norm()
    assert inner_PI[count * routing.top_k :].isnan().all() and results_PE[count * routing.top_k :].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "exponents"),
    [
        # 0.5 times the smallest and 6 times the largest scale are numbers of the type.
        (torch.float16, (104, 140)),
        pytest.param(torch.bfloat16, (27, 161), marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, (116, 124), marks=pytest.mark.gpu),
    ],
)
def test_every_code_and_scale_is_exact(dtype: torch.dtype, exponents: tuple[int, int], device: torch.device) -> None:
    """Rows of the identity have the weights for products."""
    routing, inputs, outputs = Routing(1, 1), 192, 48
    file = random_file(1, outputs, inputs, exponents=exponents)
    scales = torch.arange(*exponents, dtype=torch.uint8)
    file["scales"].view(-1)[: len(scales)] = scales
    results = torch.full((inputs, outputs), torch.nan, dtype=dtype, device=device)
    identity = torch.eye(inputs, dtype=dtype, device=device)
    lists = routed(identity, routing, 16, inputs)
    down_products(identity, weight_for_gpu(file, device), lists, routing, TILES[0], results)
    assert torch.equal(results.double().cpu(), meant(file)[0].t())
    codes = torch.cat([file["blocks"] & 15, file["blocks"] >> 4])
    assert len(codes.unique()) == 16


@triton.jit
def _parts_kernel(words_ptr, exponents_ptr, bits_ptr, scales_ptr, W: tl.constexpr):
    """Store the bits of codes in bfloat16 [4, W], and those of scales [4, W]."""
    at = tl.arange(0, W)
    words = tl.load(words_ptr + at)
    exponents = tl.load(exponents_ptr + at)
    for code in tl.static_range(4):
        tl.store(bits_ptr + code * W + at, fp4_bits(words, code))
        scale = power_of_two((exponents >> (8 * code)) & 255, tl.bfloat16)
        tl.store(scales_ptr + code * W + at, scale.to(tl.uint16, bitcast=True).to(tl.int32))


def test_bits_of_bfloat16(device: torch.device) -> None:
    """The parts of a weight that kernels multiply, which the interpreter cannot multiply itself."""
    file = random_file(1, 64, 128, exponents=(0, 161))
    file["scales"].view(-1)[:161] = torch.arange(161, dtype=torch.uint8)
    weight = weight_for_gpu(file, device)
    bits, scales = (torch.empty(4, 1024, dtype=torch.int32, device=device) for _ in range(2))
    words = fp4.from_blocks(weight.packed_OW).flatten()
    _parts_kernel[(1,)](words, weight.scales_OG.repeat_interleave(16, 0).flatten().contiguous(), bits, scales, W=1024)
    pairs = bits.contiguous().view(torch.bfloat16).view(4, 64, 4, 4, 2).double()
    factors = scales.to(torch.int16).view(torch.bfloat16).view(4, 64, 16)[:, :, 0].double()
    # Codes by output, group, eight columns, place in a word's order, and half.
    found = pairs.permute(1, 2, 0, 3, 4).flatten(2) * factors.permute(1, 0).unsqueeze(-1) * fp4.FACTOR
    assert torch.equal(found.flatten(1).cpu(), meant(file)[0])


def test_tiles_are_those_of_the_format() -> None:
    """Steps have whole words of exponents, and a warp has the outputs of one product."""
    file = {
        "blocks": torch.zeros(1, 64, 90, 16, dtype=torch.uint8),
        "scales": torch.zeros(1, 64, 90, dtype=torch.uint8),
    }
    weight = weight_for_gpu(file, torch.device("cpu"))
    for tokens in (1, 8, 32, 128, 256, 2048, 8192):
        config = expert_config(tokens, Routing(32, 4), fp4=True)
        assert fitted(config, weight, weight) == config
        for tile, products in ((config.gate_up, 2), (config.down, 1)):
            if isinstance(tile, FewRowsTile):
                assert tile.block_n % 16 == 0 == tile.units % tile.num_warps
            else:
                # Gates and ups are one product where both fit into the warps.
                outputs = {tile.block_n, tile.block_n * products}
                assert tile.block_k % 128 == 0 and tile.block_n >= 64 and 16 * tile.num_warps in outputs


@pytest.mark.parametrize(
    ("routing", "hidden", "inner", "num_tokens", "dtype"),
    [
        (Routing(3, 2), 192, 64, 3, torch.float16),
        *(
            pytest.param(Routing(32, 4), 2880, 2880, tokens, torch.bfloat16, marks=pytest.mark.gpu)
            for tokens in (1, 8, 128, 256, 2048)
        ),
    ],
)
def test_layers_are_those_of_dense_weights(
    routing: Routing, hidden: int, inner: int, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    """With the configurations of models, at the sizes of gpt-oss-20b on a GPU; every weight is exact in the type."""
    config = expert_config(num_tokens, routing, fp4=True)
    configs = config, expert_config(num_tokens, routing)._replace(block=config.block)
    x_TE = torch.randn(num_tokens, hidden).to(device, dtype)
    lists = routed(x_TE, routing, config.block, num_tokens)
    found: list[list[torch.Tensor]] = [[], []]
    inner_PI = torch.full((num_tokens * routing.top_k, inner), torch.nan, dtype=dtype, device=device)
    for outputs, inputs, launch, rows in (
        (2 * inner, hidden, gate_up_products, x_TE),
        (hidden, inner, down_products, inner_PI),
    ):
        weight = weight_for_gpu(random_file(routing.num_experts, outputs, inputs), device)
        dense = torch.cat([dequantize(weight.rows(*rows)) for rows in weight.tiles()]).to(dtype)
        for results, matrix, config in zip(found, (weight, dense), configs, strict=True):
            out = torch.full((len(inner_PI), outputs // (1 + (rows is x_TE))), torch.nan, dtype=dtype, device=device)
            launch(rows, matrix, lists, routing, config, out)
            results.append(out.double())
        inner_PI.copy_(found[1][0])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 6e-3 * other.norm()


def test_order_of_a_gpu(device: torch.device) -> None:
    file = random_file(3, 40, 192, exponents=(27, 161))
    assert torch.equal(dequantize(weight_for_gpu(file, device)).double().cpu(), meant(file).flatten(0, 1))
