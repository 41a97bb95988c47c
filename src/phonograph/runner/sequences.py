"""Sequences in the runner's slots, with their sampling state and the scoring of their prompts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from phonograph.core.batch import NewSequence, ScheduledBatch, TokenLogprobs
from phonograph.runner.step_inputs import StepRows, rows_of
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.logprobs import step_prompt_logprobs
from phonograph.sampling.sampler import Sampler


class Sequences:
    """Slots 0 .. max_num_seqs - 1 and the sequences in them. The sampler is loaded and cleared with them, if any."""

    def __init__(self, sampler: Sampler | None, *, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._sampler = sampler
        self._live: dict[int, NewSequence] = {}
        self._scored: set[int] = set()
        self._prompt_lens = np.zeros(max_num_seqs, np.int64)

    def take_over(self, batch: ScheduledBatch, failures: SlotFailures) -> None:
        """Free and load slots at the start of a step.

        Args:
            batch: the step.
            failures: receives slots that cannot be loaded. These are sampled greedily, and their tokens are dropped.
        """
        sampler = self._sampler
        for slot in batch.freed:
            self._live.pop(slot, None)
            if sampler is not None:
                sampler.clear(slot)
        self._scored.difference_update(batch.freed)
        for new in batch.new:
            self._live[new.slot] = new
            self._prompt_lens[new.slot] = new.prompt_len
            if sampler is None:
                continue
            if new.params.prompt_logprobs is not None:
                self._scored.add(new.slot)
            prompt, output = new.token_ids[: new.prompt_len], new.token_ids[new.prompt_len :]
            ends, index, grammar = new.end_token_ids, new.sample_index, new.grammar
            part = "sampling parameters"
            if not failures.run(
                new.slot, part, sampler.load, new.slot, new.params, prompt, output, ends, index, grammar
            ):
                sampler.clear(new.slot)

    def rows(self, batch: ScheduledBatch) -> StepRows:
        """Return the step as arrays."""
        return rows_of(batch, self._prompt_lens)

    def scores_prompts(self, batch: ScheduledBatch) -> bool:
        """Return True if this step has to compute log-probabilities of prompt tokens."""
        if self._scored.isdisjoint(batch.slots):
            return False
        return any(
            slot in self._scored and context_len + 1 < self._live[slot].prompt_len
            for slot, context_len in zip(batch.slots, batch.context_lens, strict=True)
        )

    def prompt_logprobs(
        self,
        batch: ScheduledBatch,
        hidden_TE: torch.Tensor,
        logits_fn: Callable[[torch.Tensor], torch.Tensor],
        failures: SlotFailures,
    ) -> dict[int, list[TokenLogprobs]]:
        """Compute the log-probabilities of prompt tokens; see `step_prompt_logprobs`."""
        as_logits = self._sampler is not None and self._sampler.scores.as_logits
        return step_prompt_logprobs(batch, self._live, hidden_TE, logits_fn, failures, as_logits=as_logits)
