"""A draft model or head beside its target where the host samples: a runner over the slots and blocks of the target.

Behind each step it computes the tokens that the target has computed or sampled since, and samples the first draft from
the last of them. Each further draft is a step of one token a sequence. Its keys lie in the blocks of the sequences, so
that blocks which sequences share serve both models.

Entry p of a draft head has the features of token p and the embedding of token p + 1 (`models/heads/eagle.py`). So a
head sees the tokens of a sequence without the first: a *shift* of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from phonograph.core.batch import ScheduledBatch
from phonograph.models.transformer import Transformer
from phonograph.runner.cpu_inputs import CpuInputs
from phonograph.runner.runner import Runner
from phonograph.runner.sequences import Sequences
from phonograph.runner.step_inputs import StepRows
from phonograph.runner.step_program import StepOutputs
from phonograph.sampling.sampler import Sampler


class FollowedSequences(Sequences):
    """Slots whose sampling state another runner loads and clears.

    Args:
        sampler: of both runners.
        max_num_seqs: slots.
        shift: first tokens that the draft model does not see.
    """

    def __init__(self, sampler: Sampler, *, max_num_seqs: int, shift: int) -> None:
        super().__init__(sampler, max_num_seqs=max_num_seqs)
        self._shift = shift

    def follow(self, batch: ScheduledBatch) -> None:
        """Note the lengths of the prompts that start."""
        for new in batch.new:
            self._prompt_lens[new.slot] = new.prompt_len - self._shift


class HeadFeatures:
    """Features of a draft head's entries, and its logits by the tokens of its target.

    Args:
        model: the head, bound to kernels.
        states_TF: hidden states of the target in the step that has run.
        max_num_seqs: slots.
        vocab_size: tokens of the target.

    Attributes:
        step_TE: features of the next step of the head.
    """

    def __init__(self, model: Transformer, states_TF: torch.Tensor, *, max_num_seqs: int, vocab_size: int) -> None:
        assert model.features is not None and model.feature_part is not None
        self._part, self._target_ids = model.feature_part, model.features.target_ids
        self._states_TF, self._vocab_size = states_TF, vocab_size
        size = model.spec.hidden_size
        self.step_TE = torch.zeros(len(states_TF), size, dtype=model.dtype)
        # By slot: what the head said in its last entry, the feature of the next one.
        self._said_RE = torch.zeros(max_num_seqs, size, dtype=model.dtype)

    def follow_target(self, rows: Sequence[int]) -> None:
        """Take the features of the next step from rows of the target's step."""
        self.step_TE[: len(rows)] = self._part.join(self._states_TF[torch.tensor(rows)])

    def follow_drafts(self, slots: Sequence[int]) -> None:
        """Take the features of the next step, of an entry for each slot, from the last entries of the slots."""
        self.step_TE[: len(slots)] = self._said_RE[torch.tensor(slots)]

    def take(self, rows: StepRows, outputs: StepOutputs) -> StepOutputs:
        """Keep what a step of the head said, and return its outputs with logits [R, V] of the target's tokens."""
        last_rows = torch.from_numpy(np.cumsum(rows.query_lens) - 1)
        said_RE = self._said_RE.new_empty(len(last_rows), self._said_RE.shape[1])
        self._part.next_features(outputs.hidden, last_rows, said_RE)
        self._said_RE[torch.from_numpy(rows.slots)] = said_RE
        if self._target_ids is None:
            return outputs
        logits_RV = outputs.logits.new_full((rows.num_logits, self._vocab_size), float("-inf"))
        logits_RV[:, self._target_ids] = outputs.logits[: rows.num_logits]
        return outputs._replace(logits=logits_RV)


class DraftRunner:
    """Makes drafts for the sequences of a step; see the module.

    Args:
        runner: of the draft model.
        inputs: of that runner; they share tokens and blocks with the target's.
        sequences: likewise.
        most: most drafts of a sequence.
        max_num_tokens: tokens of the largest step of that runner.
        head: features if it is a draft head; None for a model.
    """

    def __init__(
        self,
        runner: Runner,
        inputs: CpuInputs,
        sequences: FollowedSequences,
        *,
        most: int,
        max_num_tokens: int,
        head: HeadFeatures | None = None,
    ) -> None:
        self.runner = runner
        self._inputs = inputs
        self._sequences = sequences
        self._most = most
        self._max_num_tokens = max_num_tokens
        self._head, self._shift = head, 0 if head is None else 1
        self._longest = inputs.max_model_len - self._shift
        # By slot: leading entries whose keys the draft model has.
        self._held = [0] * len(inputs.token_ids)

    def draft(self, batch: ScheduledBatch, lengths: dict[int, int], wants: Callable[[int], bool]) -> dict[int, int]:
        """Write drafts behind the tokens of the slots; return the number of drafts of each slot that has some.

        Args:
            batch: the step of the target, whose tokens are known.
            lengths: tokens of each slot that the step sampled, with the new ones.
            wants: returns True for slots whose drafts the next step may verify.
        """
        held, room, shift = self._held, self._max_num_tokens, self._shift
        self._sequences.follow(batch)
        for new in batch.new:
            held[new.slot] = new.num_computed
        rows: list[tuple[int, int, int, bool, int]] = []
        start = 0
        for slot, context, query_len in zip(batch.slots, batch.context_lens, batch.query_lens, strict=True):
            known = lengths.get(slot, context + query_len + shift) - shift
            count = min(known - held[slot], room)
            room -= count
            whole = count > 0 and held[slot] + count == known and slot in lengths and wants(slot)
            if count > 0:
                first_row = start + held[slot] - context
                rows.append((slot, held[slot], count, whole and known < self._longest, first_row))
            held[slot] += max(count, 0)
            start += query_len
        rows.sort(key=lambda row: row[2] > 1)
        columns = ([*column] for column in zip(*rows, strict=True)) if rows else ([],) * 5
        slots, contexts, counts, samples, first_rows = columns
        for slot in slots:
            self._inputs.set_length(slot, held[slot])
        found = {slot: 1 for slot, drafts in zip(slots, samples, strict=True) if drafts}
        if slots:
            if self._head is not None:
                pairs = zip(first_rows, counts, strict=True)
                self._head.follow_target([row for first, count in pairs for row in range(first, first + count)])
            self._run(
                ScheduledBatch(
                    slots=slots, query_lens=counts, context_lens=contexts, samples=samples, num_tokens=sum(counts)
                ),
                found,
            )  # fmt: skip
        for _ in range(self._most - 1):
            going = [slot for slot, count in found.items() if held[slot] + count < self._longest]
            if not going:
                break
            ones = [1] * len(going)
            contexts = [held[slot] + found[slot] - 1 for slot in going]
            found |= {slot: found[slot] + 1 for slot in going}
            if self._head is not None:
                self._head.follow_drafts(going)
            self._run(
                ScheduledBatch(
                    slots=going, query_lens=ones, context_lens=contexts, samples=[True] * len(going),
                    num_decodes=len(going), num_decode_tokens=len(going), num_tokens=len(going),
                ),
                found,
            )  # fmt: skip
        return found

    def _run(self, step: ScheduledBatch, found: dict[int, int]) -> None:
        """Run a step, and drop the drafts of slots that failed."""
        for slot in self.runner.submit(step).result().failures:
            found.pop(slot, None)
