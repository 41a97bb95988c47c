"""Parts of torch's operators for mixers with a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from phonograph.kernels.torch.state import short_conv
from phonograph.models.layers.kernel_set import Step, Stream
from phonograph.models.layers.states.gated_delta_net import DECAY, NORM, TAPS, TIME_BIAS, GatedDeltaNet
from phonograph.models.layers.states.short_convolution import CONV_TAPS, ShortConvolution
from phonograph.models.layers.states.state_mixer import StateMixer
from phonograph.models.layers.states.state_weights import StateWeights

if TYPE_CHECKING:
    from phonograph.models.layers.torch_parts import TorchKernels


class TorchGatedDelta:
    """Gated delta net of a layer."""

    def __init__(self, kernels: TorchKernels, weights: StateWeights) -> None:
        self.then: object = None
        self._kernels, self._weights = kernels, weights
        self._spec = cast("GatedDeltaNet", weights.spec)

    def __call__(self, stream: Stream, step: Step) -> Stream:
        kernels, weights, states = self._kernels, self._weights, step.states
        assert states is not None
        projection, gates, output = weights.linears
        normed_TE = kernels.normed(stream.hidden_TE, weights.input_norm)
        history_SPC, state_SHKV = states.pool[weights.layer]
        mixed_TX = normed_TE.new_empty(len(normed_TE), output.spec.num_inputs)
        torch.ops.phonograph.gated_delta.default(
            projection.product(normed_TE),
            gates.product(normed_TE),
            weights.others[TAPS].squeeze(1),
            *(weights.others[name] for name in (DECAY, TIME_BIAS, NORM)),
            states.query_start_loc,
            states.seq_lens,
            states.slots,
            states.checkpoints,
            history_SPC,
            state_SHKV,
            mixed_TX,
            list(self._spec.sizes),
            kernels.eps,
        )
        return _added(kernels, weights, stream, step, mixed_TX)


class TorchShortConv:
    """Short convolution of a layer."""

    def __init__(self, kernels: TorchKernels, weights: StateWeights) -> None:
        self.then: object = None
        self._kernels, self._weights = kernels, weights

    def __call__(self, stream: Stream, step: Step) -> Stream:
        kernels, weights, states = self._kernels, self._weights, step.states
        assert states is not None
        normed_TE = kernels.normed(stream.hidden_TE, weights.input_norm)
        (history_SPC,) = states.pool[weights.layer]
        mixed_TC = normed_TE.new_empty(len(normed_TE), weights.linears[1].spec.num_inputs)
        short_conv.OPERATOR(
            weights.linears[0].product(normed_TE),
            weights.others[CONV_TAPS].squeeze(1),
            states.query_start_loc,
            states.seq_lens,
            states.slots,
            states.checkpoints,
            history_SPC,
            mixed_TC,
        )
        return _added(kernels, weights, stream, step, mixed_TC)


def _added(kernels: TorchKernels, weights: StateWeights, stream: Stream, step: Step, mixed_TX: torch.Tensor) -> Stream:
    """Add the output of a mixer to the stream, of the rows that a step keeps."""
    if step.rows_P is not None:
        stream = Stream(stream.hidden_TE.index_select(0, step.rows_P), num_rows=step.num_kept)
        mixed_TX = mixed_TX.index_select(0, step.rows_P)
    return kernels.add(stream, mixed_TX, weights.linears[-1], weights.output_norm)


TORCH_STATES: dict[type[StateMixer], type[TorchGatedDelta | TorchShortConv]] = {
    GatedDeltaNet: TorchGatedDelta,
    ShortConvolution: TorchShortConv,
}
"""Parts by the type of the mixer."""
