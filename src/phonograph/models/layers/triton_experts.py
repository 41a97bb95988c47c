"""Experts of a layer on a GPU, over the static memory of the workspace.

Shapes: T tokens, k experts of a token (with a shared one that is like them), P = T * k pairs, E hidden size, I
intermediate size of an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from phonograph.kernels.ranks import Ranks
from phonograph.kernels.routing import Routing
from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.elementwise import encoder_rows, layers
from phonograph.kernels.triton.experts.count_pairs import count_pairs
from phonograph.kernels.triton.experts.expert_lists import ExpertLists
from phonograph.kernels.triton.experts.expert_plan import expert_config, row_config
from phonograph.kernels.triton.experts.expert_products import down_products, fitted, gate_up_products
from phonograph.kernels.triton.experts.expert_results import add_results
from phonograph.kernels.triton.experts.join_results import join_results
from phonograph.kernels.triton.experts.list_experts import list_experts
from phonograph.kernels.triton.experts.route import route
from phonograph.kernels.triton.experts.route_row import route_row
from phonograph.kernels.triton.experts.row_products import add_down_row, gate_up_row
from phonograph.kernels.triton.gemm.bound_product import BoundProduct
from phonograph.kernels.triton.gemm.product import EXPERT_MODES
from phonograph.models.layer_spec import ExpertActivation
from phonograph.models.layers.part_weights import ExpertsWeights
from phonograph.models.layers.workspace import Workspace, expert_memory

RowNorm = tuple[torch.Tensor, float, torch.Tensor]
"""Weights and epsilon of a norm, and memory [1, E] that receives the normed row."""


def chosen_experts(
    x_TE: torch.Tensor,
    experts_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_up_XOE: torch.Tensor,
    down_XEI: torch.Tensor,
    activation: ExpertActivation,
) -> torch.Tensor:
    """Return the weighted sum of experts that were chosen before, in memory of torch.

    The arguments are those of `phonograph.models.layers.experts.chosen_experts`.
    """
    (num_tokens, top_k), (num_experts, _, inner_size) = experts_Tk.shape, down_XEI.shape
    routing = Routing(num_experts, top_k)
    config, pairs = expert_config(num_tokens, routing), num_tokens * top_k
    words = x_TE.new_empty(ExpertLists.num_words(num_tokens, routing), dtype=torch.float32)
    lists = ExpertLists.over(words, num_tokens, routing, words[:0].view(torch.int32))
    list_experts(experts_Tk, weights_Tk, routing, lists, block=config.block)
    inner_PI, results_PE = x_TE.new_empty(pairs, inner_size), x_TE.new_empty(pairs, x_TE.shape[1])
    mode, out_TE = EXPERT_MODES[activation], torch.empty_like(x_TE)
    gate_up_products(x_TE, gate_up_XOE.flatten(0, 1), lists, routing, config, inner_PI, mode=mode)
    down_products(inner_PI, down_XEI.flatten(0, 1), lists, routing, config, results_PE)
    add_results(results_PE, out_TE, top_k, added=False)
    return out_TE


class _Memory(NamedTuple):
    """Slices of a step of T tokens in the workspace."""

    inner_PI: torch.Tensor
    results_PE: torch.Tensor
    gate_up: torch.Tensor
    shared_TE: torch.Tensor
    routed_TE: torch.Tensor
    beside_TE: torch.Tensor


class ExpertKernels:
    """Launches of a layer's experts.

    Args:
        weights: of the experts.
        workspace: intermediates of the largest step.
        shared: products of the shared expert; None if there is none, or if it is one of the experts.
        eps: epsilon of the norms.
        load_X: int64, counters of each expert's pairs; None launches no kernel that counts.
        ranks: ranks that have a part of each expert; None for whole experts.
    """

    def __init__(
        self,
        weights: ExpertsWeights,
        workspace: Workspace,
        shared: tuple[BoundProduct, BoundProduct] | None,
        eps: float,
        load_X: torch.Tensor | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self._weights, self._spec, self._shared, self._eps = weights, weights.spec, shared, eps
        self._load_X = load_X
        self._space, self._routing = workspace.shared, weights.spec.gpu_routing
        assert workspace.arrived is not None and self._routing.shared == (weights.joint is not None)
        both = weights.joint or (weights.gate_up.weight, weights.down.weight)
        self._gate_up, self._down = both[0].operand, both[1].operand
        self._is_fp4 = isinstance(self._gate_up, Grouped) and self._gate_up.is_fp4()
        sizes = weights.gate_up.spec.num_inputs, weights.down.spec.num_inputs
        self._tiles = row_config(*sizes, fp4=self._is_fp4)
        self._join_norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if weights.sum_norm is not None:
            assert weights.shared is not None and weights.shared.output_norm is not None
            assert weights.output_norm is not None
            self._join_norms = weights.sum_norm, weights.shared.output_norm, weights.output_norm
        self._lists = ExpertLists.over(workspace.routing, len(workspace.hidden_TE), self._routing, workspace.arrived)

    def run(
        self, hidden_TE: torch.Tensor, x_TE: torch.Tensor, num_rows: torch.Tensor | None, norm: RowNorm | None = None
    ) -> None:
        """Compute the results of all rows' experts, and of the shared expert, for `add`.

        Args:
            hidden_TE: rows of the stream.
            x_TE: the same, normed; not read with `norm`.
            num_rows: int32 [1], number of rows that are not padding; None for all.
            norm: norm of one row, which was not normed before.
        """
        weights, routing, lists = self._weights, self._routing, self._lists
        gate_up, down = self._gate_up, self._down
        config = fitted(expert_config(len(x_TE), routing, fp4=self._is_fp4), gate_up, down)
        memory = self._memory(len(x_TE))
        routed_TE = beside_TE = x_TE
        if norm is not None:
            routed_TE, x_TE, beside_TE = hidden_TE, norm[2], norm[2]
        elif self._join_norms is not None:
            assert weights.router_norm is not None and weights.shared is not None
            routed_TE, beside_TE = memory.routed_TE, memory.beside_TE
            second = weights.shared.input_norm, beside_TE
            layers.rms_norm(hidden_TE, weights.router_norm, self._eps, routed_TE, second)
        self._route(routed_TE, config.block, num_rows, norm)
        mode = EXPERT_MODES[self._spec.activation]
        gate_up_products(x_TE, gate_up, lists, routing, config, memory.inner_PI, weights.gate_up.bias_O, mode=mode)
        down_products(memory.inner_PI, down, lists, routing, config, memory.results_PE, weights.down.bias_O)
        if self._shared is not None and weights.shared is not None:
            self._run_shared(*self._shared, beside_TE, memory)

    def add_row(
        self, hidden_1E: torch.Tensor, norm: RowNorm, num_rows: torch.Tensor | None, factor: float = 1.0
    ) -> None:
        """Compute the experts of one row, with weights that `takes_row` names, and add them to the stream.

        Args:
            hidden_1E: row of the stream.
            norm: of the row, before the experts.
            num_rows: int32 [1], 0 for padding; None if it is none.
            factor: of what is added.
        """
        weights, memory = self._weights, self._memory(1)
        gate_up, down = self._gate_up, self._down
        self._route(hidden_1E, 1, num_rows, norm)
        inner_kI, lists, tiles, mode = memory.inner_PI, self._lists, self._tiles, EXPERT_MODES[self._spec.activation]
        gate_up_row(norm[2], gate_up, lists, tiles.gate_up, inner_kI, weights.gate_up.bias_O, mode=mode)
        add_down_row(inner_kI, down, lists, tiles.down, hidden_1E, weights.down.bias_O, factor=factor)

    def _route(self, x_TE: torch.Tensor, block: int, num_rows: torch.Tensor | None, norm: RowNorm | None) -> None:
        """Choose the experts of rows; one row may have its norm here."""
        weights, router = self._weights, self._weights.router.weight.operand
        assert isinstance(router, torch.Tensor)
        fixed: dict[str, torch.Tensor | None] = {
            "router_bias_O": weights.router.bias_O,
            "choice_bias_X": weights.choice_bias,
            "expert_scale_X": weights.expert_scale,
            "num_rows": num_rows,
        }
        routing, lists = self._routing, self._lists
        if len(x_TE) == 1:
            route_row(x_TE, router, routing, lists, self._tiles.route, norm=norm, **fixed)
        else:
            route(x_TE, router, routing, lists, block=block, **fixed)
        if self._load_X is not None:
            count_pairs(lists.experts_Tk[: len(x_TE)], self._load_X, shared=routing.shared)

    def add(
        self,
        hidden_TE: torch.Tensor,
        num_rows: torch.Tensor | None,
        *,
        added: bool = True,
        factor: float = 1.0,
        norm: tuple[torch.Tensor, float, torch.Tensor] | None = None,
    ) -> None:
        """Add the results of `run` to `hidden`; the arguments are those of `add_results`."""
        memory = self._memory(len(hidden_TE))
        shared = None
        if self._shared is not None and self._spec.sum_norm is None:
            shared = memory.shared_TE, self._lists.shared_T if self._spec.shared_gate else None
        add_results(
            memory.results_PE,
            hidden_TE,
            self._routing.num_pairs,
            added=added,
            factor=factor,
            num_rows=num_rows,
            shared=shared,
            norm=norm,
        )

    def join(
        self,
        hidden_TE: torch.Tensor,
        sums_TE: torch.Tensor,
        num_rows: torch.Tensor | None,
        *,
        factor: float,
        norm: tuple[torch.Tensor, float, torch.Tensor] | None,
    ) -> None:
        """Add the results of `run` to the stream, where they and those of the shared expert have norms.

        Args:
            hidden_TE: rows of the stream.
            sums_TE: memory of the sums of experts, for ranks.
            num_rows: int32 [1], number of rows that are not padding; None for all.
            factor: of what is added.
            norm: of the part that follows, as of `add_results`.
        """
        assert self._join_norms is not None
        memory = self._memory(len(hidden_TE))
        results = memory.results_PE
        if self._ranks is not None:
            self.add(sums_TE, num_rows, added=False)
            results = sums_TE
            for part_TE in (results, memory.shared_TE):
                self._ranks.sum(part_TE)
        join_results(
            results,
            memory.shared_TE,
            hidden_TE,
            self._join_norms,
            self._eps,
            factor=factor,
            scalar=self._weights.scalar,
            num_rows=num_rows,
            norm=None if norm is None else (norm[0], norm[2]),
        )

    def _run_shared(self, gate_up: BoundProduct, down: BoundProduct, x_TE: torch.Tensor, memory: _Memory) -> None:
        shared = self._spec.shared
        assert shared is not None
        gate_up_T2I = memory.gate_up
        inner_TI = gate_up_T2I[:, : shared.down.num_inputs]
        if not shared.gate_up.gated:
            gate_up.store(x_TE, inner_TI)
            encoder_rows.activate(inner_TI, inner_TI, shared.activation)
        elif gate_up.plan(len(x_TE)).gates_apart:
            gate_up.store(x_TE, gate_up_T2I)
            layers.ACTIVATIONS[shared.activation](gate_up_T2I, inner_TI)
        else:
            gate_up.store(x_TE, inner_TI)
        down.store(inner_TI, memory.shared_TE)

    def _memory(self, num_tokens: int) -> _Memory:
        start = 0
        views: list[torch.Tensor] = []
        for rows, width in expert_memory(self._spec):
            count = num_tokens * rows
            views.append(self._space[start : start + count * width].view(count, width))
            start += count * width
        return _Memory(*views)
