"""Record of one step: its batch, its decision, and its duration.

A tuple of plain values, because there is one per step and the engine's process sends them to the server's.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from phonograph.core.batch import ScheduledBatch, StepOutput
from phonograph.graphs.dispatch import Decision

BatchKind = Literal["decode", "prefill", "mixed"]


class StepRecord(NamedTuple):
    """One step whose results were taken.

    ended:        seconds of `time.monotonic`, which all processes of a machine share
    seconds:      from the time the step had the device to itself until its results were taken
    num_decodes:  sequences that continued their output
    num_decode_tokens: their tokens
    prefill_lens: tokens of each of the other sequences
    graph:        short name of the decision, such as "full mixed" or "eager"
    mode:         FULL, PIECEWISE or NONE
    graph_tokens: tokens after padding
    graph_slots:  request slots of the graph; the number of sequences in an eager step
    cause:        short reason, as in `Decision`
    reason:       full reason, as in `Decision`
    shared_units: units of attention of prefixes that sequences share, in a layer; see `StepOutput`
    own_units:    other units of short queries
    """

    ended: float
    seconds: float
    num_decodes: int
    num_decode_tokens: int
    prefill_lens: list[int]
    graph: str
    mode: str
    graph_tokens: int
    graph_slots: int
    cause: str
    reason: str
    shared_units: int = 0
    own_units: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return self.num_decode_tokens + sum(self.prefill_lens)

    @property
    def kind(self) -> BatchKind:
        if not self.prefill_lens:
            return "decode"
        return "mixed" if self.num_decodes else "prefill"


def record_of(batch: ScheduledBatch, output: StepOutput, decision: Decision, began: float, ended: float) -> StepRecord:
    """Return the record of a step that ran by `decision` between two times."""
    return StepRecord(
        ended,
        ended - began,
        batch.num_decodes,
        batch.num_decode_tokens,
        batch.query_lens[batch.num_decodes :],
        decision.label,
        decision.mode.value,
        decision.num_tokens,
        batch.num_reqs if decision.key is None else decision.key.num_reqs,
        decision.cause,
        decision.reason,
        *output.attention_units,
    )
