"""Random routings of experts, and what they compute in float64."""

from __future__ import annotations

from typing import Any

import torch

from phonograph.kernels.routing import Routing
from phonograph.kernels.torch.route import route as torch_route
from phonograph.kernels.triton.experts.expert_lists import TILE, ExpertLists
from phonograph.kernels.triton.experts.route import route
from phonograph.kernels.triton.gemm.product import CLAMPED_SWIGLU, GELU, RELU2

ROUTINGS = {
    "few": Routing(5, 2),
    "one": Routing(4, 1, renormalised=False),
    "all": Routing(6, 6, scale=2.5),
    "many": Routing(40, 8),
    "groups": Routing(24, 5, sigmoid=True, scale=1.5, num_groups=4, top_groups=2),
    "odd groups": Routing(15, 4, sigmoid=True, num_groups=3, top_groups=2),
    "sigmoid": Routing(9, 3, sigmoid=True, renormalised=False),
    "shared": Routing(15, 4, sigmoid=True, scale=1.5, num_groups=3, top_groups=2, shared=True),
    "shared, few": Routing(4, 1, shared=True),
}


def make_lists(num_tokens: int, routing: Routing, device: torch.device) -> ExpertLists:
    """Return lists whose contents are NaN."""
    words = torch.full((ExpertLists.num_words(num_tokens, routing),), torch.nan, device=device)
    return ExpertLists.over(words, num_tokens, routing, ExpertLists.counters(num_tokens, device))


class Problem:
    """Rows, a router whose logits are apart, and lists."""

    def __init__(self, num_tokens: int, routing: Routing, device: torch.device, width: int = 50) -> None:
        self.routing, self.device = routing, device
        self.x_TE = torch.randn(num_tokens, width).to(device)
        self.router_OE = torch.randn(routing.num_experts + 1, width).to(device)
        self.lists = make_lists(num_tokens, routing, device)
        self.bias_X = torch.randn(routing.num_experts).to(device) * 0.1 if routing.sigmoid else None

    def route(self, block: int = TILE, **options: Any) -> None:
        options.setdefault("choice_bias_X", self.bias_X)
        route(self.x_TE, self.router_OE, self.routing, self.lists, block=block, **options)

    def check_lists(self, count: int, block: int) -> None:
        """Check that pairs and items are those of the experts of the first `count` tokens."""
        lists, k = self.lists, self.routing.num_pairs
        experts = lists.experts_Tk[:count].flatten().cpu()
        order = experts.sort(stable=True).indices
        assert lists.pairs_P[: count * k].tolist() == order.tolist()
        wanted: list[list[int]] = []
        start = 0
        for expert in range(self.routing.num_matrices):
            pairs = int((experts == expert).sum())
            wanted += [[expert, start + first, min(block, pairs - first)] for first in range(0, pairs, block)]
            start += pairs
        assert lists.items_I3[: int(lists.num_items)].tolist() == wanted
        assert not lists.arrived.any()


def check_choice(problem: Problem, count: int) -> None:
    lists, routing = problem.lists, problem.routing
    logits = (problem.x_TE.double() @ problem.router_OE.double().t()).float()
    experts, weights = torch_route(logits[:count, : routing.num_experts], routing, problem.bias_X)
    if routing.shared:
        experts = torch.nn.functional.pad(experts, (0, 1), value=routing.num_experts)
        gates = logits[:count, routing.num_experts :].sigmoid()
        weights = torch.cat((weights, gates if gates.numel() else torch.ones_like(weights[:, :1])), 1)
    assert lists.experts_Tk[:count].tolist() == experts.tolist()
    assert (lists.experts_Tk[count:] == -1).all()
    torch.testing.assert_close(lists.weights_Tk[:count], weights, rtol=1e-4, atol=1e-6)
    if logits.shape[1] > routing.num_experts:
        torch.testing.assert_close(lists.shared_T[:count], logits[:count, -1].sigmoid(), rtol=1e-4, atol=1e-6)


def activated(gate: torch.Tensor, up: torch.Tensor, mode: int) -> torch.Tensor:
    if mode == CLAMPED_SWIGLU:
        gate, up = gate.minimum(torch.tensor(7.0)), up.maximum(torch.tensor(-7.0)).minimum(torch.tensor(7.0))
        return (up + 1) * gate / (1 + (-1.702 * gate).exp())
    return up * (torch.nn.functional.gelu(gate, approximate="tanh") if mode == GELU else gate * gate.sigmoid())


def reference(
    x_TE: torch.Tensor,
    matrices: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, ...],
    mode: int,
    lists: ExpertLists,
    count: int,
) -> torch.Tensor:
    """Return the sums of the experts' results in float64, [count, E]; unchosen experts are not multiplied.

    Each of the matrices, and of the biases, has the experts in its first dimension.
    """
    (gate_up, down), (gate_up_bias, down_bias) = matrices, ((0.0,) * 99 if bias is None else bias for bias in biases)
    num_experts = gate_up.shape[0]
    total = torch.zeros(count, x_TE.shape[1], dtype=torch.float64, device=x_TE.device)
    for expert in range(num_experts):
        rows, ranks = (lists.experts_Tk[:count] == expert).nonzero(as_tuple=True)
        if len(rows):
            inner = x_TE[rows].double() @ gate_up[expert].double().t() + gate_up_bias[expert]
            result = (inner.relu().square() if mode == RELU2 else activated(*inner.chunk(2, -1), mode)) @ down[
                expert
            ].double().t() + down_bias[expert]
            total.index_add_(0, rows, result * lists.weights_Tk[rows, ranks].double().unsqueeze(1))
    return total
