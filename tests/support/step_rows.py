"""A batch as arrays, for inputs without a runner."""

from __future__ import annotations

import numpy as np

from phonograph.core.batch import ScheduledBatch
from phonograph.runner import step_inputs
from phonograph.runner.step_inputs import StepRows


def rows_of(batch: ScheduledBatch) -> StepRows:
    """Return the rows of a batch of which no draw is asked for."""
    return step_inputs.rows_of(batch, np.zeros(1 + max(batch.slots), np.int64))


def draws_of_logits(rows: StepRows) -> np.ndarray:
    """Return the index of the draw of each row of logits, int64 [L]: that of the token behind the row's own."""
    first_rows, num_rows = rows.logits_spans()
    return (rows.draws - num_rows + 1 - first_rows)[rows.owners] + np.arange(rows.num_logits)
