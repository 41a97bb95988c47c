"""Statistics of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from phonograph.core.batch import DraftCounts
from phonograph.kv_cache.checkpoints import CheckpointCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges of this moment, and counters since the start.

    Attributes:
        num_running: requests that have started and are not waiting again.
        num_waiting: requests that wait for a slot or for blocks.
        num_deferred: requests that wait for their grammar; the scheduler does not have them yet.
        prefix_queries: prompt tokens of admitted requests.
        prefix_hits: those of them found in the prefix cache.
        drafts: counts of drafts.
        checkpoints: counts of checkpoints of states.
    """

    num_running: int
    num_waiting: int
    blocks_used: int
    num_blocks: int
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    drafts: DraftCounts
    num_deferred: int = 0
    checkpoints: CheckpointCounts = field(default_factory=CheckpointCounts)
