"""The computation of one step, written once: what is captured into every graph, and what runs eagerly.

It reads its inputs from persistent tensors only. What differs between calls is the shape (padded tokens, rows of
logits) and whether the capture is broken at the calls of attention; the attention metadata is set beforehand. On a GPU
the step needs nothing of the host from head to tail: a kernel makes the inputs out of one uploaded buffer and the state
that lives on the device, and the sampled tokens stay there for the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import NamedTuple

import torch

from phonograph.models.transformer import Transformer
from phonograph.runner.step_attention import StepAttention
from phonograph.runner.step_inputs import Inputs


class StepOutputs(NamedTuple):
    """Tensors that a step leaves; the next run or replay overwrites them.

    hidden: before the final norm; [N, E] of the rows with logits where the model leaves out the others, else [T, E]
    logits: [N, V], N = min(T, R)
    tokens: int32 [N]; -1 where the logits had none to choose, less where the row samples nothing here. Empty where the
        host samples.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor


class StepProgram:
    """Attention schedule, decoder layers with paged attention, logits of the rows that need them, sampling.

    sample:          returns the tokens int32 [N] of rows of logits [N, V]; None where the host samples
    batch_invariant: no kernel is chosen by the number of tokens or requests. The model and the backend must be made so.
    """

    def __init__(
        self,
        *,
        model: Transformer,
        attention: StepAttention,
        inputs: Inputs,
        sample: Callable[[torch.Tensor], torch.Tensor] | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.model = model
        self.attention = attention
        self._inputs = inputs
        self._sample = sample
        self._batch_invariant = batch_invariant
        self._no_tokens = torch.empty(0, dtype=torch.int32, device=model.device)

    def run(
        self, *, num_tokens: int, num_reqs: int, every_row: bool, pieces: bool, all_hidden: bool = False
    ) -> StepOutputs:
        """Run the step that the inputs hold, at a padded shape.

        Args:
            num_tokens, num_reqs: padded tokens T and request slots R.
            every_row: each token is a request's last (uniform decode), so that its row of logits is its own.
            pieces: break the capture at each call of attention.
            all_hidden: return all rows of the residual stream, for logits of more rows than the requests' last.
        """
        inputs, model = self._inputs, self.model
        num_logits = min(num_tokens, num_reqs)
        inputs.prepare(num_reqs=num_reqs, num_tokens=num_tokens)
        self.attention.schedule()
        self.attention.pieces = pieces
        input_ids_T, positions_T = inputs.input_ids[:num_tokens], inputs.positions[:num_tokens]
        if model.kernels.leaves_rows_out(num_tokens) and not every_row and not all_hidden:
            # Rows of no request of this step are any rows.
            hidden_TE = model.forward(input_ids_T, positions_T, self.attention, inputs.logits_rows)[:num_logits]
            gathered = False
        else:
            hidden_TE = model.forward(input_ids_T, positions_T, self.attention)
            # Gathered rows are normed by a kernel of their own.
            gathered = not every_row or self._batch_invariant
        rows_N = inputs.logits_rows[:num_logits] if gathered else None
        logits_NV = model.logits(hidden_TE, rows_N)
        tokens_N = self._no_tokens if self._sample is None else self._sample(logits_NV)
        return StepOutputs(hidden_TE, logits_NV, tokens_N)

    def few_layers(self) -> AbstractContextManager[None]:
        """Let `run` launch every kernel of its shape inside the context, but only in the first two layers, the last,
        and one of each kind of attention. What it computes is of no use."""
        layers = self.attention.layers
        last = len(layers) - 1
        kinds: dict[tuple[object, ...], int] = {}
        for layer in layers:
            # A library may read a layer's own tensors once, which is not for captures.
            values = (getattr(layer, field.name) for field in fields(layer) if field.name != "index")
            kind = tuple(id(value) if isinstance(value, torch.Tensor) else value for value in values)
            kinds.setdefault(kind, layer.index)
        return self.model.only_layers(sorted({0, min(1, last), last, *kinds.values()}))
