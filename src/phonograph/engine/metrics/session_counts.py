"""Counts of an offline engine's requests, and the metrics of `LLM.get_metrics`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from phonograph.core.request import FinishReason
from phonograph.scheduling.scheduler_stats import SchedulerStats


class MetricValue(NamedTuple):
    """One metric with its value.

    Attributes:
        name: name in the server's /metrics, which is vLLM's where it has one.
        kind: "counter" or "gauge".
        value: counters count from the start of the engine.
        labels: labels that tell it from others of its name.
    """

    name: str
    kind: Literal["counter", "gauge"]
    value: float
    labels: Mapping[str, str]


@dataclass(slots=True)
class SessionCounts:
    """Counts of ended samples; tokens of a prompt count when its first sample ends."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_ended: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))


def metric_values(stats: SchedulerStats, counts: SessionCounts, steps: Mapping[str, int]) -> Iterator[MetricValue]:
    """Yield the metrics of an engine.

    Args:
        stats: state of the scheduler.
        counts: ended requests.
        steps: steps by kind of decision.
    """
    for name, value in (
        ("vllm:num_requests_running", stats.num_running),
        ("vllm:num_requests_waiting", stats.num_waiting),
        ("vllm:kv_cache_usage_perc", stats.blocks_used / stats.num_blocks),
    ):
        yield MetricValue(name, "gauge", value, {})
    for name, value in (
        ("vllm:prefix_cache_queries", stats.prefix_queries),
        ("vllm:prefix_cache_hits", stats.prefix_hits),
        ("phonograph:state_checkpoint_hits", stats.checkpoints.hits),
        ("phonograph:state_checkpoint_evictions", stats.checkpoints.evictions),
        ("vllm:num_preemptions", stats.num_preemptions),
        ("vllm:prompt_tokens", counts.num_prompt_tokens),
        ("vllm:generation_tokens", counts.num_output_tokens),
    ):
        yield MetricValue(name, "counter", value, {})
    for reason, count in counts.num_ended.items():
        yield MetricValue("vllm:request_success", "counter", count, {"finished_reason": reason})
    for decision, count in steps.items():
        yield MetricValue("phonograph:steps", "counter", count, {"decision": decision})
