"""/metrics for Prometheus, made at each scrape from the engine's counts.

Metrics that vLLM has too have its names, so that its dashboards work. The others begin with `phonograph:`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from fastapi import APIRouter, Request
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import Response

from phonograph.core.request import FinishReason
from phonograph.engine.async_llm import AsyncLLM, SchedulerStats

router = APIRouter()

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily)
Numbers = TypeVar("Numbers", CounterMetricFamily, GaugeMetricFamily)
STEP_LABELS = ("engine", "mode", "kind", "reason")


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Return the metrics in the format that the client accepts: Prometheus text or OpenMetrics."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(request.app.state.serving.registry), media_type=content_type)


class EngineCollector(Collector):
    """Counts of an engine as Prometheus metrics.

    Args:
        engine: the engine.
        model_name: label of every metric.
        rejected: requests for which a queue had no room, by the limit.
    """

    def __init__(self, engine: AsyncLLM, model_name: str, rejected: Mapping[str, int]) -> None:
        self._engine = engine
        self._model_name = model_name
        self._rejected = rejected

    def collect(self) -> Iterable[Metric]:
        yield from self._scheduler()
        yield from self._requests()
        yield from self._histograms()
        yield from self._steps()
        yield from self._experts()
        yield from self._pool()

    @property
    def _stats(self) -> dict[str, SchedulerStats]:
        """Statistics of each engine."""
        pool = self._engine.engines
        if pool is None:
            return {"0": self._engine.stats}
        return {str(rank): one.stats for rank, one in enumerate(pool.members) if one.stats is not None}

    def _scheduler(self) -> Iterator[Metric]:
        yield self._gauges("vllm:num_requests_running", "Running requests.", lambda stats: stats.num_running)
        yield self._gauges(
            "vllm:num_requests_waiting", "Queued requests.", lambda stats: stats.num_waiting + stats.num_deferred
        )
        yield self._by_engine(
            GaugeMetricFamily,
            "vllm:num_requests_waiting_by_reason",
            "Queued requests: capacity waits for a slot or blocks, deferred for a grammar.",
            lambda stats: {"capacity": stats.num_waiting, "deferred": stats.num_deferred},
            "reason",
        )
        yield self._gauges(
            "vllm:kv_cache_usage_perc",
            "Used fraction of the KV cache, 0 to 1.",
            lambda stats: stats.blocks_used / stats.num_blocks,
        )
        yield self._counters(
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            lambda stats: stats.prefix_queries,
        )
        yield self._counters(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda stats: stats.prefix_hits
        )
        yield self._counters(
            "phonograph:state_checkpoint_hits",
            "Checkpoints of states from which a request started; in models whose layers have states.",
            lambda stats: stats.checkpoints.hits,
        )
        yield self._counters(
            "phonograph:state_checkpoint_evictions",
            "Checkpoints of states whose place another one took.",
            lambda stats: stats.checkpoints.evictions,
        )
        yield self._counters(
            "vllm:spec_decode_num_drafts", "Decodes that verified drafts.", lambda stats: stats.drafts.decodes
        )
        yield self._counters(
            "vllm:spec_decode_num_draft_tokens", "Drafts that were verified.", lambda stats: stats.drafts.verified
        )
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens", "Drafts that were kept.", lambda stats: stats.drafts.accepted
        )
        yield self._counters("vllm:num_preemptions", "Preempted requests.", lambda stats: stats.num_preemptions)
        yield self._by_engine(
            CounterMetricFamily,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were kept, by position; the first draft has position 0.",
            lambda stats: {str(place): count for place, count in enumerate(stats.drafts.accepted_by_position)},
            "position",
        )
        yield self._by_engine(
            CounterMetricFamily,
            "phonograph:draft_choices",
            "Steps of decodes by the reason for the number of their drafts; with speculation only.",
            lambda stats: dict(stats.drafts.choices),
            "reason",
        )
        yield self._cache_config()
        level = self._engine.sleep_level
        yield self._by_label(
            GaugeMetricFamily,
            "vllm:engine_sleep_state",
            "1 for the present state: awake, asleep at level 1, asleep at level 2.",
            "sleep_state",
            {name: int(level == place) for place, name in enumerate(("awake", "weights_offloaded", "discard_all"))},
        )

    def _cache_config(self) -> Metric:
        """Return the settings of the KV cache as labels, with the value 1."""
        config = self._engine.config
        names = ("gpu_memory_utilization", "kv_cache_memory_bytes", "enable_prefix_caching")
        facts = {
            "block_size": self._engine.facts.block_size,
            "cache_dtype": config.kv_cache_dtype,
            **{name: getattr(config, name) for name in names},
        }
        labels = ("engine", "num_gpu_blocks", *facts)
        family = self._family(
            GaugeMetricFamily, "vllm:cache_config_info", "Settings of the KV cache, as labels.", *labels
        )
        for engine, stats in self._stats.items():
            family.add_metric([self._model_name, engine, str(stats.num_blocks), *map(str, facts.values())], 1)
        return family

    def _pool(self) -> Iterator[Metric]:
        """Yield what there is of several engines only."""
        pool = self._engine.engines
        if pool is None:
            return
        restarts = self._family(
            CounterMetricFamily, "phonograph:engine_restarts", "Starts of an engine after it had ended.", "engine"
        )
        for rank, member in enumerate(pool.members):
            restarts.add_metric([self._model_name, str(rank)], member.num_restarts)
        routed = self._family(
            CounterMetricFamily,
            "phonograph:routed_prompts",
            "Prompts by engine and the reason for it; with several engines only.",
            "engine",
            "reason",
        )
        for (rank, reason), count in pool.router.counts.items():
            routed.add_metric([self._model_name, str(rank), reason], count)
        yield from (restarts, routed)

    def _requests(self) -> Iterator[Metric]:
        log = self._engine.requests
        yield self._counter("vllm:prompt_tokens", "Prompt tokens, including cached ones.", log.num_prompt_tokens)
        yield self._counter("vllm:prompt_tokens_cached", "Prompt tokens from the prefix cache.", log.num_cached_tokens)
        sources = {
            "local_compute": log.num_prompt_tokens - log.num_cached_tokens,
            "local_cache_hit": log.num_cached_tokens,
        }
        yield self._by_label(
            CounterMetricFamily, "vllm:prompt_tokens_by_source", "Prompt tokens by source.", "source", sources
        )
        yield self._counter("vllm:generation_tokens", "Generated tokens.", log.num_output_tokens)
        yield self._by_label(
            CounterMetricFamily,
            "vllm:request_success",
            "Ended requests by finish reason.",
            "finished_reason",
            log.num_ended,
        )
        yield self._by_label(
            CounterMetricFamily,
            "vllm:admission_rejections",
            "Requests for which a queue had no room, by its limit.",
            "reason",
            self._rejected,
        )

    def _histograms(self) -> Iterator[Metric]:
        log = self._engine.requests
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "Seconds from a request to its first token.", log.first_token),
            ("vllm:inter_token_latency_seconds", "Seconds between tokens of a request.", log.inter_token),
            ("vllm:request_time_per_output_token_seconds", "Mean of these seconds of a request.", log.per_token),
            ("vllm:e2e_request_latency_seconds", "Seconds from a request to its last token.", log.whole),
            ("vllm:request_queue_time_seconds", "Seconds from a request to its admission.", log.queue),
            ("vllm:request_prefill_time_seconds", "Seconds from the admission to the first token.", log.prefill),
            ("vllm:request_decode_time_seconds", "Seconds from the first token to the last one.", log.decode),
            ("vllm:request_inference_time_seconds", "Seconds from the admission to the last token.", log.inference),
            ("vllm:request_prompt_tokens", "Prompt tokens of a request.", log.prompt_lens),
            ("vllm:request_prefill_kv_computed_tokens", "Prompt tokens without cached ones.", log.computed_lens),
            ("vllm:request_generation_tokens", "Generated tokens of a request.", log.output_lens),
            ("vllm:request_max_num_generation_tokens", "Tokens of the longest sample of a prompt.", log.longest),
            ("vllm:request_params_n", "Samples of a prompt.", log.samples),
            ("vllm:request_params_max_tokens", "max_tokens of a request that sets it.", log.max_tokens),
            ("vllm:request_num_preemptions", "Preemptions of a request.", log.preemptions),
            ("vllm:iteration_tokens_total", "Tokens of a step, without padding.", self._engine.steps.tokens),
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
            values = [self._model_name, str(tally.engine), tally.mode, tally.kind, tally.cause]
            steps.add_metric(values, tally.num_steps)
            tokens.add_metric(values, tally.num_tokens)
            padded.add_metric(values, tally.num_padded)
            seconds.add_metric(values, tally.seconds.buckets(), sum_value=tally.seconds.total)
        yield from (steps, tokens, padded, seconds)
        yield self._by_label(
            CounterMetricFamily,
            "phonograph:attention_units",
            "Units of attention of short queries in a layer: of prefixes that sequences share, and own ones; 0 where "
            "the backend shares none.",
            "kind",
            {"shared": log.shared_units, "own": log.own_units},
        )
        if facts.sums:
            sums = self._family(
                GaugeMetricFamily, "phonograph:sums_over_ranks_info", "Kernels that sum over ranks.", "kernel", "rows"
            )
            for one in facts.sums:
                sums.add_metric([self._model_name, one.kernel, one.rows], 1)
            yield sums
        num_graphs = len(facts.captures.largest_first())
        yield self._gauge("phonograph:graphs", "Captured graphs.", num_graphs)
        num_retries = len(facts.capture_retries)
        yield self._gauge("phonograph:graph_capture_retries", "Graphs captured at the second attempt.", num_retries)
        yield self._gauge("phonograph:graph_memory_bytes", "Memory of the graphs in bytes.", facts.graph_memory_bytes)
        yield self._gauge("phonograph:start_seconds", "Duration of the engine's start in seconds.", facts.start_seconds)
        up = self._family(GaugeMetricFamily, "phonograph:engine_up", "1 while the engine runs.", "engine")
        pool, lives = self._engine.engines, self._engine.death is None
        for rank, one in enumerate([lives] if pool is None else [member.up for member in pool.members]):
            up.add_metric([self._model_name, str(rank)], int(one))
        yield up

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

    def _by_label(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, int] | Mapping[FinishReason, int],
    ) -> Metric:
        family = kind(name, text, labels=("model_name", label))
        for value, count in values.items():
            family.add_metric([self._model_name, value], count)
        return family

    def _by_engine(
        self,
        kind: type[Numbers],
        name: str,
        text: str,
        values: Callable[[SchedulerStats], Mapping[str, float]],
        *labels: str,
    ) -> Metric:
        """Return a metric of each engine; without a label the only key of its values is empty."""
        family = self._family(kind, name, text, "engine", *labels)
        for engine, stats in self._stats.items():
            for label, value in values(stats).items():
                family.add_metric([self._model_name, engine, *([label] if labels else [])], value)
        return family

    def _gauges(self, name: str, text: str, value: Callable[[SchedulerStats], float]) -> Metric:
        return self._by_engine(GaugeMetricFamily, name, text, lambda stats: {"": value(stats)})

    def _counters(self, name: str, text: str, value: Callable[[SchedulerStats], float]) -> Metric:
        return self._by_engine(CounterMetricFamily, name, text, lambda stats: {"": value(stats)})

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._value(GaugeMetricFamily, name, text, value)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._value(CounterMetricFamily, name, text, value)

    def _value(self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, value: float) -> Metric:
        family = kind(name, text, labels=("model_name",))
        family.add_metric([self._model_name], value)
        return family
