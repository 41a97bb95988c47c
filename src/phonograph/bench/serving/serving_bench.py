"""One run of `phonograph bench serve`: its requests, their load on a server, and the record.

The server may be any with OpenAI's API. Token counts are the server's own (`usage`); of a transcript without one, they
are those of its text.
"""

from __future__ import annotations

import math
import random
from typing import Any

from phonograph.bench.cases import Lengths
from phonograph.bench.records.results import BenchProgress
from phonograph.bench.serving import load
from phonograph.bench.serving.connection import Target
from phonograph.bench.serving.lengths import sharegpt_like_lengths
from phonograph.bench.serving.recordings import noise, read_recordings
from phonograph.bench.serving.serving_metrics import details, embedding_metrics, serving_metrics, speech_metrics
from phonograph.bench.serving.settings import BACKENDS, BOUNDARY, ServingBench, ServingRequest
from phonograph.bench.serving.workload import random_prompts, read_requests, traced_requests
from phonograph.config.engine_config import EngineConfig
from phonograph.errors import ConfigError
from phonograph.text.tokenizer import Tokenizer, load_tokenizer

DEFAULT_NUM_PROMPTS = 100
"""Requests of the published serving tables."""


def bench_serving(bench: ServingBench, progress: BenchProgress, *, api_key: str | None = None) -> dict[str, Any]:
    """Run a benchmark; return the fields that vLLM's benchmark saves, and more about server and client.

    Raises:
        ConfigError: the settings do not fit the server or its model.
        EndpointError: the server is not there, or refuses the warm-up requests.
        ModelError: there is no usable tokenizer to make prompts with.
    """
    return load.run(_bench(bench, progress, {} if api_key is None else {"authorization": f"Bearer {api_key}"}))


async def _bench(bench: ServingBench, progress: BenchProgress, headers: dict[str, str]) -> dict[str, Any]:
    target, served = await load.find_model(Target.parse(bench.base_url or bench.url), headers)
    model = bench.model or served["id"]
    source = bench.tokenizer or served.get("root") or model
    tokenizer = None if bench.dataset_name == "jsonl" else _tokenizer(source)
    warmups, requests = _requests(bench, tokenizer)
    _check_fits([*warmups, *requests], served.get("max_model_len"), generates=not bench.embeds)
    kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"} if bench.hears else {}
    client = load.Client(target=target, path=bench.endpoint, headers=headers | kind, timeout=bench.request_timeout)
    bodies = [bench.body(request, model) for request in requests]
    if bench.dataset_name == "trace":
        due = [request.due for request in requests]
    else:
        rng = random.Random(f"arrivals {bench.seed}")
        due = load.arrival_times(rng, len(bodies), rate=bench.request_rate, burstiness=bench.burstiness)
    await load.warm_up(client, [bench.body(request, model) for request in warmups], bench.max_concurrency)
    result = await load.offer(client, bodies, due, max_concurrency=bench.max_concurrency, progress=progress)
    backend = BACKENDS[bench.endpoint]
    if bench.hears:
        assert tokenizer is not None
        for reply in result.replies:
            if not reply.output_tokens:
                reply.count_tokens(len(tokenizer.encode(reply.text, add_special_tokens=False)))
    return {
        "endpoint_type": backend,
        "backend": backend,
        "label": bench.label or backend,
        "model_id": model,
        "tokenizer_id": None if bench.dataset_name == "jsonl" else source,
        "server": {name: served.get(name) for name in ("owned_by", "root", "max_model_len")},
        "dataset_name": bench.dataset_name,
        "num_prompts": len(requests),
        "request_rate": _rate(bench),
        "burstiness": "inf" if math.isinf(bench.burstiness) else bench.burstiness,
        "max_concurrency": bench.max_concurrency,
        "seed": bench.seed,
        **serving_metrics(result),
        **(embedding_metrics(result) if bench.embeds else {}),
        **(speech_metrics(result, [request.seconds for request in requests]) if bench.hears else {}),
        **(details(result) if bench.save_detailed else {}),
    }


def _rate(bench: ServingBench) -> float | str | None:
    """Return the requests a second for the record; None for those of a trace."""
    if bench.dataset_name == "trace":
        return None
    return "inf" if math.isinf(bench.request_rate) else bench.request_rate


def _requests(bench: ServingBench, tokenizer: Tokenizer | None) -> tuple[list[ServingRequest], list[ServingRequest]]:
    """Return warm-up and measured requests. Random ones share no prompt; those of a short file may."""
    input_len, output_len = Lengths.parse("input_len", bench.input_len), Lengths.parse("output_len", bench.output_len)
    if bench.dataset_path is not None:
        if bench.hears:
            found = read_recordings(bench.dataset_path)
        elif bench.dataset_name == "trace":
            assert tokenizer is not None
            found = traced_requests(bench.dataset_path, tokenizer, random.Random(f"trace {bench.seed}"))
        else:
            found = read_requests(bench.dataset_path, output_len=output_len.high)
        count = len(found) if bench.num_prompts is None else bench.num_prompts
        if count > len(found):
            raise ConfigError("num_prompts", count, f"the file has {len(found)}; a prompt sent twice would be cached")
        return (found[count:] or found)[: bench.num_warmups], found[:count]
    assert tokenizer is not None
    prompt_format = bench.prompt_format or ("text" if bench.is_chat or bench.embeds else "tokens")
    make = random_prompts(tokenizer, random.Random(f"prompts {bench.seed}"), prompt_format)

    def draw(name: str, count: int) -> list[ServingRequest]:
        rng = random.Random(f"{name} {bench.seed}")
        if bench.hears:
            return [
                noise(rng, seconds) for seconds in Lengths.parse("audio_seconds", bench.audio_seconds).draw(rng, count)
            ]
        if bench.dataset_name == "sharegpt-like":
            lengths = sharegpt_like_lengths(rng, count)
        else:
            lengths = list(zip(input_len.draw(rng, count), output_len.draw(rng, count), strict=True))
        size = bench.random_batch_size
        prompts = [make(tokens) if size == 1 else [make(tokens) for _ in range(size)] for tokens, _ in lengths]
        return [
            ServingRequest(prompt=one, output_len=output) for one, (_, output) in zip(prompts, lengths, strict=True)
        ]

    # Measured requests first, so that they are the same after any warm-up.
    measured = draw("lengths", DEFAULT_NUM_PROMPTS if bench.num_prompts is None else bench.num_prompts)
    return draw("warm-up", bench.num_warmups), measured


def _tokenizer(source: str) -> Tokenizer:
    tokenizer = load_tokenizer(EngineConfig(model=source))
    if tokenizer is None:
        raise ConfigError("tokenizer", source, "has none; name a folder or hub id of one that the model understands")
    return tokenizer


def _check_fits(requests: list[ServingRequest], max_model_len: object, *, generates: bool) -> None:
    """Check prompts of token ids before they are sent; the server checks the others."""
    for request in requests:
        if isinstance(max_model_len, int) and isinstance(request.prompt, list) and isinstance(request.prompt[0], int):
            output_len = request.output_len if generates else 0
            if len(request.prompt) + output_len > max_model_len:
                problem = f"with output_len={output_len} exceeds the server's max_model_len={max_model_len}"
                raise ConfigError("input_len", len(request.prompt), problem)
