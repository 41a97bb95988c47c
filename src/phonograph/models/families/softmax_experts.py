"""Routing of the families whose routers are a softmax over all experts."""

from __future__ import annotations

from phonograph.errors import ModelError
from phonograph.kernels.routing import Routing
from phonograph.models.config_fields import TRAINING
from phonograph.models.families.family import Settings

EXPERT_LOSS = {"router_aux_loss_coef": TRAINING, "router_jitter_noise": TRAINING}
"""Fields without effect."""


def softmax_routing(settings: Settings, field: str, alias: str | None = None, *, renormalised: bool) -> Routing:
    """Return a softmax over all experts, whose number `field` has, or `alias` if the file has that.

    Raises:
        ModelError: a token has more experts than there are.
    """
    name = field if alias is None or settings[alias] is None else alias
    num_experts, top_k = settings[name], settings["num_experts_per_tok"]
    if top_k > num_experts:
        raise ModelError(f"num_experts_per_tok={top_k} must be at most {name}={num_experts}")
    return Routing(num_experts, top_k, renormalised=renormalised)
