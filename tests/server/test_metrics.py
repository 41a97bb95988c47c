"""Series for Prometheus: vLLM's names with vLLM's meanings, ours for steps, and a dashboard that reads only these."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import Server

from phonograph.core.batch import DraftCounts
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.metrics.histogram import Histogram
from phonograph.engine.metrics.request_log import RequestLog
from phonograph.engine.metrics.step_log import StepLog
from phonograph.engine.process.calls import Prompt, Sample
from phonograph.kernels.triton.ranks.choose_sum import SumChoice
from phonograph.scheduling.scheduler_stats import SchedulerStats
from phonograph.server.observe.metrics import EngineCollector

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "phonograph.json"
NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:engine_sleep_state": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "phonograph:state_checkpoint_hits": "counter",
    "phonograph:state_checkpoint_evictions": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:prompt_tokens_by_source": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:admission_rejections": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_num_preemptions": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "phonograph:draft_choices": "counter",
    "phonograph:steps": "counter",
    "phonograph:step_tokens": "counter",
    "phonograph:padded_tokens": "counter",
    "phonograph:step_time_seconds": "histogram",
    "phonograph:attention_units": "counter",
    "phonograph:graphs": "gauge",
    "phonograph:graph_capture_retries": "gauge",
    "phonograph:graph_memory_bytes": "gauge",
    "phonograph:start_seconds": "gauge",
    "phonograph:engine_up": "gauge",
}
PROCESS = {
    "process_cpu_seconds": "counter",
    "process_max_fds": "gauge",
    "process_open_fds": "gauge",
    "process_resident_memory_bytes": "gauge",
    "process_start_time_seconds": "gauge",
    "process_virtual_memory_bytes": "gauge",
}
"""Metrics of the server's process, which have no model."""

Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


def read(server: Server) -> tuple[dict[str, str], Samples]:
    """Types by the names of the families, and values by the names of the samples and their labels."""
    types: dict[str, str] = {}
    values: Samples = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        types[family.name] = family.type
        for sample in family.samples:
            assert sample.labels.get("model_name") == (None if family.name in PROCESS else "demo")
            values.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return types, values


def change(before: Samples, after: Samples, name: str, **labels: str) -> float:
    """By how much the sum of the samples with these labels has grown."""

    def total(samples: Samples) -> float:
        return sum(value for key, value in samples.get(name, {}).items() if labels.items() <= dict(key).items())

    return total(after) - total(before)


def complete(server: Server, prompt: list[int], max_tokens: int, **more: Any) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, **more}
    assert server.post("/v1/completions", body).status_code == 200
    server.wait_until_idle()


def test_names_and_types(server: Server) -> None:
    complete(server, [5, 6, 7], 2)
    types, values = read(server)
    assert types == NAMES | PROCESS
    assert all(
        sum(values[f"{name}_total" if kind == "counter" else name].values()) > 0 for name, kind in PROCESS.items()
    )


def test_a_request_is_counted_once(server: Server) -> None:
    before = read(server)[1]
    steps_before = server.engine.num_steps
    complete(server, [9] * 33, 5, n=2)
    after = read(server)[1]
    assert change(before, after, "vllm:prompt_tokens_total") == 33
    assert change(before, after, "vllm:generation_tokens_total") == 10
    assert change(before, after, "vllm:request_success_total", finished_reason="length") == 2
    assert change(before, after, "vllm:request_success_total") == 2
    for name, count in (("time_to_first_token", 2), ("inter_token_latency", 8), ("e2e_request_latency", 2)):
        assert change(before, after, f"vllm:{name}_seconds_count") == count, name
        assert change(before, after, f"vllm:{name}_seconds_bucket", le="+Inf") == count, name
        assert 0 < change(before, after, f"vllm:{name}_seconds_sum") < 20 * count, name
    assert change(before, after, "vllm:request_prompt_tokens_sum") == 66
    assert change(before, after, "vllm:request_generation_tokens_sum") == 10
    # The second sample finds the prompt's full blocks, 16 tokens each.
    assert change(before, after, "vllm:prefix_cache_queries_total") == 66
    assert change(before, after, "vllm:prefix_cache_hits_total") >= 32
    steps = server.engine.num_steps - steps_before
    assert change(before, after, "phonograph:steps_total") == steps
    assert change(before, after, "phonograph:step_time_seconds_count") == steps
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [sum(after[f"vllm:{name}"].values()) for name in gauges] == [0, 0, 0]


def test_times_of_a_request_add_up(server: Server) -> None:
    """They are made from the same four moments: opened, admitted, first token, last token."""
    before = read(server)[1]
    complete(server, [8] * 40, 6)
    after = read(server)[1]

    def seconds(name: str) -> float:
        assert change(before, after, f"vllm:{name}_seconds_count") == 1, name
        return change(before, after, f"vllm:{name}_seconds_sum")

    queue, prefill, decode = (seconds(f"request_{part}_time") for part in ("queue", "prefill", "decode"))
    assert min(queue, prefill, decode) > 0
    assert seconds("request_inference_time") == pytest.approx(prefill + decode, rel=1e-6)
    assert seconds("request_time_per_output_token") == pytest.approx(decode / 5, rel=1e-6)
    assert change(before, after, "vllm:inter_token_latency_seconds_sum") == pytest.approx(decode, rel=1e-6)
    assert queue + prefill + decode <= seconds("e2e_request_latency")


def test_waiting_counts_as_queue_time(server: Server) -> None:
    """Four requests run at one time; the fifth waits for them."""
    before = read(server)[1]
    bodies = {"prompt": [[10 + number] * 4 for number in range(5)], "max_tokens": 60, "ignore_eos": True}
    assert server.post("/v1/completions", bodies).status_code == 200
    server.wait_until_idle()
    after = read(server)[1]
    inference = change(before, after, "vllm:request_inference_time_seconds_sum") / 5
    assert change(before, after, "vllm:request_queue_time_seconds_sum") > inference / 2


def test_what_requests_ask_for_and_what_the_cache_saves(server: Server) -> None:
    complete(server, [7] * 33, 1)
    before = read(server)[1]
    complete(server, [7] * 33, 4, n=3)
    complete(server, [7], 2)
    after = read(server)[1]

    def moved(name: str, **labels: str) -> float:
        return change(before, after, f"vllm:{name}", **labels)

    assert moved("prompt_tokens_cached_total") == moved("prompt_tokens_by_source_total", source="local_cache_hit") == 32
    assert moved("prompt_tokens_by_source_total", source="local_compute") == 2
    assert moved("request_prefill_kv_computed_tokens_sum") == 3 * 1 + 1
    assert moved("request_params_n_sum") == 4 and moved("request_params_n_count") == 2
    assert moved("request_params_max_tokens_sum") == 3 * 4 + 2
    assert moved("request_max_num_generation_tokens_sum") == 4 + 2
    assert moved("request_num_preemptions_count") == 4
    steps = change(before, after, "phonograph:steps_total")
    assert moved("iteration_tokens_total_count") == steps
    assert moved("iteration_tokens_total_sum") == change(before, after, "phonograph:step_tokens_total")
    ((labels, value),) = after["vllm:cache_config_info"].items()
    assert value == 1 and dict(labels) == {
        "model_name": "demo",
        "engine": "0",
        "block_size": str(server.engine.facts.block_size),
        "cache_dtype": "auto",
        "num_gpu_blocks": str(server.engine.stats.num_blocks),
        "gpu_memory_utilization": "0.9",
        "kv_cache_memory_bytes": "None",
        "enable_prefix_caching": "True",
    }


def test_rejections_are_counted_by_limit(serve_with: Callable[..., Server]) -> None:
    server = serve_with(max_queued_requests=0, max_queued_bytes=2000)
    before = read(server)[1]
    with server.client().completions.create(
        model="demo", prompt="a", n=4, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        assert server.post("/v1/completions", {"prompt": "b"}).status_code == 429
    assert server.post("/v1/completions", {"prompt": "b" * 3000}).status_code == 429
    server.wait_until_idle()
    after = read(server)[1]
    for reason in ("max_num_queued_reqs", "max_queued_bytes"):
        assert change(before, after, "vllm:admission_rejections_total", reason=reason) == 1


def test_gauges_and_histograms_of_rare_states() -> None:
    """Requests that wait for a grammar, and preemptions, which the small model of the other tests does not see."""
    stats = SchedulerStats(
        num_running=1,
        num_waiting=2,
        num_deferred=3,
        blocks_used=1,
        num_blocks=4,
        num_preemptions=5,
        prefix_queries=0,
        prefix_hits=0,
        drafts=DraftCounts(4, 12, 7, (4, 3), (("gain", 4), ("no drafts", 9))),
    )
    log = RequestLog()
    sample = Sample(0, None, SamplingParams(detokenize=False), [1])
    sample.num_preemptions = 2
    sample.grow([5], None, "length", None)
    log.grown(Prompt(0, [1], [sample], num_growing=1), sample, 1, made=2.0, seen=2.0)
    sums = (SumChoice("one-shot", 1, 64, "small"), SumChoice("nccl", 65, None, "large"))
    facts = MagicMock(block_size=16, graph_memory_bytes=0, start_seconds=0.0, sums=sums)
    counts = {"expert_load": {}, "death": None, "engines": None}
    engine = MagicMock(stats=stats, requests=log, facts=facts, steps=StepLog(), **counts)
    values = {
        (sample.name, *filter(None, map(sample.labels.get, ("reason", "position", "kernel", "rows")))): sample.value
        for family in EngineCollector(engine, "demo", {}).collect()
        for sample in family.samples
    }
    assert values["vllm:num_requests_waiting",] == 5
    assert values["vllm:num_requests_waiting_by_reason", "capacity"] == 2
    assert values["vllm:num_requests_waiting_by_reason", "deferred"] == 3
    assert values["vllm:request_num_preemptions_sum",] == 2
    assert values["vllm:num_preemptions_total",] == 5
    drafts = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert [values[f"vllm:spec_decode_{name}_total",] for name in drafts] == [4, 12, 7]
    accepted = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [values[accepted, position] for position in ("0", "1")] == [4, 3]
    assert values["phonograph:draft_choices_total", "no drafts"] == 9
    assert values["phonograph:sums_over_ranks_info", "one-shot", "1 to 64"] == 1
    assert values["phonograph:sums_over_ranks_info", "nccl", "65 and more"] == 1


def test_steps_are_counted_by_graph(server: Server) -> None:
    """Graphs hold 1, 2, 4 and 16 tokens. Prompts that differ in length only must not make more series."""
    complete(server, [11] * 17, 2)
    before = read(server)[1]
    complete(server, [21, 22, 23], 3)
    complete(server, [31] * 20, 1)
    complete(server, [41] * 21, 1)
    after = read(server)[1]
    steps = "phonograph:steps_total"
    assert change(before, after, steps, mode="FULL", kind="decode") == 2
    assert change(before, after, steps, mode="FULL", kind="prefill", reason="prefill or mixed batch") == 1
    reason = "more tokens than the largest graph holds"
    assert change(before, after, steps, mode="NONE", kind="prefill", reason=reason) == 2
    assert change(before, after, "phonograph:padded_tokens_total") == 1
    assert change(before, after, "phonograph:step_tokens_total") == 3 + 2 + 20 + 21
    assert len(after[steps]) <= len(before[steps]) + 1
    assert not any(re.search(r"\b2[01]\b", text) for key in after[steps] for _, text in key)


def test_requests_that_do_not_end_are_aborted(server: Server) -> None:
    before = read(server)[1]
    with pytest.raises(httpx.ReadTimeout):
        body = {"prompt": "Tom", "max_tokens": 1000, "ignore_eos": True, "n": 3}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.5)
    server.wait_until_idle()
    after = read(server)[1]
    assert change(before, after, "vllm:request_success_total", finished_reason="abort") == 3
    assert change(before, after, "vllm:e2e_request_latency_seconds_count") == 0


def test_open_metrics_and_no_globals(server: Server) -> None:
    answer = server.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text") and answer.text.endswith("# EOF\n")
    ours = [family.name for family in prometheus_client.REGISTRY.collect() if family.name in NAMES]
    assert ours == []


def test_histogram() -> None:
    histogram = Histogram((1, 2.5, 10))
    for value, count in ((0, 1), (1, 2), (1.5, 1), (10, 1), (11, 3)):
        histogram.observe(value, count)
    assert histogram.buckets() == [("1", 3), ("2.5", 4), ("10", 5), ("+Inf", 8)]
    assert histogram.total == 46.5 and histogram.count == 8


def asked_names(queries: list[str]) -> Iterator[str]:
    for query in queries:
        yield from re.findall(r"\b(?:vllm|phonograph):\w+", query)


def exists(name: str) -> bool:
    """Return True if Prometheus gets a sample of this name."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return any(name == family + suffix for family, kind in NAMES.items() for suffix in suffixes[kind])


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [json.dumps(variable["query"]) for variable in dashboard["templating"]["list"]]
    names = set(asked_names(queries))
    assert [name for name in sorted(names) if not exists(name)] == []
    assert {name for name in NAMES if not any(asked.startswith(name) for asked in names)} == set()
    assert not exists("vllm:prompt_tokens") and not exists("phonograph:steps") and not exists("vllm:nothing_total")
    labels = {"model_name", "mode", "kind", "reason", "finished_reason", "le", "source", "sleep_state"}
    labels |= {"block_size", "cache_dtype", "num_gpu_blocks", "position"}
    for query in queries:
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert set(group.split(", ")) <= labels, query
