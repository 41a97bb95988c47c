"""OpenTelemetry traces of requests, with --otlp-traces-endpoint. Needs the packages of the extra `otel`.

A request is one trace: a span of the server, and in it the queue, the prefill and the decode of each sample. The spans
are made at the end of the request from times that the engine records anyway, so that they cost its steps nothing.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from phonograph import __version__
from phonograph.config.server_config import ServerConfig
from phonograph.core.pooling_params import PoolingParams
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.metrics.step_log import StepLog
from phonograph.engine.process.calls import Call, Sample
from phonograph.errors import ConfigError
from phonograph.server.observe.logs import REQUEST_ID

log = logging.getLogger(__name__)

EXPORT_SECONDS = 5
"""Timeout of one attempt to reach the collector, and of the last one at the end."""
OPERATIONS = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"), "chat"),
    **dict.fromkeys(("/v1/completions", "/api/generate"), "text_completion"),
    **dict.fromkeys(("/v1/embeddings", "/v2/embed"), "embeddings"),
}
"""Names of the GenAI conventions for endpoints."""
REQUESTED = ("temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "presence_penalty", "seed")
"""Sampling parameters with a name in the GenAI conventions, `gen_ai.request.NAME`."""


def span_exporter(config: ServerConfig) -> Any:
    """Return the exporter to the collector in the settings, or None without one.

    Raises:
        ConfigError: the address is no URL, or the packages are missing.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return None
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None or importlib.util.find_spec("opentelemetry.sdk") is None:
        problem = "needs packages that are not installed; pip install 'phonograph[otel]'"
        raise ConfigError("otlp_traces_endpoint", endpoint, problem)
    address = urlsplit(endpoint)
    if address.scheme not in ("http", "https") or not address.netloc:
        raise ConfigError("otlp_traces_endpoint", endpoint, "must be a URL such as http://localhost:4318")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    url = endpoint if address.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    return OTLPSpanExporter(endpoint=url, timeout=EXPORT_SECONDS)


class Traces:
    """Makes the spans of requests, and sends them from a thread of its own.

    Args:
        exporter: sends spans.
        steps: the engine's steps.
        model_name: name of the model for clients.
    """

    def __init__(self, exporter: Any, steps: StepLog, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", "phonograph")
        resource = Resource.create({"service.name": name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_warn_once(exporter)))
        self._tracer = self._provider.get_tracer("phonograph", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._steps = steps
        self._model_name = model_name

    def close(self) -> None:
        """Send the last spans, and stop."""
        self._provider.shutdown()

    def follow(self, call: Call, params: SamplingParams | PoolingParams, path: str, headers: Mapping[str, str]) -> None:
        """Make the spans of a call when it ends. A `traceparent` among the headers names the parent."""
        # A value that is not valid is as none.
        parent = self._propagator.extract({"traceparent": headers.get("traceparent", "")})
        requested = {
            f"gen_ai.request.{name}": value for name in REQUESTED if (value := getattr(params, name, None)) is not None
        }
        operation = OPERATIONS.get(path, path)
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "phonograph",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.choice.count": getattr(params, "n", 1),
            "phonograph.request.id": REQUEST_ID.get() or "",
            **requested,
        }

        def trace(ended: Call) -> None:
            try:
                self._trace(ended, f"{operation} {self._model_name}", parent, attributes)
            except Exception:  # a trace that cannot be made must not harm its request
                log.exception("the trace of a request could not be made")

        call.at_end(trace)

    def _trace(self, call: Call, name: str, parent: Any, attributes: dict[str, Any]) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        offset = time.time() - time.monotonic()

        def nanoseconds(moment: float) -> int:
            return int((moment + offset) * 1e9)

        end = time.monotonic()
        opened = call.prompts[0].opened
        root = self._tracer.start_span(
            name, parent, kind=SpanKind.SERVER, attributes=attributes, start_time=nanoseconds(opened)
        )
        root.set_attributes(_usage(call))
        admitted = min((one.admitted for one in call.samples if one.admitted is not None), default=None)
        if admitted is not None:
            for label, count in self._steps.labels_since(admitted).items():
                root.set_attribute(f"phonograph.steps.{label.replace(' ', '_')}", count)
        if not call.finished:
            root.set_status(Status(StatusCode.ERROR, "the request did not complete"))
        inside = set_span_in_context(root)
        for prompt in call.prompts:
            for sample in prompt.samples:
                for part, start, stop in _parts(prompt.opened, sample, end):
                    span = self._tracer.start_span(
                        part, inside, attributes={"phonograph.sample": sample.index}, start_time=nanoseconds(start)
                    )
                    span.end(nanoseconds(stop))
        root.end(nanoseconds(end))


def _usage(call: Call) -> dict[str, Any]:
    """Return the attributes that are known at the end."""
    samples = call.samples
    firsts = [one.first_token for one in samples if one.first_token is not None]
    found: dict[str, Any] = {
        "gen_ai.response.finish_reasons": [one.finish_reason or "abort" for one in samples],
        "gen_ai.usage.input_tokens": sum(len(prompt.token_ids) for prompt in call.prompts),
        "gen_ai.usage.output_tokens": sum(len(one.token_ids) for one in samples),
        "gen_ai.usage.cache_read.input_tokens": sum(prompt.num_cached_tokens for prompt in call.prompts),
    }
    if firsts:
        found["gen_ai.response.time_to_first_chunk"] = min(firsts) - call.prompts[0].opened
    return found


def _parts(opened: float, sample: Sample, end: float) -> Sequence[tuple[str, float, float]]:
    """Return name, begin and end of the spans of a sample, up to the part in which it ended."""
    admitted, first, last = sample.admitted, sample.first_token, sample.last_token
    if admitted is None or first is None or last is None:
        return (
            [("queue", opened, end)] if admitted is None else [("queue", opened, admitted), ("prefill", admitted, end)]
        )
    return ("queue", opened, admitted), ("prefill", admitted, first), ("decode", first, last)


def _warn_once(exporter: Any) -> Any:
    """Return an exporter that logs the first failure of `exporter`, and no other."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class SpanExport(SpanExporter):
        """Passes spans on."""

        warned = False

        def export(self, spans: Any) -> SpanExportResult:
            try:
                result = exporter.export(spans)
            except Exception:
                log.debug("spans could not be sent", exc_info=True)
                result = SpanExportResult.FAILURE
            if result is not SpanExportResult.SUCCESS and not self.warned:
                self.warned = True
                log.warning("traces are lost: the collector cannot be reached; requests are served without them")
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return SpanExport()
