"""Experts of one row against float64: random routings, odd sizes, and memory without contents is NaN."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from expert_problem import ROUTINGS, Problem, check_choice, reference
from fp4_weights import meant, random_file, weight_for_gpu

from phonograph.kernels.routing import Routing
from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.experts.expert_lists import ExpertLists
from phonograph.kernels.triton.experts.expert_plan import FewRowsTile, RowTile
from phonograph.kernels.triton.experts.route_row import route_row
from phonograph.kernels.triton.experts.row_products import add_down_row, gate_up_row
from phonograph.kernels.triton.gemm.product import CLAMPED_SWIGLU, GELU, SILU

ROUTE = RowTile(4, 32, 1, 1)
TILES = ((RowTile(4, 64, 1, 1), RowTile(4, 32, 8, 1)), (RowTile(2, 16, 2, 1), RowTile(8, 8, 3, 1)))


def norm_of(x_1E: torch.Tensor) -> tuple[torch.Tensor, float, torch.Tensor]:
    return torch.randn(x_1E.shape[1]).to(x_1E), 1e-5, torch.full_like(x_1E, torch.nan)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("normed", [False, True])
def test_routes(name: str, normed: bool, gate: bool, device: torch.device) -> None:
    problem = Problem(1, ROUTINGS[name], device)
    problem.router_OE = problem.router_OE[: problem.routing.num_experts + gate]
    lists, k = problem.lists, problem.routing.num_pairs
    norm = norm_of(problem.x_TE) if normed else None
    arguments = problem.x_TE, problem.router_OE, problem.routing, lists, ROUTE
    route_row(*arguments, norm=norm, choice_bias_X=problem.bias_X)
    if norm is not None:
        wide = problem.x_TE.double()
        wide = wide * torch.rsqrt(wide.square().mean() + norm[1]) * norm[0].double()
        torch.testing.assert_close(norm[2].double(), wide, rtol=1e-5, atol=1e-6)
        problem.x_TE = norm[2]
    check_choice(problem, 1)
    assert lists.pairs_P.tolist() == [*range(k)] and int(lists.num_items) == k and not lists.arrived.any()
    assert lists.items_I3[:k].tolist() == [[one, pair, 1] for pair, one in enumerate(lists.experts_Tk[0].tolist())]
    # Padding has no pairs.
    route_row(*arguments, choice_bias_X=problem.bias_X, num_rows=torch.zeros(1, dtype=torch.int32, device=device))
    assert int(lists.num_items) == 0 and (lists.experts_Tk == -1).all()


def test_ties_and_logits_that_are_no_numbers(device: torch.device) -> None:
    problem = Problem(1, ROUTINGS["many"], device)
    # Sums of whole numbers are the same in any order.
    problem.router_OE[:] = (8 * problem.router_OE[0].abs()).round()
    for number in (1.0, torch.nan, torch.inf):
        problem.x_TE[0] = number
        route_row(problem.x_TE, problem.router_OE, problem.routing, problem.lists, ROUTE)
        assert problem.lists.experts_Tk[0].tolist() == [*range(problem.routing.top_k)]


def routed(
    routing: Routing, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ExpertLists, set[int]]:
    """Return a random row, the lists of its experts, and the experts that were not chosen."""
    problem = Problem(1, routing, device, width)
    x_1E, lists = problem.x_TE.to(dtype), problem.lists
    route_row(x_1E, problem.router_OE.to(dtype), routing, lists, ROUTE)
    return x_1E, lists, set(range(routing.num_matrices)) - set(lists.experts_Tk[0].tolist())


def check_row(
    x_1E: torch.Tensor,
    matrices: Sequence[torch.Tensor | Grouped],
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, ...],
    tiles: Sequence[RowTile | FewRowsTile],
    mode: int,
    lists: ExpertLists,
    limit: float,
) -> None:
    """Compare the products of matrices with those of the weights that they mean. A row of padding stays as it is."""
    inner = weights[0].shape[1] // 2
    inner_kI = torch.full((lists.experts_Tk.shape[1], inner), torch.nan, dtype=x_1E.dtype, device=x_1E.device)
    hidden = torch.randn(x_1E.shape).to(x_1E)
    wanted = hidden.double() + 0.5 * reference(x_1E, weights, biases, mode, lists, 1)
    flat = [None if bias is None else bias.flatten() for bias in biases]
    gate_up_row(x_1E, matrices[0], lists, tiles[0], inner_kI, flat[0], mode=mode)
    add_down_row(inner_kI, matrices[1], lists, tiles[1], hidden, flat[1], factor=0.5)
    assert (hidden.double() - wanted).norm() <= limit * wanted.norm()
    lists.experts_Tk.fill_(-1)
    before = hidden.clone()
    gate_up_row(x_1E, matrices[0], lists, tiles[0], inner_kI, flat[0], mode=mode)
    add_down_row(inner_kI, matrices[1], lists, tiles[1], hidden, flat[1])
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("mode", [SILU, GELU, CLAMPED_SWIGLU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", ["few", "many", "one", "shared"])
def test_products(
    name: str, tiles: tuple[RowTile, RowTile], dtype: torch.dtype, mode: int, device: torch.device
) -> None:
    """Experts that were not chosen are NaN. A row of padding stays as it is."""
    width, inner, routing = 50, 27, ROUTINGS[name]
    x_1E, lists, others = routed(routing, width, dtype, device)
    num_experts = routing.num_matrices
    clamped = mode == CLAMPED_SWIGLU
    gate_up = (torch.randn(num_experts, 2 * inner, width) * (1 + 5 * clamped) / width**0.5).to(device, dtype)
    down = (torch.randn(num_experts, width, inner) / inner**0.5).to(device, dtype)
    biases = tuple(torch.randn(num_experts, size).to(device, dtype) if clamped else None for size in (2 * inner, width))
    for expert in others:
        for tensor in (gate_up, down, *(bias for bias in biases if bias is not None)):
            tensor[expert] = torch.nan
    flat = gate_up.flatten(0, 1), down.flatten(0, 1)
    limit = 1e-5 if dtype == torch.float32 else 2e-3
    check_row(x_1E, flat, (gate_up, down), biases, tiles, mode, lists, limit)


@pytest.mark.parametrize("mode", [SILU, CLAMPED_SWIGLU])
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "tiles",
    [(FewRowsTile(8, 1, 2, 1), FewRowsTile(8, 2, 1, 2)), (FewRowsTile(16, 2, 1, 2), FewRowsTile(8, 1, 4, 1))],
)
@pytest.mark.parametrize("name", ["few", "many", "one", "shared"])
def test_products_of_fp4(
    name: str, tiles: tuple[FewRowsTile, FewRowsTile], dtype: torch.dtype, mode: int, device: torch.device
) -> None:
    """Inputs end within a unit, and outputs within a tile. Scales of experts that were not chosen are NaN."""
    width, inner, routing = 192, 320, ROUTINGS[name]
    x_1E, lists, others = routed(routing, width, dtype, device)
    num_experts = routing.num_matrices
    files = random_file(num_experts, 2 * inner, width), random_file(num_experts, width, inner)
    gate_up, down = (weight_for_gpu(file, device) for file in files)
    biases = tuple(
        torch.randn(num_experts, size).to(device, dtype) if mode == CLAMPED_SWIGLU else None
        for size in (2 * inner, width)
    )
    for expert in others:
        for weight, outputs in ((gate_up, 2 * inner), (down, width)):
            weight.scales_OG[expert * outputs : (expert + 1) * outputs] = -1
        for bias in biases:
            if bias is not None:
                bias[expert] = torch.nan
    meant_weights = tuple(meant(file).to(device) for file in files)
    limit = 4e-3 if dtype == torch.float16 else 2e-2
    check_row(x_1E, (gate_up, down), meant_weights, biases, tiles, mode, lists, limit)
