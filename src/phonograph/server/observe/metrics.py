"""/metrics for Prometheus, made at each scrape from the engine's counts.

Metrics that vLLM has too have its names, so that its dashboards work. The others begin with `phonograph:`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from fastapi import APIRouter, Request
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import Response

from phonograph.engine.async_llm import AsyncLLM

router = APIRouter()

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily)
STEP_LABELS = ("mode", "kind", "reason")


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Return the metrics in the format that the client accepts: Prometheus text or OpenMetrics."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(request.app.state.serving.registry), media_type=content_type)


class EngineCollector(Collector):
    """Counts of an engine as Prometheus metrics."""

    def __init__(self, engine: AsyncLLM, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        yield from self._scheduler()
        yield from self._requests()
        yield from self._steps()
        yield from self._experts()

    def _scheduler(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield self._gauge("vllm:num_requests_running", "Running requests.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Queued requests.", stats.num_waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Used fraction of the KV cache, 0 to 1.",
            stats.blocks_used / stats.num_blocks,
        )
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries
        )
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits)
        drafts = stats.drafts
        yield self._counter("vllm:spec_decode_num_drafts", "Decodes that verified drafts.", drafts.decodes)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Drafts that were verified.", drafts.verified)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Drafts that were kept.", drafts.accepted)
        yield self._counter("vllm:num_preemptions", "Preempted requests.", stats.num_preemptions)

    def _requests(self) -> Iterator[Metric]:
        log = self._engine.requests
        yield self._counter("vllm:prompt_tokens", "Prompt tokens, including cached ones.", log.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Generated tokens.", log.num_output_tokens)
        ended = self._family(
            CounterMetricFamily, "vllm:request_success", "Ended requests by finish reason.", "finished_reason"
        )
        for reason, count in log.num_ended.items():
            ended.add_metric([self._model_name, reason], count)
        yield ended
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "Seconds from a request to its first token.", log.first_token),
            ("vllm:inter_token_latency_seconds", "Seconds between tokens of a request.", log.inter_token),
            ("vllm:e2e_request_latency_seconds", "Seconds from a request to its last token.", log.whole),
            ("vllm:request_prompt_tokens", "Prompt tokens of a request.", log.prompt_lens),
            ("vllm:request_generation_tokens", "Generated tokens of a request.", log.output_lens),
        ):
            family = self._family(HistogramMetricFamily, name, text)
            family.add_metric([self._model_name], histogram.buckets(), sum_value=histogram.total)
            yield family

    def _steps(self) -> Iterator[Metric]:
        facts, log = self._engine.facts, self._engine.steps
        steps = self._family(
            CounterMetricFamily, "phonograph:steps", "Steps by graph mode, kind of batch and reason.", *STEP_LABELS
        )
        tokens = self._family(
            CounterMetricFamily, "phonograph:step_tokens", "Tokens computed in steps, without padding.", *STEP_LABELS
        )
        padded = self._family(
            CounterMetricFamily, "phonograph:padded_tokens", "Padding tokens of graphs.", *STEP_LABELS
        )
        seconds = self._family(
            HistogramMetricFamily,
            "phonograph:step_time_seconds",
            "Seconds from when a step had the device to itself until its tokens were read.",
            *STEP_LABELS,
        )
        for tally in log.tallies:
            values = [self._model_name, tally.mode, tally.kind, tally.cause]
            steps.add_metric(values, tally.num_steps)
            tokens.add_metric(values, tally.num_tokens)
            padded.add_metric(values, tally.num_padded)
            seconds.add_metric(values, tally.seconds.buckets(), sum_value=tally.seconds.total)
        yield from (steps, tokens, padded, seconds)
        num_graphs = len(facts.captures.largest_first())
        yield self._gauge("phonograph:graphs", "Captured graphs.", num_graphs)
        num_retries = len(facts.capture_retries)
        yield self._gauge("phonograph:graph_capture_retries", "Graphs captured at the second attempt.", num_retries)
        yield self._gauge("phonograph:graph_memory_bytes", "Memory of the graphs in bytes.", facts.graph_memory_bytes)
        yield self._gauge("phonograph:start_seconds", "Duration of the engine's start in seconds.", facts.start_seconds)
        yield self._gauge("phonograph:engine_up", "1 while the engine runs.", int(self._engine.death is None))

    def _experts(self) -> Iterator[Metric]:
        """Yield the load of experts, with `expert_load_metrics` only."""
        load = self._engine.expert_load
        if not load:
            return
        pairs = self._family(
            CounterMetricFamily,
            "phonograph:expert_tokens",
            "Tokens of each expert by layer, without padding; with expert_load_metrics only.",
            "layer",
            "expert",
        )
        for layer, counts in load.items():
            for expert, count in enumerate(counts):
                pairs.add_metric([self._model_name, str(layer), str(expert)], count)
        yield pairs

    def _family(self, kind: type[Family], name: str, text: str, *labels: str) -> Family:
        return kind(name, text, labels=("model_name", *labels))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._value(GaugeMetricFamily, name, text, value)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._value(CounterMetricFamily, name, text, value)

    def _value(self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, value: float) -> Metric:
        family = kind(name, text, labels=("model_name",))
        family.add_metric([self._model_name], value)
        return family
