"""Parts of Triton kernels for mixers with a state."""

from __future__ import annotations

from typing import Any, cast

from phonograph.kernels.triton.state.gated_delta import gated_delta
from phonograph.models.layers.kernel_set import Step, Stream
from phonograph.models.layers.states.gated_delta_net import DECAY, NORM, TAPS, TIME_BIAS, GatedDeltaNet
from phonograph.models.layers.states.state_mixer import StateMixer
from phonograph.models.layers.states.state_weights import StateWeights
from phonograph.models.layers.triton_stream import NormedInput, StreamKernels
from phonograph.models.layers.workspace import mixer_widths


class TritonGatedDelta:
    """Gated delta net of a layer."""

    def __init__(self, kernels: StreamKernels, weights: StateWeights) -> None:
        self.then: Any = None
        # Two products read the normed rows.
        self.begin = NormedInput(weights.input_norm, None)
        self._projection, self._gates, self._output = (kernels.bind(linear) for linear in weights.linears)
        self._kernels, self._weights = kernels, weights
        self._spec = cast("GatedDeltaNet", weights.spec)

    def __call__(self, stream: Stream, step: Step) -> Stream:
        kernels, weights, spec, states = self._kernels, self._weights, self._spec, step.states
        assert states is not None
        num_tokens = len(stream.hidden_TE)
        memory_TF, mixed_TX = kernels.workspace.attention_memory(num_tokens, mixer_widths(spec))
        widths = spec.projection.num_outputs, spec.gates.num_outputs, spec.scratch
        parts = memory_TF.view(-1).split([num_tokens * width for width in widths])
        projected_TF, gates_TB, conv_TC = (
            part.view(num_tokens, width) for part, width in zip(parts, widths, strict=True)
        )
        history_SPC, state_SHKV = states.pool[weights.layer]
        self._projection.store(stream.normed, projected_TF)
        self._gates.store(stream.normed, gates_TB)
        gated_delta(
            projected_TF,
            gates_TB,
            weights.others[TAPS].squeeze(1),
            weights.others[DECAY],
            weights.others[TIME_BIAS],
            weights.others[NORM],
            states.query_start_loc,
            states.seq_lens,
            states.slots,
            states.checkpoints,
            history_SPC,
            state_SHKV,
            mixed_TX,
            spec.sizes,
            kernels.eps,
            conv_TC,
        )
        if step.rows_P is not None:
            stream, mixed_TX = kernels.keep_rows(stream, mixed_TX, step.rows_P, step.num_kept)
        then = None if self.then is None else self.then.begin
        return kernels.add(stream, mixed_TX, self._output, weights.output_norm, then)


TRITON_STATES: dict[type[StateMixer], type[TritonGatedDelta]] = {GatedDeltaNet: TritonGatedDelta}
"""Parts by the type of the mixer."""
