"""The computation of one step, for capture and for eager runs.

It reads its inputs from static tensors only. Calls differ in the shape (padded tokens, rows of logits) and in whether
the capture is split at attention; attention metadata is set beforehand. On a GPU the step needs no host work between
its head and its tail: a kernel derives the inputs from one upload and the device state, and the sampled tokens stay on
the device for the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from phonograph.attention.backend import AttentionLayer
from phonograph.attention.metadata import CommonMetadata
from phonograph.graphs.modes import GraphKey
from phonograph.models.layers.kernel_set import StepStates
from phonograph.models.modules.step_model import StepModel
from phonograph.models.transformer import Transformer
from phonograph.runner.group_builder import GroupBuilder
from phonograph.runner.step_attention import StepAttention
from phonograph.runner.step_inputs import Inputs


class StepOutputs(NamedTuple):
    """Tensors that a step leaves. The next run or replay overwrites them.

    hidden: before the final norm; [N, E] if the last layer computes only rows with logits, else [T, E]
    logits: [L, V] of the rows that have logits; of a model that generates nothing the pooler's rows, float32 [R, F],
        or [T, F] of all tokens
    tokens: int32 [L]; -1 if no logit was finite, less than -1 if the row samples nothing here. Empty if the host
        samples.
    counts: int32 [N] of the requests, see `accept`; empty where the step verifies no drafts.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor


class Passes(Protocol):
    """Passes of a draft model behind the sampling of a step."""

    model: Transformer
    layers: Sequence[AttentionLayer]

    def build(self, commons: Sequence[CommonMetadata], key: GraphKey | None) -> None:
        """Build the attention metadata of the passes; see `StepProgram.build`."""
        ...

    def run(self, tokens_L: torch.Tensor, *, num_tokens: int, num_reqs: int, pieces: bool) -> None:
        """Make drafts for the next step.

        Args:
            tokens_L: int32, sample of each row of logits.
            num_tokens: padded tokens of the step.
            num_reqs: padded requests.
            pieces: split the capture at each call of attention.
        """
        ...


class StepProgram:
    """Attention schedule, decoder layers, logits of the rows that need them, sampling, and drafts for the next step.

    states:          states by slot, then by checkpoint, by the index of the layer that has them
    passes:          of a draft model; None without one
    send_early:      sends the step's results to the host before the passes run; None to send them after the step only
    features_TE:     features of the step's tokens, static, if the model is a draft head
    sample:          returns tokens int32 [L] of logits [L, V], and counts of the requests, whose padded number it gets;
        None if the host samples
    batch_invariant: no kernel is chosen by the number of tokens or requests; model and backend must be batch-invariant
        too
    drafts_read_last: the passes read the states behind the last layer, which then computes all rows in steps with
        passes; on each rank, although only rank 0 has the passes
    """

    def __init__(
        self,
        *,
        model: StepModel,
        attention: StepAttention,
        inputs: Inputs,
        sample: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]] | None = None,
        batch_invariant: bool = False,
        passes: Passes | None = None,
        send_early: Callable[[], None] | None = None,
        features_TE: torch.Tensor | None = None,
        states: Mapping[int, tuple[torch.Tensor, ...]] = MappingProxyType({}),
        drafts_read_last: bool = False,
    ) -> None:
        self.passes, self._drafts_read_last, self._send_early = passes, drafts_read_last, send_early
        self._states = states
        self._features_TE = features_TE
        self.model = model
        self.attention = attention
        self._inputs = inputs
        self._sample = sample
        self._batch_invariant = batch_invariant
        self._no_tokens = torch.empty(0, dtype=torch.int32, device=model.device)

    def run(
        self,
        *,
        num_tokens: int,
        num_reqs: int,
        num_logits: int,
        every_row: bool,
        pieces: bool,
        all_hidden: bool = False,
        makes_drafts: bool = False,
    ) -> StepOutputs:
        """Run the step in the inputs at a padded shape.

        Args:
            num_tokens: padded tokens T.
            num_reqs: padded request slots R.
            num_logits: rows with logits, padded ones included.
            every_row: each token has logits (uniform decode), so that its row of logits is its own.
            pieces: split the capture at each call of attention.
            all_hidden: return all rows of the residual stream, for logits of more rows than each request's last.
            makes_drafts: end with the passes of the draft model, if there is one.
        """
        inputs, model = self._inputs, self.model
        passes = self.passes if makes_drafts else None
        inputs.prepare(num_reqs=num_reqs, num_tokens=num_tokens)
        self.attention.pieces = pieces
        self.attention.schedule()
        input_ids_T, positions_T = inputs.input_ids[:num_tokens], inputs.positions[:num_tokens]
        # Its last entry is the number of tokens, after the padded requests too.
        num_rows = inputs.query_start_loc[num_reqs : num_reqs + 1]
        num_kept = max(num_logits, inputs.seq_lens.shape[0])
        states = None
        if self._states:
            states = StepStates(
                inputs.query_start_loc[: num_reqs + 1],
                inputs.seq_lens[:num_reqs],
                inputs.slots[:num_reqs],
                inputs.checkpoints[:, :num_reqs],
                self._states,
                single=every_row and num_tokens == num_reqs,
                early=self.attention.is_barrier,
            )
        all_hidden = all_hidden or model.spec.pooler is not None or (makes_drafts and self._drafts_read_last)
        if model.leaves_rows_out(num_tokens, num_kept) and not every_row and not all_hidden:
            # Padding rows have arbitrary contents.
            rows = inputs.logits_rows[:num_kept]
            hidden_TE = model.forward(
                input_ids_T, positions_T, self.attention, rows, num_rows, inputs.num_logits, states=states
            )
            hidden_TE = hidden_TE[:num_logits]
            gathered = False
        else:
            features_TE = None if self._features_TE is None else self._features_TE[:num_tokens]
            hidden_TE = model.forward(
                input_ids_T, positions_T, self.attention, num_rows=num_rows, features_TE=features_TE, states=states
            )
            # Gathered rows are normed by a separate kernel.
            gathered = not every_row or self._batch_invariant
        if model.spec.pooler is not None:
            pooled = model.pooled(hidden_TE, inputs.query_start_loc[: num_reqs + 1])
            return StepOutputs(hidden_TE, pooled, self._no_tokens, self._no_tokens)
        rows_N = inputs.logits_rows[:num_logits] if gathered else None
        logits_NV = model.logits(hidden_TE, rows_N)
        if self._sample is None:
            return StepOutputs(hidden_TE, logits_NV, self._no_tokens, self._no_tokens)
        tokens, counts = self._sample(logits_NV, num_reqs)
        if passes is not None:
            if self._send_early is not None:
                self._send_early()
            passes.run(tokens, num_tokens=num_tokens, num_reqs=num_reqs, pieces=pieces)
        return StepOutputs(hidden_TE, logits_NV, tokens, counts)

    @property
    def varies_with_drafts(self) -> bool:
        """True if steps that make drafts run other kernels than those that make none."""
        return self.passes is not None or self._drafts_read_last

    def build(self, builder: GroupBuilder, commons: Sequence[CommonMetadata], key: GraphKey | None) -> None:
        """Build the attention metadata of the step that runs next.

        Args:
            builder: of the model's own attention.
            commons: the step, by KV group.
            key: the graph that will be captured or replayed; None for an eager step.
        """
        self.attention.metadata = builder.build(commons, key=key)
        if self.passes is not None and (key is None or key.makes_drafts):
            self.passes.build(commons, key)

    @contextmanager
    def few_layers(self) -> Generator[None]:
        """Return a context in which `run` launches every kernel of its shape, but computes few layers.

        The outputs are meaningless.
        """
        with ExitStack() as stack:
            stack.enter_context(self.model.only_layers(_few_layers(self.model, self.attention.layers)))
            if self.passes is not None:
                model = self.passes.model
                stack.enter_context(model.only_layers(_few_layers(model, self.passes.layers)))
            yield


def _few_layers(model: StepModel, layers: Sequence[AttentionLayer]) -> list[int]:
    """Return layers that launch all kernels of a model.

    These are layers of each kind, and two neighbours for each pair of kinds, because the kernel before a product
    depends on the product; of each kind of attention, the first.
    """
    specs = model.spec.layers
    attentions: dict[tuple[object, ...], int] = {}
    for layer in layers:
        # A library may read a layer's scale tensors once, which must not happen in a capture.
        values = (getattr(layer, field.name) for field in fields(layer) if field.name != "index")
        kind = tuple(id(value) if isinstance(value, torch.Tensor) else value for value in values)
        # Cross attention is of the layer of `len(specs)` less.
        attentions.setdefault(kind, layer.index % len(specs))
    pairs = {(one.kind, other.kind): index for index, (one, other) in reversed([*enumerate(pairwise(specs))])}
    neighbours = {index + side for index in pairs.values() for side in (0, 1)}
    return sorted({0, len(specs) - 1, *attentions.values(), *neighbours})
