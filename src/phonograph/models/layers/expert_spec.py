"""Specification of a layer's experts as plain values, next to the dense feed-forward of `models.layer_spec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from phonograph.errors import UnsupportedModelError
from phonograph.kernels.routing import Routing
from phonograph.models.layer_spec import ExpertActivation, LayerFeedForward, LayerSpec
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.quantization.grouped_weight import GroupedScheme
from phonograph.models.quantization.scheme import Scheme
from phonograph.models.weights.expert_tensors import ExpertTensors


@dataclass(frozen=True, kw_only=True)
class LayerExperts:
    """Feed-forward of a layer by experts: the weighted sum of those of a token's experts, and of a shared expert.

    Attributes:
        routing: rule that chooses a token's experts.
        router: matrix of the X logits. With a gate of the shared expert it has one more output, the logit of the gate,
            whose sigmoid is the weight of the shared expert.
        choice_bias: name of the tensor, float32 [X], that is added to the scores for the choice; None for none.
        gate_up: matrix of the experts' gates and ups.
        down: matrix of the experts' outputs.
        activation: of the experts' gates and ups.
        shared: feed-forward of every token next to that of its experts; None for none. It may have norms of its own:
            of the stream before it, in place of `input_norm`, and of its result.
        input_norm: norm of the stream before it; None for none.
        output_norm: norm of the output before it is added to the stream; None for none.
        router_norm: name of the weights of a norm of the stream before the router, in place of `input_norm`; None for
            none.
        expert_scale: name of the tensor, [X], with the factor of each expert's weight; None for none.
        sum_norm: norm of the sum of a token's experts, before that of a shared expert is added; None for none.
    """

    routing: Routing
    router: LayerMatrix
    choice_bias: str | None
    gate_up: LayerMatrix
    down: LayerMatrix
    activation: ExpertActivation
    shared: LayerFeedForward | None
    input_norm: str | None
    output_norm: str | None
    router_norm: str | None = None
    expert_scale: str | None = None
    sum_norm: str | None = None

    @property
    def matrices(self) -> tuple[LayerMatrix, ...]:
        """Matrices in the order of the products."""
        shared = () if self.shared is None else self.shared.matrices
        return self.router, self.gate_up, self.down, *shared

    @property
    def shared_gate(self) -> bool:
        """True if the shared expert has a gate."""
        return self.router.num_outputs > self.routing.num_experts

    @property
    def gpu_routing(self) -> Routing:
        """Routing on a GPU: a shared expert with the size, format and input of the others is one of them."""
        shared = self.shared
        alike = (
            shared is not None
            and (shared.activation, *shared.norms, self.sum_norm) == (self.activation, None, None, None)
            and _alike(shared.gate_up, self.gate_up)
            and _alike(shared.down, self.down)
        )
        return self.routing._replace(shared=alike)

    @property
    def other_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of tensors of a checkpoint that are neither projections nor norms, by name in the layer."""
        num_experts, hidden_size = self.routing.num_experts, self.router.num_inputs
        shapes = ((self.choice_bias, num_experts), (self.router_norm, hidden_size), (self.expert_scale, num_experts))
        return {name: (size,) for name, size in shapes if name is not None}

    @property
    def norms(self) -> tuple[str | None, ...]:
        """Names of the norms."""
        shared = () if self.shared is None else self.shared.norms
        return self.input_norm, self.sum_norm, *shared, self.output_norm

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> LayerExperts:
        """Return the experts with the weight format of each projection, by its name in the layer.

        Raises:
            UnsupportedModelError: the format has an order of inputs, which each expert has of its own; or a tensor of
                the format, which has all experts, has no row for each output.
        """
        gate_up, down = self.gate_up.with_schemes(scheme_of), self.down.with_schemes(scheme_of)
        for matrix in (gate_up, down):
            if isinstance(matrix.scheme, GroupedScheme) and matrix.scheme.ordered:
                raise UnsupportedModelError(
                    f"{matrix.module} is in {matrix.scheme.name}, with an order for each expert, which is not "
                    "supported; quantize the model without desc_act (actorder)"
                )
            _check_fused(matrix)
        return replace(
            self,
            gate_up=gate_up,
            down=down,
            shared=None if self.shared is None else self.shared.with_schemes(scheme_of),
        )


def _alike(shared: LayerMatrix, experts: LayerMatrix) -> bool:
    """Return True if the matrix of a shared expert has the size and format of the experts', without biases."""
    sizes = [(one.shape, one.scheme, one.bias) for one in (shared, experts)]
    return sizes[0] == sizes[1] and not shared.bias


def _check_fused(matrix: LayerMatrix) -> None:
    """Check that tensors of all experts have a row for each output, which is what loading takes apart."""
    scheme = matrix.scheme
    if matrix.fused is None or scheme is None:
        return
    for name, part in matrix.projections():
        stored = scheme.stored(part.num_outputs, matrix.num_inputs)
        if any(one.shape[:1] != (part.num_outputs,) for one in stored.values()):
            raise UnsupportedModelError(
                f"{name} has all experts in one tensor, which is not supported in {scheme.name}; leave these modules "
                "in 16 bits (ignore, modules_to_not_convert)"
            )


class ExpertNames(NamedTuple):
    """Names of a layer's experts in a checkpoint.

    Attributes:
        module: module of the router and the experts.
        router: name of the router in the module.
        experts: module of the experts in the module; empty if they are next to the router.
        gate, up, down: projections of an expert; the gate is empty for experts without gates. Tensors of all experts
            have gates and ups under the name of the gate.
        shared: name of the shared expert in the module; None if it is outside, under the name that it has.
        shared_gate: name of its gate.
    """

    module: str = "mlp"
    router: str = "gate"
    experts: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str | None = "shared_expert"
    shared_gate: str = "shared_expert_gate"


EXPERT_NAMES = ExpertNames()


def with_experts(
    layer: LayerSpec,
    routing: Routing,
    intermediate_size: int,
    *,
    names: ExpertNames = EXPERT_NAMES,
    activation: ExpertActivation = "silu",
    bias: bool = False,
    fused: tuple[ExpertTensors, ExpertTensors] | None = None,
    shared: LayerFeedForward | None = None,
    shared_gate: bool = False,
    choice_bias: bool = False,
) -> LayerSpec:
    """Return a layer with experts in place of its dense feed-forward, and that one's norms.

    Args:
        layer: dense layer.
        routing: rule that chooses a token's experts.
        intermediate_size: of an expert.
        names: names in a checkpoint.
        activation: of the experts' gates and ups.
        bias: the router and the experts have biases.
        fused: layouts of the tensors of gates and ups and of outputs; None if each expert has tensors of its own.
        shared: dense feed-forward that becomes the shared expert; None for none.
        shared_gate: the shared expert has a gate.
        choice_bias: a checkpoint has a bias for the choice.
    """
    dense, num_experts = layer.feed_forward, routing.num_experts
    assert isinstance(dense, LayerFeedForward)
    hidden_size = dense.gate_up.num_inputs
    gates = (MatrixPart(names.router, num_experts), *((MatrixPart(names.shared_gate, 1),) if shared_gate else ()))
    gate_up = tuple(MatrixPart(name, intermediate_size) for name in (names.gate, names.up) if name)
    if fused is not None:
        gate_up = (MatrixPart(names.gate, 2 * intermediate_size),)
    gate_up_tensors, down_tensors = fused or (None, None)
    down = (MatrixPart(names.down, hidden_size),)
    experts = ".".join(filter(None, (names.module, names.experts)))
    if shared is not None:
        module = shared.gate_up.module if names.shared is None else f"{names.module}.{names.shared}"
        shared = replace(
            shared,
            gate_up=replace(shared.gate_up, name="shared gate and up", module=module),
            down=replace(shared.down, name="shared down", module=module),
            input_norm=None,
            output_norm=None,
        )
    return replace(
        layer,
        feed_forward=LayerExperts(
            routing=routing,
            router=LayerMatrix("router", names.module, gates, hidden_size, bias=bias, quantizable=False),
            choice_bias=f"{names.module}.{names.router}.e_score_correction_bias" if choice_bias else None,
            gate_up=LayerMatrix(
                "experts' gate and up",
                experts,
                gate_up,
                hidden_size,
                bias=bias,
                gated=bool(names.gate),
                num_experts=num_experts,
                fused=gate_up_tensors,
            ),
            down=LayerMatrix(
                "experts' down",
                experts,
                down,
                intermediate_size,
                bias=bias,
                num_experts=num_experts,
                fused=down_tensors,
            ),
            activation=activation,
            shared=shared,
            input_norm=dense.input_norm,
            output_norm=dense.output_norm,
        ),
    )


STACKED = "gate_up_proj"
"""Tensor of the gates and ups of all experts of a layer, in files that have one."""


def with_stacked_experts(layer: LayerSpec) -> LayerSpec:
    """Return a layer whose experts have one tensor of gates and ups, [X, 2I, E], and one of outputs, [X, E, I]."""
    experts = layer.feed_forward
    assert isinstance(experts, LayerExperts)
    if experts.gate_up.fused is not None:
        return layer
    tensors = ExpertTensors(experts.routing.num_experts, bare=True)
    parts = (MatrixPart(STACKED, experts.gate_up.expert_outputs, experts.gate_up.scheme),)
    gate_up = replace(experts.gate_up, parts=parts, fused=tensors)
    _check_fused(gate_up)
    return replace(layer, feed_forward=replace(experts, gate_up=gate_up, down=replace(experts.down, fused=tensors)))
