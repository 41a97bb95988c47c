"""OpenTelemetry traces: one for each request, with the client's id, and none of their troubles for requests."""

from __future__ import annotations

import importlib.util
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from servers import EngineThread, Server, serving

from phonograph.config.server_config import ServerConfig
from phonograph.errors import ConfigError
from phonograph.server.observe.traces import Traces, span_exporter

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporters() -> Any:
    """Return the module with the exporter to memory."""
    return pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs the extra otel")


@pytest.fixture
def traced(engine_thread: EngineThread) -> Iterator[Callable[..., tuple[Server, Traces]]]:
    """Make a server that sends its traces to an exporter."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def make(exporter: Any, **settings: Any) -> tuple[Server, Traces]:
            traces = Traces(exporter, engine_thread.engine.result().steps, "demo")
            stack.callback(traces.close)
            config = ServerConfig(**settings)
            server = stack.enter_context(
                serving(engine_thread, config, change=lambda made: setattr(made, "traces", traces))
            )
            return server, traces

        yield make


def spans_of(exporter: Any, traces: Traces) -> dict[str, list[Any]]:
    """Return the spans by name that have been sent."""
    traces._provider.force_flush()
    found: dict[str, list[Any]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def test_a_request_is_one_trace_below_the_clients_span(
    traced: Any, exporters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    exporter = exporters.InMemorySpanExporter()
    server, traces = traced(exporter)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    body = {"prompt": [5] * 20, "max_tokens": 4, "ignore_eos": True, "temperature": 0.5, "n": 2}
    before = time.time_ns()
    assert server.post("/v1/completions", body, headers=headers).status_code == 200
    server.wait_until_idle()
    found = spans_of(exporter, traces)
    assert {name: len(spans) for name, spans in found.items()} == {
        "text_completion demo": 1,
        "queue": 2,
        "prefill": 2,
        "decode": 2,
    }
    (root,) = found["text_completion demo"]
    assert f"{root.context.trace_id:032x}" == TRACE and f"{root.parent.span_id:016x}" == PARENT
    assert root.resource.attributes["service.name"] == "ours"
    assert root.kind.name == "SERVER" and root.status.status_code.name == "UNSET"
    attributes = dict(root.attributes)
    assert 0 < attributes.pop("gen_ai.response.time_to_first_chunk") < 10
    graphs = {name: count for name, count in attributes.items() if name.startswith("phonograph.steps.")}
    assert graphs and sum(graphs.values()) >= 4
    assert {name: value for name, value in attributes.items() if name not in graphs} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "phonograph",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": attributes["gen_ai.usage.cache_read.input_tokens"],
        "phonograph.request.id": "mine",
    }
    for sample in range(2):
        queue, prefill, decode = (found[name][sample] for name in ("queue", "prefill", "decode"))
        times = [queue.start_time, queue.end_time, prefill.end_time, decode.end_time, root.end_time, time.time_ns()]
        assert times == sorted(times) and before <= queue.start_time == root.start_time + 0
        assert queue.end_time == prefill.start_time and prefill.end_time == decode.start_time
        assert {span.parent.span_id for span in (queue, prefill, decode)} == {root.context.span_id}
        assert {f"{span.context.trace_id:032x}" for span in (queue, prefill, decode)} == {TRACE}


@pytest.mark.parametrize(
    "value",
    ["", "rubbish", "00-" + "0" * 32 + f"-{PARENT}-01", f"00-{TRACE}-{PARENT}", "é".encode("latin-1"), "x" * 5000],
)
def test_a_traceparent_of_rubbish_is_as_none(value: str | bytes, traced: Any, exporters: Any) -> None:
    exporter = exporters.InMemorySpanExporter()
    server, traces = traced(exporter)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    assert server.post("/v1/chat/completions", chat, headers={"traceparent": value}).status_code == 200
    server.wait_until_idle()
    (root,) = spans_of(exporter, traces)["chat demo"]
    assert root.parent is None and root.context.trace_id


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_operations_have_their_names_behind_a_proxy(prefix: str, traced: Any, exporters: Any) -> None:
    exporter = exporters.InMemorySpanExporter()
    server, traces = traced(exporter, root_path="/llm")
    assert server.post(f"{prefix}/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    server.wait_until_idle()
    assert "text_completion demo" in spans_of(exporter, traces)


def test_a_request_that_does_not_complete_has_a_trace_too(traced: Any, exporters: Any) -> None:
    exporter = exporters.InMemorySpanExporter()
    server, traces = traced(exporter)
    with pytest.raises(httpx.ReadTimeout):
        body = {"prompt": "Tom", "max_tokens": 1000, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    server.wait_until_idle()
    (root,) = spans_of(exporter, traces)["text_completion demo"]
    assert root.status.status_code.name == "ERROR"
    assert root.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_a_collector_that_is_down_harms_no_request_and_is_one_warning(
    traced: Any, exporters: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        server, traces = traced(span_exporter(ServerConfig(otlp_traces_endpoint=endpoint)))
        caplog.set_level(logging.WARNING, logger="phonograph")
        for _ in range(3):
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
            server.wait_until_idle()
            traces._provider.force_flush()
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("phonograph")]
    assert ours == ["traces are lost: the collector cannot be reached; requests are served without them"]


def test_spans_arrive_at_a_collector(traced: Any, exporters: Any) -> None:
    """The endpoint may be given without the path of the protocol."""
    received: list[tuple[str, int]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            received.append((self.path, len(self.rfile.read(length))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        for given in (endpoint, f"{endpoint}/", f"{endpoint}/other/traces"):
            server, traces = traced(span_exporter(ServerConfig(otlp_traces_endpoint=given)))
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
            server.wait_until_idle()
            traces._provider.force_flush()
        collector.shutdown()
    assert [path for path, _ in received] == ["/v1/traces", "/v1/traces", "/other/traces"]
    assert all(size > 100 for _, size in received)


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", "x"])
def test_an_endpoint_that_is_no_url_is_named(endpoint: str, exporters: Any) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint=.*must be a URL such as http://localhost:4318"):
        span_exporter(ServerConfig(otlp_traces_endpoint=endpoint))


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint=.*pip install 'phonograph\[otel\]'"):
        span_exporter(ServerConfig(otlp_traces_endpoint="http://localhost:4318"))
    assert span_exporter(ServerConfig()) is None
