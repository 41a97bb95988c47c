"""Distance of a model's routers from a choice by rounding."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

LEAST_GAP = 1e-3
"""Gap above which two implementations in float32 choose the same experts."""


@contextmanager
def router_gaps(model: nn.Module) -> Generator[Callable[[], float]]:
    """Yield a function that returns the least gap of the passes inside the context, infinity without a router.

    The gap of a token is the difference between the last chosen and the first other expert in the numbers that are
    ranked: logits, or sigmoid scores with their bias. So is that of groups.
    """
    gaps: list[float] = []

    def see(router: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        scores_TX = nn.functional.linear(inputs[0].flatten(0, -2).float(), router.weight.float())
        if hasattr(router, "e_score_correction_bias"):
            scores_TX = scores_TX.sigmoid() + router.e_score_correction_bias
            by_group_TGS = scores_TX.unflatten(1, (router.num_group, -1))
            groups_TG = by_group_TGS.topk(2).values.sum(-1)
            gaps.append(_gap(groups_TG, router.topk_group))
            chosen_TG = groups_TG >= groups_TG.topk(router.topk_group).values[:, -1:]
            scores_TX = by_group_TGS.masked_fill(~chosen_TG[..., None], -torch.inf).flatten(1)
        gaps.append(_gap(scores_TX, router.top_k))

    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    handles = [router.register_forward_pre_hook(see) for router in routers]
    for router in (module for module in model.modules() if type(module).__name__ == "Gemma4TextRouter"):
        k = router.config.top_k_experts
        handles.append(router.proj.register_forward_hook(lambda _, inputs, out, k=k: gaps.append(_gap(out, k))))
    try:
        yield lambda: min(gaps, default=torch.inf)
    finally:
        for handle in handles:
            handle.remove()


def _gap(scores_TX: torch.Tensor, k: int) -> float:
    """Return the least difference between the scores at ranks k and k + 1."""
    if k >= scores_TX.shape[1]:
        return torch.inf
    first, second = scores_TX.topk(k + 1).values[:, k - 1 :].unbind(1)
    return float((first - second).min())
