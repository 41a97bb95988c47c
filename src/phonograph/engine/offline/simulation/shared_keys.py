"""Keys of prefixes that decodes attend once, for the time of simulated steps."""

from __future__ import annotations

from itertools import pairwise

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.triton.prefix_runs import find_runs
from phonograph.core.batch import ScheduledBatch
from phonograph.engine.plan import EnginePlan
from phonograph.kv_cache.tables import GroupTable


class SharedKeys:
    """Counts the keys that the decodes of a step need not read again, by the rule of the device (`find_runs`).

    The keys are those of the first group of full attention that shares prefixes: in layers with a window decodes read
    few.

    Args:
        plan: plan of the engine.
    """

    def __init__(self, plan: EnginePlan) -> None:
        self._num_sms = plan.device.num_sms
        self._sharing = _sharing_group(plan)
        self._tables: dict[int, GroupTable] = {}
        self._decodes: list[int] = []
        self._saved = 0

    def saved(self, batch: ScheduledBatch) -> int:
        """Return the number of keys for a batch. Batches must come in their order, as block tables come with them."""
        if self._sharing is None:
            return 0
        spec, group = self._sharing
        for new in batch.new:
            self._tables[new.slot] = GroupTable()
        for append in batch.appends:
            if append.group == group:
                self._tables[append.slot].block_ids[append.start :] = append.block_ids
        decodes = batch.slots[: batch.num_decodes]
        # Blocks appended to decodes are not shared, and a slot that gets a sequence holds a prefill first.
        if decodes != self._decodes:
            self._decodes = decodes
            tables = [self._tables[slot] for slot in decodes]
            keys = [0, *(spec.block_size * one.num_shared(other) for one, other in pairwise(tables))]
            lens = [length + 1 for length in batch.context_lens[: batch.num_decodes]]
            runs = find_runs(spec, self._num_sms, keys, [1] * len(decodes), lens) if any(keys) else []
            self._saved = sum((run.last - run.first) * (run.end - run.begin) for run in runs)
        return self._saved


def _sharing_group(plan: EnginePlan) -> tuple[AttentionSpec, int] | None:
    shared = (
        (spec, index) for spec, groups in plan.kv.members.items() if plan.shares_prefixes(spec) for index in groups
    )
    return next(((spec, index) for spec, index in shared if plan.kv.groups[index].window is None), None)
