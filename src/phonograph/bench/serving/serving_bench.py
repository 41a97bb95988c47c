"""`phonograph bench serve`: its settings, its requests, and the record of what they came to.

It speaks to any server with OpenAI's API, ours or another's, and takes token counts from what the server says it used.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phonograph.bench.cases import Lengths
from phonograph.bench.records.results import BenchProgress, check_at_least
from phonograph.bench.serving import load
from phonograph.bench.serving.arrivals import arrival_times
from phonograph.bench.serving.connection import Target
from phonograph.bench.serving.serving_metrics import details, serving_metrics
from phonograph.bench.serving.workload import (
    Dataset,
    PromptFormat,
    ServingRequest,
    draw_lengths,
    random_prompts,
    read_requests,
)
from phonograph.config.engine_config import EngineConfig
from phonograph.errors import ConfigError
from phonograph.text.tokenizer import Tokenizer, load_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEFAULT_NUM_PROMPTS = 100
"""As many as the published serving tables have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBench:
    """One run. What is None is taken from the server or follows from the rest; the command's help explains each.

    Raises:
        ConfigError: a setting is out of range, or contradicts another.
    """

    base_url: str
    endpoint: str = COMPLETIONS
    model: str | None = None
    tokenizer: str | None = None
    api_key: str | None = None
    dataset_name: Dataset = "random"
    dataset_path: Path | None = None
    num_prompts: int | None = None
    input_len: Lengths = Lengths(1024, 1024)
    output_len: Lengths = Lengths(128, 128)
    prompt_format: PromptFormat | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 1
    temperature: float = 0.0
    ignore_eos: bool | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    request_timeout: float | None = None
    label: str | None = None
    seed: int = 0
    save_detailed: bool = False

    def __post_init__(self) -> None:
        if self.endpoint not in (COMPLETIONS, CHAT):
            raise ConfigError("endpoint", self.endpoint, f"must be {COMPLETIONS} or {CHAT}")
        if (self.dataset_name == "jsonl") != (self.dataset_path is not None):
            raise ConfigError("dataset_path", self.dataset_path, "goes with dataset_name='jsonl', and only with it")
        if self.is_chat and self.prompt_format == "tokens":
            raise ConfigError("prompt_format", "tokens", "a chat takes text; leave it out, or use another endpoint")
        for name, value in (("request_rate", self.request_rate), ("burstiness", self.burstiness)):
            if not value > 0:
                raise ConfigError(name, value, "must be a number > 0, or inf")
        if self.request_timeout is not None and not 0 < self.request_timeout < math.inf:
            raise ConfigError("request_timeout", self.request_timeout, "must be a number of seconds > 0")
        check_at_least("num_prompts", 1 if self.num_prompts is None else self.num_prompts, 1)
        check_at_least("num_warmups", self.num_warmups, 0)
        if self.max_concurrency is not None:
            check_at_least("max_concurrency", self.max_concurrency, 1)

    @property
    def is_chat(self) -> bool:
        return self.endpoint == CHAT

    def body(self, request: ServingRequest, model: str) -> bytes:
        """The request as JSON: streamed, with the usage at its end.

        Raises:
            ConfigError: the endpoint does not take its prompt.
        """
        prompt = request.prompt
        if self.is_chat:
            if isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            elif prompt and isinstance(prompt[0], int):
                raise ConfigError("endpoint", self.endpoint, f"takes no token ids; use {COMPLETIONS}")
            asked = {"messages": prompt, "max_completion_tokens": request.output_len}
        elif not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
            raise ConfigError("endpoint", self.endpoint, f"takes no messages; use {CHAT}")
        else:
            asked = {"prompt": prompt, "max_tokens": request.output_len}
        ignore_eos = self.dataset_name != "jsonl" if self.ignore_eos is None else self.ignore_eos
        body = {
            "model": model,
            **asked,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if ignore_eos else {}),
            **self.extra_body,
        }
        return json.dumps(body, ensure_ascii=False).encode()


def bench_serving(bench: ServingBench, progress: BenchProgress) -> dict[str, Any]:
    """Runs it, and returns what vLLM's benchmark would save, and more about server and client.

    Raises:
        ConfigError: the settings do not fit the server or its model.
        EndpointError: the server is not there, or refuses the requests that warm it up.
        ModelError: there is no usable tokenizer to make prompts with.
    """
    return load.run(_bench(bench, progress))


async def _bench(bench: ServingBench, progress: BenchProgress) -> dict[str, Any]:
    headers = {} if bench.api_key is None else {"authorization": f"Bearer {bench.api_key}"}
    target, served = await load.find_model(Target.parse(bench.base_url), headers)
    model = bench.model or served["id"]
    source = bench.tokenizer or served.get("root") or model
    warmups, requests = _requests(bench, None if bench.dataset_name == "jsonl" else _tokenizer(source))
    _check_fits([*warmups, *requests], served.get("max_model_len"))
    client = load.Client(target=target, path=bench.endpoint, headers=headers, timeout=bench.request_timeout)
    bodies = [bench.body(request, model) for request in requests]
    rng = random.Random(f"arrivals {bench.seed}")
    due = arrival_times(rng, len(bodies), rate=bench.request_rate, burstiness=bench.burstiness)
    await load.warm_up(client, [bench.body(request, model) for request in warmups], bench.max_concurrency)
    result = await load.offer(client, bodies, due, max_concurrency=bench.max_concurrency, progress=progress)
    backend = "openai-chat" if bench.is_chat else "openai"
    return {
        "endpoint_type": backend,
        "backend": backend,
        "label": bench.label or backend,
        "model_id": model,
        "tokenizer_id": None if bench.dataset_name == "jsonl" else source,
        "server": {name: served.get(name) for name in ("owned_by", "root", "max_model_len")},
        "dataset_name": bench.dataset_name,
        "num_prompts": len(requests),
        "request_rate": "inf" if math.isinf(bench.request_rate) else bench.request_rate,
        "burstiness": "inf" if math.isinf(bench.burstiness) else bench.burstiness,
        "max_concurrency": bench.max_concurrency,
        "seed": bench.seed,
        **serving_metrics(result),
        **(details(result) if bench.save_detailed else {}),
    }


def _requests(bench: ServingBench, tokenizer: Tokenizer | None) -> tuple[list[ServingRequest], list[ServingRequest]]:
    """Requests to warm up with, and those to measure. Made ones share no prompt; those of a file may have to."""
    if tokenizer is None:
        assert bench.dataset_path is not None
        found = read_requests(bench.dataset_path, output_len=bench.output_len.high)
        count = len(found) if bench.num_prompts is None else bench.num_prompts
        if count > len(found):
            raise ConfigError("num_prompts", count, f"the file has {len(found)}; a prompt sent twice would be cached")
        return (found[count:] or found)[: bench.num_warmups], found[:count]
    count = DEFAULT_NUM_PROMPTS if bench.num_prompts is None else bench.num_prompts
    prompt_format = bench.prompt_format or ("text" if bench.is_chat else "tokens")
    make = random_prompts(tokenizer, random.Random(f"prompts {bench.seed}"), prompt_format)

    def made(name: str, count: int) -> list[ServingRequest]:
        rng = random.Random(f"{name} {bench.seed}")
        ranges = {"input_len": bench.input_len, "output_len": bench.output_len}
        lengths = draw_lengths(bench.dataset_name, rng, count, **ranges)
        return [ServingRequest(prompt=make(tokens), output_len=output) for tokens, output in lengths]

    measured = made("lengths", count)  # first, so that they are the same after any warm-up
    return made("warm-up", bench.num_warmups), measured


def _tokenizer(source: str) -> Tokenizer:
    tokenizer = load_tokenizer(EngineConfig(model=source))
    if tokenizer is None:
        raise ConfigError("tokenizer", source, "has none; name a folder or hub id of one that the model understands")
    return tokenizer


def _check_fits(requests: list[ServingRequest], max_model_len: object) -> None:
    """Token ids are known to be too long before they are sent. The server says itself what else is."""
    for request in requests:
        if isinstance(max_model_len, int) and isinstance(request.prompt, list) and isinstance(request.prompt[0], int):
            tokens = len(request.prompt) + request.output_len
            if tokens > max_model_len:
                problem = f"with output_len={request.output_len} exceeds the server's max_model_len={max_model_len}"
                raise ConfigError("input_len", len(request.prompt), problem)
