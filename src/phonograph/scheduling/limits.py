"""Limits of the scheduler, and its statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phonograph.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of what runs at once.

    Attributes:
        max_num_seqs: sequences running at a time, which is the number of runner slots.
        max_num_batched_tokens: tokens in one step; at least max_num_seqs, so that every decode fits.
        max_model_len: tokens of prompt and output together.
        block_size: tokens in a KV block.
        num_blocks: KV blocks.
        policy: "fcfs" serves by arrival; "priority" by priority, then arrival.

    Raises:
        ConfigError: a value is out of range or contradicts another.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"

    def __post_init__(self) -> None:
        for name, least in (("max_num_seqs", 1), ("max_model_len", 2), ("block_size", 1), ("num_blocks", 1)):
            if getattr(self, name) < least:
                raise ConfigError(name, getattr(self, name), f"must be >= {least}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            problem = f"must be >= max_num_seqs ({self.max_num_seqs}), so that every running sequence gets its token"
            raise ConfigError("max_num_batched_tokens", self.max_num_batched_tokens, problem)
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError("policy", self.policy, "must be 'fcfs' or 'priority'")

    @property
    def context_len(self) -> int:
        """Maximum tokens of a request: the model's context, or what the blocks hold (the last token needs no block)."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges of this moment, and counters since the start.

    Attributes:
        num_running: requests that have started and are not waiting again.
        prefix_queries: prompt tokens of admitted requests.
        prefix_hits: those of them found in the prefix cache.
    """

    num_running: int
    num_waiting: int
    blocks_used: int
    num_blocks: int
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
