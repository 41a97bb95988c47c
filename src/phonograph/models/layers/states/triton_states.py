"""Parts of Triton kernels for mixers with a state."""

from __future__ import annotations

from typing import Any, cast

import torch

from phonograph.kernels.triton.state.causal_conv import short_conv
from phonograph.kernels.triton.state.gated_delta import gated_delta
from phonograph.models.layers.kernel_set import Step, StepStates, Stream
from phonograph.models.layers.states import short_conv as short
from phonograph.models.layers.states.gated_delta_net import DECAY, NORM, TAPS, TIME_BIAS, GatedDeltaNet
from phonograph.models.layers.states.short_conv import ShortConv
from phonograph.models.layers.states.state_mixer import StateMixer
from phonograph.models.layers.states.state_weights import StateWeights
from phonograph.models.layers.triton_stream import NormedInput, StreamKernels
from phonograph.models.layers.workspace import mixer_widths


class _TritonMixer:
    """Products of a layer's mixer, between which a subclass mixes."""

    def __init__(self, kernels: StreamKernels, weights: StateWeights) -> None:
        self.then: Any = None
        # Several products may read the normed rows.
        self.begin = NormedInput(weights.input_norm, None)
        *self._projections, self._output = (kernels.bind(linear) for linear in weights.linears)
        self._kernels, self._weights = kernels, weights

    def __call__(self, stream: Stream, step: Step) -> Stream:
        kernels, weights, spec, states = self._kernels, self._weights, self._weights.spec, step.states
        assert states is not None
        num_tokens = len(stream.hidden_TE)
        memory_TF, mixed_TX = kernels.workspace.attention_memory(num_tokens, mixer_widths(spec))
        widths = *(matrix.num_outputs for matrix in spec.matrices[:-1]), spec.scratch
        parts = memory_TF.view(-1).split([num_tokens * width for width in widths])
        *projected, scratch = (part.view(num_tokens, width) for part, width in zip(parts, widths, strict=True))
        for product, rows_TF in zip(self._projections, projected, strict=True):
            product.store(stream.normed, rows_TF)
        self._mix(projected, scratch, states, mixed_TX)
        if step.rows_P is not None:
            stream, mixed_TX = kernels.keep_rows(stream, mixed_TX, step.rows_P, step.num_kept)
        then = None if self.then is None else self.then.begin
        return kernels.add(stream, mixed_TX, self._output, weights.output_norm, then)

    def _mix(
        self, projected: list[torch.Tensor], scratch: torch.Tensor, states: StepStates, mixed_TX: torch.Tensor
    ) -> None:
        raise NotImplementedError


class TritonGatedDelta(_TritonMixer):
    """Gated delta net of a layer."""

    def _mix(
        self, projected: list[torch.Tensor], scratch: torch.Tensor, states: StepStates, mixed_TX: torch.Tensor
    ) -> None:
        weights = self._weights
        gated_delta(
            *projected,
            weights.others[TAPS].squeeze(1),
            *(weights.others[name] for name in (DECAY, TIME_BIAS, NORM)),
            states.query_start_loc,
            states.seq_lens,
            states.slots,
            states.checkpoints,
            *states.pool[weights.layer],
            mixed_TX,
            cast("GatedDeltaNet", weights.spec).sizes,
            self._kernels.eps,
            scratch,
        )


class TritonShortConv(_TritonMixer):
    """Short convolution of a layer."""

    def _mix(
        self, projected: list[torch.Tensor], scratch: torch.Tensor, states: StepStates, mixed_TX: torch.Tensor
    ) -> None:
        weights = self._weights
        short_conv(
            *projected,
            weights.others[short.TAPS].squeeze(1),
            weights.others.get(short.BIAS),
            states.query_start_loc,
            states.seq_lens,
            states.slots,
            states.checkpoints,
            *states.pool[weights.layer],
            mixed_TX,
        )


TRITON_STATES: dict[type[StateMixer], type[_TritonMixer]] = {
    GatedDeltaNet: TritonGatedDelta,
    ShortConv: TritonShortConv,
}
"""Parts by the type of the mixer."""
