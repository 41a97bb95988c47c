"""Series for Prometheus: vLLM's names with vLLM's meanings, ours for steps, and a dashboard that reads only these."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import Server

from phonograph.engine.metrics.histogram import Histogram

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "phonograph.json"
NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "phonograph:steps": "counter",
    "phonograph:step_tokens": "counter",
    "phonograph:padded_tokens": "counter",
    "phonograph:step_time_seconds": "histogram",
    "phonograph:graphs": "gauge",
    "phonograph:graph_capture_retries": "gauge",
    "phonograph:graph_memory_bytes": "gauge",
    "phonograph:start_seconds": "gauge",
    "phonograph:engine_up": "gauge",
}

Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


def read(server: Server) -> tuple[dict[str, str], Samples]:
    """Types by the names of the families, and values by the names of the samples and their labels."""
    types: dict[str, str] = {}
    values: Samples = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        types[family.name] = family.type
        for sample in family.samples:
            assert sample.labels["model_name"] == "demo"
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
    assert read(server)[0] == NAMES


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
    labels = {"model_name", "mode", "kind", "reason", "finished_reason", "le"}
    for query in queries:
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert set(group.split(", ")) <= labels, query
