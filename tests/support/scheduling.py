"""Requests, schedulers and steps without a model, for tests of the scheduler."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from invariants import check_scheduler

from phonograph.core.batch import DraftCounts, ScheduledBatch, StepOutput
from phonograph.core.kv_group import KVGroup
from phonograph.core.limits import Limits
from phonograph.core.request import Request
from phonograph.core.sampling_params import SamplingParams
from phonograph.scheduling.scheduler import Scheduler

EOS = 99


class FixedDepths:
    """As many drafts for each decode in each step, as far as the scheduler grants them."""

    def __init__(self, most: int) -> None:
        self.most, self.caches, self.counts, self.waits = most, None, DraftCounts(), False

    def choose(self, decodes: Collection[Request]) -> list[int]:
        return [self.most] * len(decodes)

    def learn(self, batch: ScheduledBatch, output: StepOutput, seconds: float) -> None:
        """Learn nothing."""


def full_group(block_size: int = 4) -> KVGroup:
    return KVGroup(layers=(0,), block_size=block_size)


def sliding_group(window: int, block_size: int = 4) -> KVGroup:
    return KVGroup(layers=(0,), block_size=block_size, window=window)


def make_scheduler(
    *,
    max_model_len: int = 64,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    block_size: int = 4,
    draft_tokens: int | None = None,
    lookahead_tokens: int = 0,
    **changes: Any,
) -> Scheduler:
    """Return a scheduler for one full KV group, unless other `groups` are given."""
    if draft_tokens is None:
        draft_tokens = getattr(changes.get("drafts"), "most", 0)
    limits = Limits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        draft_tokens=draft_tokens,
        lookahead_tokens=lookahead_tokens,
    )
    return Scheduler(limits, **({"groups": [full_group(block_size)], "num_blocks": 64} | changes))


def request(
    name: str, prompt: int | Sequence[int] = 5, *, priority: int = 0, arrival: float = 0.0, **params: object
) -> Request:
    """`prompt` as tokens, or as a number of tokens unlike those of any other name."""
    tokens = [1000 * ord(name[0]) + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        params=SamplingParams(**({"max_tokens": None} | params)),  # pyright: ignore[reportArgumentType]
        arrival=arrival,
        priority=priority,
        eos_token_ids=(EOS,),
    )


def output_of(batch: ScheduledBatch, token_id: int = 7) -> StepOutput:
    slots = [slot for slot, samples in zip(batch.slots, batch.samples, strict=True) if samples]
    return StepOutput(slots=slots, token_ids=[[token_id] for _ in slots])


def step(scheduler: Scheduler, token_id: int = 7) -> ScheduledBatch:
    batch = scheduler.schedule()
    check_scheduler(scheduler)
    scheduler.update(batch, output_of(batch, token_id))
    check_scheduler(scheduler)
    return batch


def add(scheduler: Scheduler, *requests: Request) -> None:
    for one in requests:
        scheduler.add(one)
