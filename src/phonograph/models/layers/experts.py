"""Experts of a layer as one operator of torch, for CPUs and as the reference for others.

The tape records the operator as one call and runs it at each replay, so that it may read on the host which experts have
tokens. Weights have any format, which no operator takes as an argument; the operator finds them by a handle.

Shapes: T tokens, X experts, k experts of a token, E hidden size.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from phonograph.kernels.torch.expert_products import FeedForward, add_experts
from phonograph.kernels.torch.layers import ACTIVATIONS, UNGATED
from phonograph.kernels.torch.route import route
from phonograph.models.layer_spec import ExpertActivation
from phonograph.models.layers.linear import Linear
from phonograph.models.layers.part_weights import ExpertsWeights

_library = torch.library.Library("phonograph", "FRAGMENT")
_library.define("experts(Tensor x, Tensor logits, Tensor? num_rows, Tensor handle, Tensor(a!) out) -> ()")
_library.define(
    "chosen_experts(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor down, str activation, "
    "Tensor(a!) out) -> ()"
)


class Experts:
    """Experts of a layer, without their shared expert.

    Args:
        weights: of the experts.
        load_X: int64, counters of each expert's pairs, or None.
    """

    def __init__(self, weights: ExpertsWeights, load_X: torch.Tensor | None = None) -> None:
        device = weights.gate_up.weight.device
        self._handle = torch.zeros(1, dtype=torch.int64, device=device)
        # The dictionary holds the handle, so that no other tensor gets its address.
        _weights[self._handle.data_ptr()] = self._handle, weights, load_X
        weakref.finalize(self, _weights.pop, self._handle.data_ptr())

    def __call__(
        self, x_TE: torch.Tensor, logits_TX: torch.Tensor, num_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, a new [T, E].

        Args:
            x_TE: input of the experts.
            logits_TX: logits of the router; columns after the X first are not read.
            num_rows: int32 [1], number of rows that are not padding; None for all. The result of padding is 0.
        """
        out_TE = torch.empty_like(x_TE)
        torch.ops.phonograph.experts.default(x_TE, logits_TX, num_rows, self._handle, out_TE)
        return out_TE


def _experts(
    x_TE: torch.Tensor,
    logits_TX: torch.Tensor,
    num_rows: torch.Tensor | None,
    handle: torch.Tensor,
    out_TE: torch.Tensor,
) -> None:
    _, weights, load_X = _weights[handle.data_ptr()]
    routing, count = weights.spec.routing, len(x_TE) if num_rows is None else int(num_rows)
    logits_TX = logits_TX[:count, : routing.num_experts]
    experts_Tk, weights_Tk = route(logits_TX, routing, weights.choice_bias, weights.expert_scale)
    activation = (ACTIVATIONS if weights.spec.gate_up.gated else UNGATED)[weights.spec.activation]
    if load_X is not None:
        load_X[: routing.num_experts] += torch.bincount(experts_Tk.flatten(), minlength=routing.num_experts)

    def feed_forward(expert: int, rows_NE: torch.Tensor) -> torch.Tensor:
        return _product(weights.down, expert, activation(_product(weights.gate_up, expert, rows_NE)))

    _sum_experts(x_TE[:count], experts_Tk, weights_Tk, routing.num_experts, feed_forward, out_TE)


def chosen_experts(
    x_TE: torch.Tensor,
    experts_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_up_XOE: torch.Tensor,
    down_XEI: torch.Tensor,
    activation: ExpertActivation,
) -> torch.Tensor:
    """Return the weighted sum of experts that were chosen before, a new [T, E].

    Args:
        x_TE: input of the experts.
        experts_Tk: int64, different experts of each token.
        weights_Tk: weights of their results.
        gate_up_XOE: of each expert the gates, then the ups.
        down_XEI: matrices of the outputs.
        activation: of gates and ups.
    """
    out_TE = torch.empty_like(x_TE)
    torch.ops.phonograph.chosen_experts.default(x_TE, experts_Tk, weights_Tk, gate_up_XOE, down_XEI, activation, out_TE)
    return out_TE


def _chosen_experts(
    x_TE: torch.Tensor,
    experts_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_up_XOE: torch.Tensor,
    down_XEI: torch.Tensor,
    activation: str,
    out_TE: torch.Tensor,
) -> None:
    def feed_forward(expert: int, rows_NE: torch.Tensor) -> torch.Tensor:
        inner_NI = ACTIVATIONS[activation](torch.mm(rows_NE, gate_up_XOE[expert].t()))
        return torch.mm(inner_NI, down_XEI[expert].t())

    _sum_experts(x_TE, experts_Tk, weights_Tk.float(), len(down_XEI), feed_forward, out_TE)


def _sum_experts(
    x_NE: torch.Tensor,
    experts_Nk: torch.Tensor,
    weights_Nk: torch.Tensor,
    num_experts: int,
    feed_forward: FeedForward,
    out_TE: torch.Tensor,
) -> None:
    """Write the weighted sum of each row's experts, and 0 after the last row."""
    total_TE = torch.zeros(out_TE.shape, dtype=torch.float32, device=out_TE.device)
    add_experts(x_NE, experts_Nk, weights_Nk, num_experts, feed_forward, total_TE)
    out_TE.copy_(total_TE)


def _product(linear: Linear, expert: int, x_NI: torch.Tensor) -> torch.Tensor:
    """Return the product of an expert's matrix."""
    outputs = linear.spec.expert_outputs
    first, last = expert * outputs, (expert + 1) * outputs
    bias_O = None if linear.bias_O is None else linear.bias_O[first:last]
    return linear.weight.rows(first, last).product(x_NI, bias_O)


_weights: dict[int, tuple[torch.Tensor, ExpertsWeights, torch.Tensor | None]] = {}
"""By the address of the handle."""
_operators: dict[str, Any] = {"experts": _experts, "chosen_experts": _chosen_experts}
for _name, _function in _operators.items():
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _function, _device)
    # The tape's replay, which is on a CPU, calls the function without torch's dispatch.
    getattr(torch.ops.phonograph, _name).default.python_function = _function
