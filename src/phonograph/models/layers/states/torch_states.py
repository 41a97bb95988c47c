"""Parts of torch's operators for mixers with a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from phonograph.kernels.torch.state import gated_conv
from phonograph.models.layers.kernel_set import MixerPart, Step, Stream
from phonograph.models.layers.states.gated_delta_net import GatedDeltaNet
from phonograph.models.layers.states.mamba_mixer import MambaMixer
from phonograph.models.layers.states.short_conv import ShortConv
from phonograph.models.layers.states.state_mixer import StateMixer
from phonograph.models.layers.states.state_weights import StateWeights, norm_over_ranks

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
        normed_TE = kernels.normed(stream.hidden_TE, weights.input_norm) if stream.normed is None else stream.normed
        stream.normed = None
        mixed_TX = normed_TE.new_empty(len(normed_TE), output.spec.num_inputs)
        projected = [projection.product(normed_TE) for projection in projections]
        rows = states.query_start_loc, states.seq_lens, states.slots, states.checkpoints, *states.pool[weights.layer]
        spec: Any = weights.spec
        args = *spec.operands(projected, weights.others), *rows, mixed_TX
        if isinstance(spec, ShortConv):
            gated_conv.OPERATOR(*args)
        else:
            _OPERATORS[type(spec)](*args, list(spec.sizes), kernels.eps)
        norm_over_ranks(weights, mixed_TX, kernels.eps, kernels.ranks)
        if step.rows_P is not None:
            stream = Stream(stream.hidden_TE.index_select(0, step.rows_P), num_rows=step.num_kept)
            mixed_TX = mixed_TX.index_select(0, step.rows_P)
        return kernels.add(stream, mixed_TX, output, weights.output_norm)


class TorchBeside:
    """Attention and a mixer with a state that read the same normed rows."""

    def __init__(self, kernels: TorchKernels, attention: MixerPart, states: StateWeights) -> None:
        self.then: object = None
        self._kernels, self._norm_E = kernels, states.input_norm
        self._attention, self._states = attention, TorchStates(kernels, states)

    def __call__(self, stream: Stream, step: Step) -> Stream:
        normed_TE = self._kernels.normed(stream.hidden_TE, self._norm_E)
        stream.normed = normed_TE
        stream = self._attention(stream, step._replace(rows_P=None, num_kept=None))
        stream.normed = normed_TE
        return self._states(stream, step)


_OPERATORS: dict[type[StateMixer], Callable[..., None]] = {
    GatedDeltaNet: torch.ops.phonograph.gated_delta.default,
    MambaMixer: torch.ops.phonograph.mamba2.default,
}
"""Operators by the type of the mixer, but for short convolutions, which have no sizes."""
