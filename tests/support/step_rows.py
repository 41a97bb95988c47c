"""A batch as arrays, for inputs without a runner."""

from __future__ import annotations

import numpy as np

from phonograph.core.batch import ScheduledBatch
from phonograph.runner.step_inputs import StepRows


def rows_of(batch: ScheduledBatch) -> StepRows:
    """Return the rows of a batch of which no draw is asked for."""
    lengths = {name: np.array(getattr(batch, name), np.int64) for name in ("slots", "context_lens", "query_lens")}
    return StepRows(
        batch=batch, samples=np.array(batch.samples, bool), draws=np.zeros(batch.num_reqs, np.int64), **lengths
    )
