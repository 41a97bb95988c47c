"""Kernels of experts against float64: random routings, odd sizes, padding, and memory without contents is NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_problem import ROUTINGS, Problem, check_choice, make_lists, reference

from phonograph.kernels.routing import Routing
from phonograph.kernels.torch.route import route as torch_route
from phonograph.kernels.triton.experts import expert_products, expert_results
from phonograph.kernels.triton.experts import route as route_module
from phonograph.kernels.triton.experts.count_pairs import count_pairs
from phonograph.kernels.triton.experts.expert_lists import EXPERTS, LARGE_TILE, TILE, ExpertLists
from phonograph.kernels.triton.experts.expert_plan import ExpertConfig, ExpertTile, expert_config
from phonograph.kernels.triton.experts.join_results import join_results
from phonograph.kernels.triton.experts.list_experts import list_experts
from phonograph.kernels.triton.experts.route import route
from phonograph.kernels.triton.gemm.product import CLAMPED_SWIGLU, GELU, RELU2, SILU
from phonograph.kernels.triton.gemm.product_plan import rows_class


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("num_tokens", "count"), [(1, 1), (7, 7), (TILE + 3, TILE), (50, 33)])
def test_routes(name: str, num_tokens: int, count: int, device: torch.device) -> None:
    problem = Problem(num_tokens, ROUTINGS[name], device)
    problem.x_TE[count:] = torch.nan
    problem.route(num_rows=torch.tensor([count], dtype=torch.int32, device=device))
    check_choice(problem, count)
    problem.check_lists(count, TILE)


@pytest.mark.parametrize(("num_tokens", "count"), [(1, 1), (2, 0), (16, 16), (257, 257), (300, 299)])
def test_routes_to_a_shared_expert_without_a_gate(num_tokens: int, count: int, device: torch.device) -> None:
    problem = Problem(num_tokens, ROUTINGS["shared"], device)
    problem.router_OE = problem.router_OE[:-1]
    problem.route(num_rows=torch.tensor([count], dtype=torch.int32, device=device))
    check_choice(problem, count)
    problem.check_lists(count, TILE)


@pytest.mark.parametrize("name", ["many", "shared"])
@pytest.mark.parametrize(("num_tokens", "count"), [(1, 1), (7, 0), (70, 33)])
def test_counts_of_pairs(name: str, num_tokens: int, count: int, device: torch.device) -> None:
    """Padding and a shared expert count nothing. Counts of several steps add up, beyond 32 bits too."""
    routing = ROUTINGS[name]
    problem = Problem(num_tokens, routing, device)
    problem.route(num_rows=torch.tensor([count], dtype=torch.int32, device=device))
    before = torch.arange(routing.num_experts + 1, device=device) + 2**33
    memory = before.clone()
    load_X = memory[:-1]
    for _ in range(2):
        count_pairs(problem.lists.experts_Tk, load_X, shared=routing.shared)
    chosen = problem.lists.experts_Tk[:count, : routing.top_k].flatten().long()
    assert memory[-1] == before[-1]
    assert (load_X - before[:-1]).tolist() == (2 * torch.bincount(chosen, minlength=routing.num_experts)).tolist()


@pytest.mark.parametrize("sigmoid", [False, True])
def test_factors_of_logits_and_of_experts(sigmoid: bool, device: torch.device) -> None:
    """Logits are multiplied before the scores, and weights by a factor of each expert after they are renormalised."""
    problem = Problem(TILE + 3, Routing(7, 3, sigmoid=sigmoid, logit_factor=0.2, scale=1.5), device)
    scale_X = torch.rand(7, device=device) + 0.5
    problem.route(choice_bias_X=None, expert_scale_X=scale_X)
    logits = (problem.x_TE.double() @ problem.router_OE.double().t())[:, :7] * 0.2
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    weights, experts = scores.topk(3)
    weights = weights / weights.sum(-1, keepdim=True) * scale_X[experts] * 1.5
    assert problem.lists.experts_Tk.tolist() == experts.tolist()
    torch.testing.assert_close(problem.lists.weights_Tk.double(), weights, rtol=1e-4, atol=1e-6)
    found = torch_route(logits.float() / 0.2, problem.routing, None, scale_X)
    assert found[0].tolist() == experts.tolist()
    torch.testing.assert_close(found[1].double(), weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "num_tokens", "block"),
    [
        *((name, 3 * LARGE_TILE + 5, 32) for name in ("few", "many", "groups", "odd groups", "shared")),
        *((name, 8 * LARGE_TILE + 5, 256) for name in ("all", "shared, few")),
    ],
)
def test_two_launches(
    name: str, num_tokens: int, block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phonograph.kernels.triton.experts.route.ONE_LAUNCH_TOKENS", 4)
    problem = Problem(num_tokens, ROUTINGS[name], device)
    problem.route(block=block)
    check_choice(problem, num_tokens)
    problem.check_lists(num_tokens, block)


@pytest.mark.parametrize(
    ("routing", "gate", "num_tokens", "count", "width", "dtype"),
    [
        (Routing(6, 3, shared=True), True, 16, 13, 50, torch.float32),
        (Routing(256, 8, shared=True), True, 8, 7, 2100, torch.float16),
        (Routing(384, 8), False, 5, 5, 136, torch.float32),
        (Routing(512, 10, shared=True), False, 13, 12, 136, torch.float32),
        (Routing(32, 4), False, 257, 257, 50, torch.float32),
        (Routing(60, 4, shared=True), True, 300, 299, 2100, torch.float16),
        (Routing(128, 8), False, 2049, 2049, 300, torch.float32),
        (Routing(256, 8, shared=True), True, 513, 300, 520, torch.float32),
    ],
)
def test_equal_logits(
    routing: Routing, gate: bool, num_tokens: int, count: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Sums of small whole numbers are exact, so that experts and lists must be equal, those of equal logits too."""
    problem = Problem(num_tokens, routing, device, width)
    problem.x_TE, problem.router_OE = ((2 * numbers).round().to(dtype) for numbers in (problem.x_TE, problem.router_OE))
    problem.router_OE = problem.router_OE[: routing.num_experts + gate] / 64
    logits = problem.x_TE[:count].double() @ problem.router_OE.double().t()
    problem.x_TE[count:] = torch.nan
    block = 8 if num_tokens < 17 else 256
    problem.route(block=block, num_rows=torch.tensor([count], dtype=torch.int32, device=device))
    sorted_TX = logits[:, : routing.num_experts].sort(descending=True, stable=True)
    k, lists = routing.top_k, problem.lists
    assert lists.experts_Tk[:count, :k].tolist() == sorted_TX.indices[:, :k].tolist()
    assert (lists.experts_Tk[:count, k:] == routing.num_experts).all() and (lists.experts_Tk[count:] == -1).all()
    weights = sorted_TX.values[:, :k].softmax(-1)
    torch.testing.assert_close(lists.weights_Tk[:count, :k].double(), weights, rtol=1e-4, atol=1e-6)
    if gate:
        torch.testing.assert_close(lists.shared_T[:count].double(), logits[:, -1].sigmoid(), rtol=1e-4, atol=1e-6)
    problem.check_lists(count, block)


@pytest.mark.parametrize(("name", "num_tokens", "block"), [("few", 1, 8), ("all", 32, 16), ("many", 101, 32)])
def test_lists_of_chosen_experts(name: str, num_tokens: int, block: int, device: torch.device) -> None:
    """Experts and weights may be rows of wider tensors."""
    problem = Problem(num_tokens, ROUTINGS[name], device)
    experts_TX = torch.rand(num_tokens, problem.routing.num_experts, device=device).argsort(-1)
    experts_Tk = experts_TX[:, : problem.routing.top_k]
    weights_Tk = torch.rand(num_tokens, 99, device=device, dtype=torch.float16)[:, : problem.routing.top_k]
    list_experts(experts_Tk, weights_Tk, problem.routing, problem.lists, block=block)
    assert problem.lists.experts_Tk.tolist() == experts_Tk.tolist()
    assert problem.lists.weights_Tk.tolist() == weights_Tk.tolist()
    problem.check_lists(num_tokens, block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 8), (7, 3), (5, 1)])
def test_results_that_are_joined(
    num_tokens: int, top_k: int, dtype: torch.dtype, device: torch.device, width: int = 90
) -> None:
    """Against a reference in float64 that rounds where separate launches would; padding keeps the stream's rows."""
    rng = torch.Generator().manual_seed(num_tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(device, dtype)

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()).to(dtype).double()

    real = max(1, num_tokens - 2)
    results, other, hidden = draw(num_tokens * top_k, width), draw(num_tokens, width), draw(num_tokens, width)
    results[real * top_k :], other[real:] = torch.nan, torch.nan
    norms, scalar, weight = (draw(width), draw(width), draw(width)), draw(1), draw(width)
    total = normed(results.view(num_tokens, top_k, width).double().sum(1).to(dtype), norms[0])
    added = normed((total + normed(other, norms[1])).to(dtype), norms[2])
    added[real:] = 0
    wanted = ((hidden.double() + 0.5 * added).to(dtype).double() * scalar.double()).to(dtype).double()
    # With one result a row, the norm of the stream may take its place.
    out = results if top_k == 1 else torch.full_like(hidden, torch.nan)
    num_rows = torch.tensor([real], dtype=torch.int32, device=device)
    join_results(results, other, hidden, norms, 1e-5, factor=0.5, scalar=scalar, num_rows=num_rows, norm=(weight, out))
    limit = 1e-5 if dtype == torch.float32 else 4e-3
    for found, expected in ((hidden, wanted), (out, normed(hidden, weight))):
        assert (found.double() - expected).norm() <= limit * expected.norm()


def test_memory_of_routers_without_a_gate(device: torch.device) -> None:
    """Their outputs may be in fewer parts than those with a gate, so that inputs are in more of them."""
    routing = Routing(EXPERTS, 4)
    problem = Problem(10 * LARGE_TILE, routing, device, width=2048)
    words = torch.full((ExpertLists.num_words(10 * LARGE_TILE, routing) + 1024,), torch.nan, device=device)
    problem.lists = ExpertLists.over(words[:-1024], 10 * LARGE_TILE, routing, problem.lists.arrived)
    problem.router_OE = problem.router_OE[:EXPERTS]
    problem.route(block=32)
    problem.check_lists(10 * LARGE_TILE, 32)
    assert words[-1024:].isnan().all()


def test_lists_begin_where_16_bytes_may_be_read() -> None:
    """Otherwise kernels would be compiled for each number of tokens."""
    for tokens in (1, 3, 17, 250):
        routing = Routing(5, 3)
        words = torch.zeros(ExpertLists.num_words(tokens, routing))
        lists = ExpertLists.over(words, tokens, routing, torch.zeros(1))
        assert all((part.data_ptr() - words.data_ptr()) % 16 == 0 for part in lists[:-1])


@pytest.mark.parametrize("name", ["many", "odd groups"])
def test_ties_and_logits_that_are_no_numbers(name: str, device: torch.device) -> None:
    """Equal scores go to the lower expert. Without any number, the choice is still of different experts."""
    problem = Problem(5, ROUTINGS[name], device)
    routing = problem.routing
    # Sums of whole numbers are the same in any order.
    for numbers in (problem.x_TE, problem.router_OE):
        numbers.copy_((8 * numbers).round())
    problem.router_OE[: routing.num_experts] = problem.router_OE[0]
    problem.x_TE[1] = torch.nan
    problem.x_TE[2] = torch.inf
    problem.route(choice_bias_X=None)
    lowest = [*range(routing.top_k)]
    assert problem.lists.experts_Tk.tolist() == [lowest] * 5
    problem.check_lists(5, TILE)
    # One expert is not a number, and comes last.
    problem.router_OE[0] = torch.nan
    problem.x_TE[:] = torch.randn(5, 50)
    problem.route(choice_bias_X=None)
    assert (problem.lists.experts_Tk != 0).all()
    assert all(len(set(row)) == routing.top_k for row in problem.lists.experts_Tk.tolist())


TILES = (
    ExpertConfig(8, ExpertTile(16, 32, 1, 1), ExpertTile(32, 16, 1, 1)),
    ExpertConfig(32, ExpertTile(32, 16, 1, 1), ExpertTile(16, 32, 1, 1)),
    ExpertConfig(256, ExpertTile(16, 32, 1, 1), ExpertTile(32, 64, 1, 1), tail=16),
)


@pytest.mark.parametrize("mode", [SILU, GELU, CLAMPED_SWIGLU, RELU2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("config", TILES)
@pytest.mark.parametrize(
    ("name", "num_tokens", "count"), [("few", 1, 1), ("many", 9, 7), ("one", 70, 70), ("few", 5, 0), ("shared", 21, 17)]
)
def test_products(
    name: str, num_tokens: int, count: int, config: ExpertConfig, dtype: torch.dtype, device: torch.device, mode: int
) -> None:
    """Scratch, padding rows, and experts without tokens are NaN; the norm that follows is computed.

    Experts with the clamped activation have biases, and many of their gates and ups are beyond the limits.
    """
    width, inner, routing = 50, 27, ROUTINGS[name]
    problem = Problem(num_tokens, routing, device, width)
    x_TE = problem.x_TE = problem.x_TE.to(dtype)
    problem.router_OE = problem.router_OE.to(dtype)
    x_TE[count:] = torch.nan
    real = torch.tensor([count], dtype=torch.int32, device=device)
    problem.route(block=config.block, num_rows=real)
    lists, num_experts = problem.lists, routing.num_matrices
    clamped, parts = mode == CLAMPED_SWIGLU, 1 if mode == RELU2 else 2
    gate_up = (torch.randn(num_experts, parts * inner, width) * (1 + 5 * clamped) / width**0.5).to(device, dtype)
    down = (torch.randn(num_experts, width, inner) / inner**0.5).to(device, dtype)
    biases = tuple(torch.randn(num_experts, size).to(device, dtype) if clamped else None for size in (2 * inner, width))
    chosen = set(lists.experts_Tk[:count].flatten().tolist())
    for expert in set(range(num_experts)) - chosen:
        for tensor in (gate_up, down, *(bias for bias in biases if bias is not None)):
            tensor[expert] = torch.nan
    pairs = num_tokens * routing.num_pairs
    inner_PI = torch.full((pairs, inner), torch.nan, dtype=dtype, device=device)
    results_PE = torch.full((pairs, width), torch.nan, dtype=dtype, device=device)
    flat = [None if bias is None else bias.flatten() for bias in biases]
    expert_products.gate_up_products(x_TE, gate_up.flatten(0, 1), lists, routing, config, inner_PI, flat[0], mode=mode)
    expert_products.down_products(inner_PI, down.flatten(0, 1), lists, routing, config, results_PE, flat[1])
    hidden = torch.randn(num_tokens, width).to(device, dtype)
    shared = torch.randn(num_tokens, width).to(device, dtype)
    shared[count:] = torch.nan
    weight = torch.randn(width).to(device, torch.float32 if clamped else dtype)
    normed = torch.full_like(hidden, torch.nan)
    wanted = hidden.double()
    wanted[:count] += 0.5 * reference(x_TE, (gate_up, down), biases, mode, lists, count)
    wanted[:count] += 0.5 * shared[:count].double() * lists.shared_T[:count].double().unsqueeze(1)
    expert_results.add_results(
        results_PE,
        hidden,
        routing.num_pairs,
        factor=0.5,
        num_rows=real,
        shared=(shared, lists.shared_T),
        norm=(weight, 1e-5, normed),
    )
    limit = 1e-5 if dtype == torch.float32 else 4e-3
    assert (hidden.double() - wanted).norm() <= limit * wanted.norm()
    wanted = hidden.double() * torch.rsqrt(hidden.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert (normed.double() - wanted).norm() <= limit * wanted.norm()


def test_no_number_is_hidden_by_limits(device: torch.device) -> None:
    """Each gate or up that is not a number makes a result that is none."""
    routing, width, inner = ROUTINGS["all"], 50, 27
    problem = Problem(2, routing, device, width)
    problem.route()
    gate_up = torch.randn(routing.num_experts, 2 * inner, width, device=device)
    gate_up[2, 5], gate_up[4, inner + 11] = torch.nan, torch.nan
    inner_PI = torch.zeros(2 * routing.top_k, inner, device=device)
    expert_products.gate_up_products(
        problem.x_TE, gate_up.flatten(0, 1), problem.lists, routing, TILES[0], inner_PI, mode=CLAMPED_SWIGLU
    )
    # Each expert has both tokens.
    assert inner_PI.isnan().nonzero().tolist() == [[4, 5], [5, 5], [8, 11], [9, 11]]


class Recorded:
    """A kernel that notes its constants instead of running."""

    def __init__(self, seen: list[tuple[Any, ...]]) -> None:
        self._seen = seen

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self._seen.append(tuple(sorted(constants.items())))


def test_kernels_go_by_the_magnitude_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes that are compiled before serving have each magnitude once (`kernel_shapes`)."""
    seen: list[tuple[Any, ...]] = []
    for module, name in (
        (route_module, "_route_kernel"),
        (route_module, "_list_kernel"),
        (expert_products, "_expert_kernel"),
    ):
        monkeypatch.setattr(module, name, Recorded(seen))
    routing = ROUTINGS["many"]
    x_TE, out = torch.zeros(2048, 2048), torch.zeros(2048 * routing.top_k, 16)
    router, gate_up = torch.zeros(40, 2048), torch.zeros(40 * 32, 2048)
    lists = make_lists(2048, routing, torch.device("cpu"))
    by_class: dict[int, set[tuple[Any, ...]]] = {}
    for tokens in range(1, 2049, 5):
        seen.clear()
        config = expert_config(tokens, routing)
        route(x_TE[:tokens], router, routing, lists, block=config.block)
        inner = out[: tokens * routing.top_k]
        expert_products.gate_up_products(x_TE[:tokens], gate_up, lists, routing, config, inner)
        by_class.setdefault(rows_class(tokens), set()).add(tuple(seen))
    assert len(by_class) == 10 and all(len(kernels) == 1 for kernels in by_class.values())
    assert len({kernel for kernels in by_class.values() for kernel in kernels}) > 3
