"""Parts of torch's operators for mixers with a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from phonograph.kernels.torch.state import gated_conv
from phonograph.models.layers.kernel_set import Step, Stream
from phonograph.models.layers.states import gated_delta_net, mamba_mixer, short_conv
from phonograph.models.layers.states.gated_delta_net import GatedDeltaNet
from phonograph.models.layers.states.mamba_mixer import MambaMixer
from phonograph.models.layers.states.short_conv import ShortConv
from phonograph.models.layers.states.state_mixer import StateMixer
from phonograph.models.layers.states.state_weights import StateWeights

if TYPE_CHECKING:
    from phonograph.models.layers.torch_parts import TorchKernels


class TorchStates:
    """Mixer of a layer with a state, by the operator of its type."""

    def __init__(self, kernels: TorchKernels, weights: StateWeights) -> None:
        self.then: object = None
        self._kernels, self._weights = kernels, weights

    def __call__(self, stream: Stream, step: Step) -> Stream:
        kernels, weights, states = self._kernels, self._weights, step.states
        assert states is not None
        *projections, output = weights.linears
        normed_TE = kernels.normed(stream.hidden_TE, weights.input_norm)
        mixed_TX = normed_TE.new_empty(len(normed_TE), output.spec.num_inputs)
        projected = [projection.product(normed_TE) for projection in projections]
        rows = states.query_start_loc, states.seq_lens, states.slots, states.checkpoints, *states.pool[weights.layer]
        _OPERATORS[type(weights.spec)](weights, projected, rows, mixed_TX, kernels.eps)
        if step.rows_P is not None:
            stream = Stream(stream.hidden_TE.index_select(0, step.rows_P), num_rows=step.num_kept)
            mixed_TX = mixed_TX.index_select(0, step.rows_P)
        return kernels.add(stream, mixed_TX, output, weights.output_norm)


_Tensors = Sequence[torch.Tensor]


def _gated_delta(
    weights: StateWeights, projected: _Tensors, rows: _Tensors, mixed_TX: torch.Tensor, eps: torch.Tensor
) -> None:
    spec: Any = weights.spec
    taps, *others = (weights.others[name] for name in gated_delta_net.OTHERS)
    torch.ops.phonograph.gated_delta.default(
        *projected, taps.squeeze(1), *others, *rows, mixed_TX, list(spec.sizes), eps
    )


def _mix_short(
    weights: StateWeights, projected: _Tensors, rows: _Tensors, mixed_TX: torch.Tensor, eps: torch.Tensor
) -> None:
    taps, bias = weights.others[short_conv.TAPS].squeeze(1), weights.others.get(short_conv.BIAS)
    gated_conv.OPERATOR(*projected, taps, bias, *rows, mixed_TX)


def _mamba2(
    weights: StateWeights, projected: _Tensors, rows: _Tensors, mixed_TX: torch.Tensor, eps: torch.Tensor
) -> None:
    spec: Any = weights.spec
    operands = mamba_mixer.operands(weights.others)
    torch.ops.phonograph.mamba2.default(*projected, *operands, *rows, mixed_TX, list(spec.sizes), eps)


_OPERATORS: dict[type[StateMixer], Callable[..., None]] = {
    GatedDeltaNet: _gated_delta,
    ShortConv: _mix_short,
    MambaMixer: _mamba2,
}
"""Operators by the type of the mixer."""
