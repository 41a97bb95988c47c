"""Kernels of experts at the sizes of models, in bfloat16 on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from phonograph.kernels.routing import Routing
from phonograph.kernels.torch.route import route as torch_route
from phonograph.kernels.triton.experts.expert_lists import ExpertLists
from phonograph.kernels.triton.experts.expert_plan import expert_config
from phonograph.kernels.triton.experts.expert_products import down_products, gate_up_products
from phonograph.kernels.triton.experts.expert_results import add_results
from phonograph.kernels.triton.experts.route import route

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MODELS = {"qwen3-30b-a3b": (Routing(128, 8), 2048, 768), "gpt-oss-20b": (Routing(32, 4), 2880, 2880)}
LEAST_GAP = 1e-3


@pytest.mark.parametrize("num_tokens", [1, 8, 32, 128, 256, 2048])
@pytest.mark.parametrize("name", MODELS)
def test_layer(name: str, num_tokens: int) -> None:
    """The last seventh of the tokens is padding of NaN. Memory is NaN, and so are experts that no token has."""
    routing, hidden, inner = MODELS[name]
    count = num_tokens - num_tokens // 7
    pairs, num_experts = num_tokens * routing.top_k, routing.num_experts

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, router, residual = drawn(num_tokens, hidden), drawn(num_experts, hidden) / hidden**0.5, drawn(num_tokens, hidden)
    x[count:] = torch.nan
    real = torch.tensor([count], dtype=torch.int32, device="cuda")
    words = torch.full((ExpertLists.num_words(num_tokens, routing),), torch.nan, device="cuda")
    lists = ExpertLists.over(words, num_tokens, routing, ExpertLists.counters(num_tokens, torch.device("cuda")))
    config = expert_config(num_tokens, routing)
    route(x, router, routing, lists, block=config.block, num_rows=real)
    logits = (x[:count].double() @ router.double().t()).float()
    experts, weights = torch_route(logits, routing)
    ordered = logits.sort(-1, descending=True).values[:, : routing.top_k + 1]
    clear = (ordered[:, :-1] - ordered[:, 1:]).amin(-1) > LEAST_GAP
    assert clear.float().mean() > 0.5 or num_tokens < 8
    assert torch.equal(lists.experts_Tk[:count][clear].long(), experts[clear])
    torch.testing.assert_close(lists.weights_Tk[:count][clear], weights[clear], rtol=1e-4, atol=1e-6)
    assert (lists.experts_Tk[count:] == -1).all() and not lists.arrived.any()

    gate_up = drawn(num_experts, 2 * inner, hidden) / hidden**0.5
    down = drawn(num_experts, hidden, inner) / inner**0.5
    chosen = lists.experts_Tk[:count].unique().tolist()
    others = [expert for expert in range(num_experts) if expert not in chosen]
    gate_up[others], down[others] = torch.nan, torch.nan
    wanted = residual.double()
    for expert in chosen:
        rows, ranks = (lists.experts_Tk[:count] == expert).nonzero(as_tuple=True)
        gate, up = (x[rows].double() @ gate_up[expert].double().t()).chunk(2, -1)
        result = (gate * gate.sigmoid() * up) @ down[expert].double().t()
        wanted.index_add_(0, rows, result * lists.weights_Tk[rows, ranks].double().unsqueeze(1))
    inner_rows = torch.full((pairs, inner), torch.nan, dtype=torch.bfloat16, device="cuda")
    results = torch.full((pairs, hidden), torch.nan, dtype=torch.bfloat16, device="cuda")
    sums: list[torch.Tensor] = []
    for _ in range(2):
        found = residual.clone()
        gate_up_products(x, gate_up.flatten(0, 1), lists, routing, config, inner_rows)
        down_products(inner_rows, down.flatten(0, 1), lists, routing, config, results)
        add_results(results, found, routing.top_k, num_rows=real)
        sums.append(found)
    assert torch.equal(*sums)
    assert (found.double() - wanted).norm() <= 6e-3 * wanted.norm()
