"""Experts of transformers' modules: our products, with the experts that the module's router has chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from phonograph.kernels.torch.layers import ACTIVATIONS
from phonograph.models.layer_spec import ExpertActivation
from phonograph.models.layers import experts as torch_experts

_IMPLEMENTATION = "phonograph"
"""Name of our experts among the implementations of transformers."""
_ATTRIBUTE = "phonograph_experts"

ChosenExperts = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, ExpertActivation], torch.Tensor
]
"""The function `chosen_experts` of a kernel set."""


def set_experts(module: Any, chosen_experts: ChosenExperts | None = None) -> None:
    """Let experts of a module run by our kernels, and those that our kernels lack by transformers' products.

    Args:
        module: module of transformers.
        chosen_experts: function of a kernel set; None for that of the module's device.
    """
    found = _experts(module)
    if chosen_experts is None:
        chosen_experts = torch_experts.chosen_experts
        if module.device.type == "cuda":
            from phonograph.models.layers.triton_experts import chosen_experts  # It imports Triton.
    for one in found:
        if _why_not(one) is None:
            setattr(one, _ATTRIBUTE, (chosen_experts, _activation(one)))
    if found:
        module.set_experts_implementation(_IMPLEMENTATION)


def experts_notes(module: torch.nn.Module) -> tuple[str, ...]:
    """Return a note on the code that runs a module's experts; none if it has no experts."""
    reasons = dict.fromkeys(_why_not(one) for one in _experts(module))
    return tuple(
        "our kernels run its experts" if reason is None else f"transformers' products run its experts: {reason}"
        for reason in reasons
    )


def _experts(module: torch.nn.Module) -> list[Any]:
    """Return the experts that call the interface of transformers, which sets this attribute."""
    return [one for one in module.modules() if hasattr(one, "is_concatenated")]


def _why_not(experts: Any) -> str | None:
    """Return the reason why our kernels cannot run experts, or None."""
    if not experts.has_gate or experts.has_bias:
        return "they have biases" if experts.has_bias else "they have no gates"
    if experts.is_transposed or not experts.is_concatenated:
        return "their weights are " + ("transposed" if experts.is_transposed else "interleaved")
    return "our kernels have not their activation" if _activation(experts) is None else None


def _activation(experts: Any) -> ExpertActivation | None:
    """Return our activation that computes what experts do with gates and ups, which may be any code, or None."""
    gate_up_T2I = torch.empty(256, 4).uniform_(-16.0, 16.0, generator=torch.Generator().manual_seed(0))
    expected_TI = experts._apply_gate(gate_up_T2I.clone())
    for name in get_args(ExpertActivation):
        if name in ACTIVATIONS and torch.allclose(ACTIVATIONS[name](gate_up_T2I), expected_TI, rtol=1e-4, atol=1e-5):
            return name
    return None


def _run(experts: Any, hidden_TE: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> torch.Tensor:
    """Compute the experts of a step; the arguments are those of transformers' implementations."""
    if not hasattr(experts, _ATTRIBUTE):
        return grouped_mm_experts_forward(experts, hidden_TE, experts_Tk, weights_Tk)
    chosen_experts, activation = getattr(experts, _ATTRIBUTE)
    gate_up_XOE = experts.gate_up_proj
    x_TE = hidden_TE.to(gate_up_XOE.dtype)
    return chosen_experts(x_TE, experts_Tk, weights_Tk, gate_up_XOE, experts.down_proj, activation).to(hidden_TE.dtype)


ExpertsInterface.register(_IMPLEMENTATION, _run)
