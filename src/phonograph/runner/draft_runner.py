"""A draft model beside its target where the host samples: a runner of its own over the slots and blocks of the target.

Behind each step it computes the tokens that the target has computed or sampled since, and samples the first draft from
the last of them. Each further draft is a step of one token a sequence. Its keys lie in the blocks of the sequences, so
that blocks which sequences share serve both models.
"""

from __future__ import annotations

from collections.abc import Callable

from phonograph.core.batch import ScheduledBatch
from phonograph.runner.cpu_inputs import CpuInputs
from phonograph.runner.runner import Runner
from phonograph.runner.sequences import Sequences


class FollowedSequences(Sequences):
    """Slots whose sampling state another runner loads and clears."""

    def follow(self, batch: ScheduledBatch) -> None:
        """Note the lengths of the prompts that start."""
        for new in batch.new:
            self._prompt_lens[new.slot] = new.prompt_len


class DraftRunner:
    """Makes drafts for the sequences of a step; see the module.

    Args:
        runner: of the draft model.
        inputs: of that runner; they share tokens and blocks with the target's.
        sequences: likewise.
        most: most drafts of a sequence.
        max_num_tokens: tokens of the largest step of that runner.
    """

    def __init__(
        self, runner: Runner, inputs: CpuInputs, sequences: FollowedSequences, *, most: int, max_num_tokens: int
    ) -> None:
        self.runner = runner
        self._inputs = inputs
        self._sequences = sequences
        self._most = most
        self._max_num_tokens = max_num_tokens
        num_slots, self._longest = inputs.token_ids.shape
        # By slot: leading tokens whose keys the draft model has.
        self._held = [0] * num_slots

    def draft(self, batch: ScheduledBatch, lengths: dict[int, int], wants: Callable[[int], bool]) -> dict[int, int]:
        """Write drafts behind the tokens of the slots; return the number of drafts of each slot that has some.

        Args:
            batch: the step of the target, whose tokens are known.
            lengths: tokens of each slot that the step sampled, with the new ones.
            wants: returns True for slots whose drafts the next step may verify.
        """
        held, room = self._held, self._max_num_tokens
        self._sequences.follow(batch)
        for new in batch.new:
            held[new.slot] = new.num_computed
        rows: list[tuple[int, int, int, bool]] = []
        for slot, context, query_len in zip(batch.slots, batch.context_lens, batch.query_lens, strict=True):
            known = lengths.get(slot, context + query_len)
            count = min(known - held[slot], room)
            room -= count
            whole = count > 0 and held[slot] + count == known and slot in lengths and wants(slot)
            if count > 0:
                rows.append((slot, held[slot], count, whole and known < self._longest))
            held[slot] += max(count, 0)
        rows.sort(key=lambda row: row[2] > 1)
        slots, contexts, counts, samples = ([*column] for column in zip(*rows, strict=True)) if rows else ([],) * 4
        for slot in slots:
            self._inputs.set_length(slot, held[slot])
        found = {slot: 1 for slot, drafts in zip(slots, samples, strict=True) if drafts}
        if slots:
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
