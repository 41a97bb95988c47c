"""Log-probabilities of a step's tokens, computed behind the step without waiting for the device.

All rows of a sequence are scored, those behind drafts too. The host cuts them to the tokens that the step accepted.
Processed logits are computed again: the kernels that sample leave none in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from phonograph.core.batch import StepOutput
from phonograph.kernels.triton.step.accept_drafts import LENGTH_MASK
from phonograph.runner.cuda.cuda_inputs import CudaInputs
from phonograph.runner.step_inputs import StepRows
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.logprobs import as_entries, padded, score_listed, score_tokens
from phonograph.sampling.sampler import Sampler


class TokenScores:
    """Scores of the sequences of one step that ask for log-probabilities.

    Args:
        sampler: knows what each slot asks for.
        rows: the step.
        inputs: of the step.
        logits_LV: logits of the step, before rows with a grammar are masked.
        masked: sequences with a grammar, whose rows are copied if scores are of raw logits.
    """

    def __init__(
        self, sampler: Sampler, rows: StepRows, inputs: CudaInputs, logits_LV: torch.Tensor, masked: Sequence[int]
    ) -> None:
        self._sampler = sampler
        self._inputs = inputs
        self._owners, self._first_rows = rows.owners, rows.logits_spans()[0]
        self._slots = rows.slots[rows.owners]
        self._tops = np.where(rows.samples, sampler.logprobs[rows.slots], -1)[rows.owners]
        self._lists = sampler.lists[self._slots]
        self._listed = sampler.listed
        self._chunk_rows = sampler.chunk_rows
        is_copied = np.isin(rows.owners, masked) & (self._tops >= 0) & (not sampler.scores.processed)
        self._copied = np.flatnonzero(is_copied)
        self._in_place = np.flatnonzero((self._tops >= 0) & ~is_copied)
        self._copies = logits_LV[sampler.to_device(self._copied)]
        self._scores: list[tuple[Sequence[int], tuple[torch.Tensor, ...]]] = []

    def start(self, logits_LV: torch.Tensor, tokens_L: torch.Tensor, failures: SlotFailures) -> None:
        """Compute the scores of the tokens that were sampled, and start their copies to the host.

        Args:
            logits_LV: as above; masked rows are not read.
            tokens_L: int32, token of each row; below 0 for a row without one.
            failures: receives the slots whose work raises.
        """
        to_device = self._sampler.to_device

        def score(rows: Sequence[int]) -> None:
            numbers = to_device(np.array(rows))
            tokens = tokens_L[numbers].to(torch.int64).clamp_(min=0)
            if rows[0] in self._copied:
                logits = self._copies[to_device(np.searchsorted(self._copied, rows))]
            else:
                logits = logits_LV[numbers]
            if self._sampler.scores.processed:
                edited = self._edited(logits.to(torch.float32), np.array(rows), numbers, tokens_L)
                logits = self._sampler.filtered(edited, self._slots[rows], tokens)
            as_logits = self._sampler.scores.as_logits
            if self._lists[rows[0]]:
                listed = padded([self._listed[slot] for slot in self._slots[rows].tolist()])
                found = score_listed(logits, tokens, to_device(listed), as_logits=as_logits)
            else:
                found = score_tokens(logits, tokens, int(self._tops[rows].max()), as_logits=as_logits)
            self._scores.append((rows, tuple(_to_host(one) for one in found)))

        slots: list[int] = self._slots.tolist()
        for group in (self._in_place, self._copied):
            for numbers in (group[~self._lists[group]].tolist(), group[self._lists[group]].tolist()):
                for start in range(0, len(numbers), self._chunk_rows):
                    rows = numbers[start : start + self._chunk_rows]
                    failures.run_rows(rows, slots, "log-probabilities", score)

    def _edited(
        self, logits_NV: torch.Tensor, rows: np.ndarray, rows_N: torch.Tensor, tokens_L: torch.Tensor
    ) -> torch.Tensor:
        """Return logits with the edits that the step's kernels made when they read them.

        Args:
            logits_NV: logits of some rows, with the masks of grammars.
            rows: numbers of these rows.
            rows_N: the same on the device.
            tokens_L: token of each row of the step, which the words of slots count where the step accepted it.
        """
        edits, inputs, to_device = self._sampler.edits, self._inputs, self._sampler.to_device
        if edits is None or not self._sampler.kernel_parameters(self._slots[rows]).edits_N.any():
            return logits_NV
        owners = self._owners[rows]
        # Of a sequence the words count the tokens of this row and of the rows after it, up to the last accepted one.
        after = np.arange(1 + inputs.drafts.shape[1])
        found_NK = to_device(np.minimum(rows[:, None] + after, len(self._owners) - 1))
        places_NK = to_device((rows - self._first_rows[owners])[:, None] + after)
        lengths_N = 1
        if inputs.counts.shape[0]:
            lengths_N = (inputs.counts[to_device(owners)] & LENGTH_MASK)[:, None]
        counted_NK = tokens_L[found_NK].to(torch.int64).masked_fill(places_NK >= lengths_N, -1)
        slots_N = to_device(self._slots[rows])
        return edits.apply(logits_NV, slots_N, inputs.sampling.edits[rows_N], counted_NK)

    def take(self, output: StepOutput) -> None:
        """Add the scores to the output of the step, which the device has finished. Slots that failed get none."""
        lengths = dict(zip(output.slots, map(len, output.token_ids), strict=True))
        for rows, scores in self._scores:
            slots, tops = self._slots[rows].tolist(), self._tops[rows].tolist()
            # The rows of a slot come in their order.
            for slot, entry in zip(slots, as_entries(tops, *scores), strict=True):
                entries = output.logprobs.setdefault(slot, [])
                if slot not in output.failures and len(entries) < lengths[slot]:
                    entries.append(entry)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)
