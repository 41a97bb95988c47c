"""Metrics of a serving benchmark, under the names of `vllm bench serve --save-result`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from phonograph.bench.serving.events import Reply
from phonograph.bench.serving.load import Load


def serving_metrics(load: Load) -> dict[str, Any]:
    """Return counts of all requests, and rates and latencies of completed ones; None if there is no value.

    TTFT is the time to the first token, TPOT the time per output token after it, ITL the time between tokens, E2EL the
    whole time of a request. TPOT and ITL are of samples: a request with n=2 has two of each.

    Keys that vLLM lacks: total_cached_tokens (prompt tokens from the prefix cache), chunks_per_output_token (1 if each
    token was a chunk; else itl is not between tokens), error_counts (failed requests by error), client_cpu_share
    (processor time of this client / duration), max_send_delay_ms (largest delay of a request behind its due time).
    """
    done = [reply for reply in load.replies if reply.error is None]
    prompt_tokens = sum(reply.prompt_tokens for reply in done)
    output_tokens = sum(reply.output_tokens for reply in done)
    samples = [sample for reply in done for sample in reply.samples]
    chunks = sum(len(sample.times) for sample in samples)
    seconds = {
        "ttft": [reply.ttft for reply in done if reply.ttft is not None],
        "tpot": [sample.tpot for sample in samples if sample.tpot is not None],
        "itl": [gap for sample in samples for gap in sample.itls],
        "e2el": [reply.latency for reply in done],
    }
    return {
        "duration": load.seconds,
        "completed": len(done),
        "failed": len(load.replies) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / load.seconds,
        "output_throughput": output_tokens / load.seconds,
        "total_token_throughput": (prompt_tokens + output_tokens) / load.seconds,
        "max_output_tokens_per_s": _peak_tokens(done),
        "max_concurrent_requests": _peak_requests(done),
        **{name: value for kind, values in seconds.items() for name, value in _latency(kind, values).items()},
        "total_cached_tokens": sum(reply.cached_tokens for reply in done),
        "chunks_per_output_token": chunks / output_tokens if output_tokens else None,
        "error_counts": dict(Counter(reply.error for reply in load.replies if reply.error is not None).most_common()),
        "client_cpu_share": load.cpu_seconds / load.seconds,
        "max_send_delay_ms": load.send_delay * 1e3,
    }


def embedding_metrics(load: Load) -> dict[str, Any]:
    """Return counts and rates of the inputs that were embedded."""
    count = sum(reply.num_inputs for reply in load.replies if reply.error is None)
    return {"total_input_sequences": count, "input_sequence_throughput": count / load.seconds}


def speech_metrics(load: Load, seconds: Sequence[float]) -> dict[str, Any]:
    """Return the seconds of audio that were transcribed, and how much faster than real time.

    Args:
        load: answers.
        seconds: length of each recording, in the order of their start.
    """
    heard = sum(one for one, reply in zip(seconds, load.replies, strict=True) if reply.error is None)
    return {"total_audio_seconds": heard, "rtfx": heard / load.seconds}


def details(load: Load) -> dict[str, Any]:
    """Return lists with one entry a request, in the order of their start, failed ones included."""
    replies = load.replies
    return {
        "input_lens": [reply.prompt_tokens for reply in replies],
        "output_lens": [reply.output_tokens for reply in replies],
        "ttfts": [reply.ttft or 0.0 for reply in replies],
        "itls": [[gap for sample in reply.samples for gap in sample.itls] for reply in replies],
        "start_times": [reply.start for reply in replies],
        "generated_texts": [reply.text for reply in replies],
        "errors": [reply.error or "" for reply in replies],
    }


def _latency(kind: str, seconds: Sequence[float]) -> dict[str, float | None]:
    names = ("mean", "median", "std", "p99")
    if not seconds:
        return {f"{name}_{kind}_ms": None for name in names}
    found = np.mean(seconds), np.median(seconds), np.std(seconds), np.percentile(seconds, 99)
    return {f"{name}_{kind}_ms": float(value) * 1e3 for name, value in zip(names, found, strict=True)}


def _peak_tokens(done: Sequence[Reply]) -> float:
    """Count the output tokens in the busiest whole second; tokens of a sample are spread over its chunks."""
    times: list[float] = []
    weights: list[float] = []
    for reply in done:
        for sample in reply.samples:
            times.extend(reply.start + at for at in sample.times)
            weights.extend([sample.tokens / len(sample.times)] * len(sample.times))
    return float(np.bincount(np.asarray(times, dtype=np.int64), weights).max()) if times else 0.0


def _peak_requests(done: Sequence[Reply]) -> int:
    """Return the largest number of open requests; at one moment, ends come before beginnings."""
    changes = sorted([(reply.start, 1) for reply in done] + [(reply.start + reply.latency, -1) for reply in done])
    return max(itertools.accumulate(change for _, change in changes), default=0)
