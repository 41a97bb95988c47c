"""The computation of one step, for capture and for eager runs.

It reads its inputs from static tensors only. Calls differ in the shape (padded tokens, rows of logits) and in whether
the capture is split at attention; attention metadata is set beforehand. On a GPU the step needs no host work between
its head and its tail: a kernel derives the inputs from one upload and the device state, and the sampled tokens stay on
the device for the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from itertools import pairwise
from typing import NamedTuple

import torch

from phonograph.models.transformer import Transformer
from phonograph.runner.step_attention import StepAttention
from phonograph.runner.step_inputs import Inputs


class StepOutputs(NamedTuple):
    """Tensors that a step leaves. The next run or replay overwrites them.

    hidden: before the final norm; [N, E] if the last layer computes only rows with logits, else [T, E]
    logits: [L, V] of the rows that have logits
    tokens: int32 [L]; -1 if no logit was finite, less than -1 if the row samples nothing here. Empty if the host
        samples.
    counts: int32 [N] of the requests, see `accept`; empty where the step verifies no drafts.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor


class StepProgram:
    """Attention schedule, decoder layers, logits of the rows that need them, and sampling.

    sample:          returns tokens int32 [L] of logits [L, V], and counts of the requests, whose padded number it gets;
        None if the host samples
    batch_invariant: no kernel is chosen by the number of tokens or requests; model and backend must be batch-invariant
        too
    """

    def __init__(
        self,
        *,
        model: Transformer,
        attention: StepAttention,
        inputs: Inputs,
        sample: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]] | None = None,
        batch_invariant: bool = False,
    ) -> None:
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
    ) -> StepOutputs:
        """Run the step in the inputs at a padded shape.

        Args:
            num_tokens: padded tokens T.
            num_reqs: padded request slots R.
            num_logits: rows with logits, padded ones included.
            every_row: each token has logits (uniform decode), so that its row of logits is its own.
            pieces: split the capture at each call of attention.
            all_hidden: return all rows of the residual stream, for logits of more rows than each request's last.
        """
        inputs, model = self._inputs, self.model
        inputs.prepare(num_reqs=num_reqs, num_tokens=num_tokens)
        self.attention.pieces = pieces
        self.attention.schedule()
        input_ids_T, positions_T = inputs.input_ids[:num_tokens], inputs.positions[:num_tokens]
        # Its last entry is the number of tokens, after the padded requests too.
        num_rows = inputs.query_start_loc[num_reqs : num_reqs + 1]
        num_kept = max(num_logits, inputs.seq_lens.shape[0])
        if model.kernels.leaves_rows_out(num_tokens, num_kept) and not every_row and not all_hidden:
            # Padding rows have arbitrary contents.
            rows = inputs.logits_rows[:num_kept]
            hidden_TE = model.forward(input_ids_T, positions_T, self.attention, rows, num_rows, inputs.num_logits)
            hidden_TE = hidden_TE[:num_logits]
            gathered = False
        else:
            hidden_TE = model.forward(input_ids_T, positions_T, self.attention, num_rows=num_rows)
            # Gathered rows are normed by a separate kernel.
            gathered = not every_row or self._batch_invariant
        rows_N = inputs.logits_rows[:num_logits] if gathered else None
        logits_NV = model.logits(hidden_TE, rows_N)
        if self._sample is None:
            return StepOutputs(hidden_TE, logits_NV, self._no_tokens, self._no_tokens)
        return StepOutputs(hidden_TE, logits_NV, *self._sample(logits_NV, num_reqs))

    def few_layers(self) -> AbstractContextManager[None]:
        """Return a context in which `run` launches every kernel of its shape, but computes few layers.

        These are layers of each kind, and two neighbours for each pair of kinds, because the kernel before a product
        depends on the product; of each kind of attention, the first. The outputs are meaningless.
        """
        layers, specs = self.attention.layers, self.model.spec.layers
        attentions: dict[tuple[object, ...], int] = {}
        for layer in layers:
            # A library may read a layer's scale tensors once, which must not happen in a capture.
            values = (getattr(layer, field.name) for field in fields(layer) if field.name != "index")
            kind = tuple(id(value) if isinstance(value, torch.Tensor) else value for value in values)
            attentions.setdefault(kind, layer.index)
        last = len(specs) - 1
        pairs = {(one.kind, other.kind): index for index, (one, other) in reversed([*enumerate(pairwise(specs))])}
        neighbours = {index + side for index in pairs.values() for side in (0, 1)}
        return self.model.only_layers(sorted({0, last, *attentions.values(), *neighbours}))
