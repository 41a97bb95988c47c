"""Runner of rank 0, which sends each step to the other ranks (`follow_rank`).

Captures and verifications need no messages: all ranks run the same batches, which are drawn by equal seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from phonograph.attention.metadata import CommonMetadata
from phonograph.core.batch import ScheduledBatch, StepOutput
from phonograph.engine.process.ranks.rank_step import RankStep, Score, TimeDrafting
from phonograph.errors import RankError
from phonograph.graphs.dispatch import Decision
from phonograph.graphs.modes import GraphKey
from phonograph.runner.runner import Runner
from phonograph.runner.step_inputs import RankInputs, StepRows
from phonograph.runner.step_program import StepOutputs
from phonograph.runner.steps import PendingStep

if TYPE_CHECKING:
    from phonograph.engine.process.ranks.rank_group import RankGroup


@dataclass(slots=True)
class _RankStepInFlight:
    """A step of all ranks."""

    step: PendingStep
    group: RankGroup
    decision: Decision
    output: StepOutput

    def result(self) -> StepOutput:
        """Return the result. On a GPU no operation raises when a rank has ended."""
        output = self.step.result()
        self.group.check()
        return output


class LeadRunner(Runner):
    """Runner of rank 0. The others run each step that is submitted here."""

    def __init__(self, group: RankGroup, *, inputs: RankInputs, **parts: Any) -> None:
        super().__init__(ranks=group.ranks, inputs=inputs, **parts)
        self._group, self._tokens = group, inputs
        self._submitted: StepRows | None = None

    def submit(self, batch: ScheduledBatch) -> PendingStep:
        with self._group.first_error():
            step = super().submit(batch)
            return _RankStepInFlight(step, self._group, step.decision, step.output)

    def drop_graphs(self) -> None:
        """Free the graphs, for which NCCL waits when a connection ends. No step follows."""
        self._graphs.clear()

    def time_drafting(self, learn: Callable[[int, int, float], None]) -> None:
        with self._group.first_error():
            self._group.send(TimeDrafting())
            super().time_drafting(learn)

    def replay(self, key: GraphKey) -> StepOutputs:
        self._send(key)
        try:
            return super().replay(key)
        except RankError as error:
            raise RankError(f"{key}: {error}", of_another=error.of_another) from error

    def _decide(self, rows: StepRows, scores_prompts: bool) -> Decision:
        self._submitted = rows
        return super()._decide(rows, scores_prompts)

    def _run_eager(
        self, common: CommonMetadata, num_logits: int, *, all_hidden: bool = False, makes_drafts: bool
    ) -> StepOutputs:
        self._send(None, all_hidden=all_hidden, makes_drafts=makes_drafts)
        return super()._run_eager(common, num_logits, all_hidden=all_hidden, makes_drafts=makes_drafts)

    def _scorer(self, hidden_TE: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        logits_of = super()._scorer(hidden_TE)

        def logits(hidden_NE: torch.Tensor) -> torch.Tensor:
            # The rows are a slice of the step's.
            offset = hidden_NE.storage_offset() - hidden_TE.storage_offset()
            self._group.send(Score(offset // hidden_TE.stride(0), len(hidden_NE)))
            return logits_of(hidden_NE)

        return logits

    def _send(self, key: GraphKey | None, *, all_hidden: bool = False, makes_drafts: bool = False) -> None:
        """Send a submitted step to the other ranks; batches of captures and of `verify` are drawn by each rank."""
        rows, self._submitted = self._submitted, None
        if rows is not None:
            token_ids_T = self._tokens.host_tokens(rows)
            step = RankStep.of(rows, token_ids_T, key, all_hidden=all_hidden, makes_drafts=makes_drafts)
            self._group.send(step)
