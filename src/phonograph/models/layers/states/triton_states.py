"""Parts of Triton kernels for mixers with a state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from phonograph.kernels.triton.state.causal_conv import short_conv
from phonograph.kernels.triton.state.gated_delta import gated_delta
from phonograph.kernels.triton.state.mamba2 import mamba2
from phonograph.models.layers.kernel_set import MixerPart, Step, Stream
from phonograph.models.layers.states.gated_delta_net import GatedDeltaNet
from phonograph.models.layers.states.mamba_mixer import MambaMixer
from phonograph.models.layers.states.short_conv import ShortConv
from phonograph.models.layers.states.state_mixer import StateMixer
from phonograph.models.layers.states.state_weights import StateWeights, norm_over_ranks
from phonograph.models.layers.triton_stream import NormedInput, StreamKernels
from phonograph.models.layers.workspace import mixer_widths


class TritonStates:
    """Mixer of a layer with a state, by the kernels of its type."""

    def __init__(self, kernels: StreamKernels, weights: StateWeights) -> None:
        self.then: Any = None
        *self._projections, self._output = (kernels.bind(linear) for linear in weights.linears)
        # One product can norm its rows itself; several read the same normed rows.
        only = self._projections[0] if len(self._projections) == 1 else None
        self.begin = NormedInput(weights.input_norm, only)
        self._kernels, self._weights = kernels, weights

    def __call__(self, stream: Stream, step: Step) -> Stream:
        kernels, weights, states = self._kernels, self._weights, step.states
        spec: Any = weights.spec
        assert states is not None
        num_tokens = len(stream.hidden_TE)
        memory_TF, mixed_TX = kernels.workspace.attention_memory(num_tokens, mixer_widths(spec))
        widths = *(matrix.num_outputs for matrix in spec.matrices[:-1]), spec.scratch
        parts = memory_TF.view(-1).split([num_tokens * width for width in widths])
        *projected, scratch = (part.view(num_tokens, width) for part, width in zip(parts, widths, strict=True))
        if self.begin.product is not None:
            kernels.project(stream, self.begin, projected[0])
        else:
            for product, rows_TF in zip(self._projections, projected, strict=True):
                product.store(stream.normed, rows_TF)
        rows = states.query_start_loc, states.seq_lens, states.slots, states.checkpoints, *states.pool[weights.layer]
        args: list[Any] = [*spec.operands(projected, weights.others), *rows, mixed_TX]
        if isinstance(spec, ShortConv):
            short_conv(*args, single=states.single)
        else:
            known = {"early": states.early} if isinstance(spec, GatedDeltaNet) else {}
            _KERNELS[type(spec)](*args, spec.sizes, kernels.eps, scratch, single=states.single, **known)
        norm_over_ranks(weights, mixed_TX, kernels.eps, kernels.ranks)
        if step.rows_P is not None:
            stream, mixed_TX = kernels.keep_rows(stream, mixed_TX, step.rows_P, step.num_kept)
        then = None if self.then is None else self.then.begin
        return kernels.add(stream, mixed_TX, self._output, weights.output_norm, then)


class TritonBeside:
    """Attention and a mixer with a state that read the same normed rows."""

    def __init__(self, kernels: StreamKernels, attention: MixerPart, states: StateWeights) -> None:
        self.then: Any = None
        self._kept_TE = kernels.workspace.kept_TE
        self.begin = NormedInput(states.input_norm, None)
        self._attention, self._states = attention, TritonStates(kernels, replace(states, input_norm=None))

    def __call__(self, stream: Stream, step: Step) -> Stream:
        normed_TE, self._states.then = stream.normed, self.then
        if self._kept_TE.numel():
            assert isinstance(normed_TE, torch.Tensor)
            normed_TE = self._kept_TE[: len(normed_TE)].copy_(normed_TE)
        stream = self._attention(stream, step._replace(rows_P=None, num_kept=None))
        stream.normed = normed_TE
        return self._states(stream, step)


_KERNELS: dict[type[StateMixer], Callable[..., None]] = {GatedDeltaNet: gated_delta, MambaMixer: mamba2}
"""Kernels by the type of the mixer, but for short convolutions, which have no sizes and no scratch."""
