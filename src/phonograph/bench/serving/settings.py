"""Settings of `phonograph bench serve`, and the body of its requests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phonograph.bench.cases import Lengths
from phonograph.bench.records.results import check_at_least
from phonograph.errors import UNSET, ConfigError

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
BACKENDS = {
    COMPLETIONS: "openai",
    CHAT: "openai-chat",
    EMBEDDINGS: "openai-embeddings",
    TRANSCRIPTIONS: "openai-audio",
    TRANSLATIONS: "openai-audio",
}
"""vLLM's name of each endpoint that can be measured."""
HOST, PORT = "127.0.0.1", 8000
BOUNDARY = "phonograph-bench-54f0b1a7c3d94e2a"
"""Delimiter of the parts of a form."""
Prompt = str | list[int] | list[dict[str, Any]] | list[Any] | bytes
"""A text, token ids, the messages of a chat, several texts or lists of token ids to embed, or a file of audio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRequest:
    """A prompt, and the tokens of its answer: at most, or exactly if the end of sequence is ignored.

    seconds: of a recording, whose answer has any length
    due:     seconds from the start of the run at which a trace has the request
    """

    prompt: Prompt
    output_len: int
    seconds: float = 0.0
    due: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBench:
    """Settings of one run. The command's flags and their help are made from these fields.

    Attributes:
        base_url: Server to measure; else http://HOST:PORT.
        host: Host of the server.
        port: Port of the server.
        endpoint: /v1/completions, /v1/chat/completions, /v1/embeddings, /v1/audio/transcriptions or
            /v1/audio/translations.
        backend: vLLM's name of the endpoint, which the endpoint must match: openai, openai-chat, openai-embeddings,
            openai-audio.
        model: Model to ask for; else the first that the server has.
        tokenizer: Folder or hub id of the tokenizer that makes prompts; else the model's.
        dataset_name: Random tokens of given lengths, of lengths like ShareGPT's, of lengths and times of a trace,
            prompts from a file, or recordings from a folder. Random recordings are noise.
        dataset_path: File of jsonl: one object a line with prompt or messages, and max_tokens if need be. Trace: a
            .jsonl file of Mooncake's form, or a .csv file of BurstGPT's. Folder of recordings for audio.
        num_prompts: Requests to send; else 100, or all of the file.
        input_len: Tokens of a random prompt, or a range such as 100-1023.
        output_len: Tokens to generate, or a range; not for sharegpt-like.
        random_batch_size: Random prompts of a request for embeddings.
        audio_seconds: Length of a random recording, or a range such as 5-30.
        prompt_format: Form of random prompts; else tokens to completions, text to others.
        request_rate: Requests a second; inf sends all at once.
        burstiness: Shape of the gaps between requests: 1 Poisson, less in bursts, more evenly.
        max_concurrency: Requests that are open at once, at most.
        num_warmups: Requests before the measured ones, not counted.
        temperature: Of the sampling; 0 is greedy.
        ignore_eos: Generate on to the full length; else for random prompts only.
        extra_body: JSON object of more fields for every request.
        request_timeout: Seconds after which an answer counts as failed.
        label: Name of this run in the record.
        seed: Of lengths, prompts and arrivals.
        save_detailed: Times, texts and errors of each request too.

    Raises:
        ConfigError: a setting is out of range, or contradicts another.
    """

    base_url: str | None = None
    host: str = HOST
    port: int = PORT
    endpoint: str = COMPLETIONS
    backend: Literal["openai", "openai-chat", "openai-embeddings", "openai-audio"] | None = None
    model: str | None = None
    tokenizer: str | None = None
    dataset_name: Literal["random", "sharegpt-like", "trace", "jsonl", "audio"] = "random"
    dataset_path: Path | None = None
    num_prompts: int | None = None
    input_len: str = "1024"
    output_len: str = "128"
    random_batch_size: int = 1
    audio_seconds: str = "30"
    prompt_format: Literal["tokens", "text"] | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 1
    temperature: float = 0.0
    ignore_eos: bool | None = None
    extra_body: str = "{}"
    request_timeout: float | None = None
    label: str | None = None
    seed: int = 0
    save_detailed: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ConfigError("port", self.port, "must be a whole number from 1 to 65535")
        if not self.host or set(self.host) & set("/@?#[] "):
            raise ConfigError("host", self.host, "must be a name or an address; base_url takes a URL")
        if self.base_url is not None and (self.host, self.port) != (HOST, PORT):
            raise ConfigError("base_url", self.base_url, f"contradicts {self.url}, the host and the port; give one")
        if self.endpoint not in BACKENDS:
            raise ConfigError("endpoint", self.endpoint, f"must be one of {', '.join(BACKENDS)}")
        if self.backend not in (None, BACKENDS[self.endpoint]):
            goes = next(endpoint for endpoint, name in BACKENDS.items() if name == self.backend)
            raise ConfigError("backend", self.backend, f"goes with endpoint={goes}, not {self.endpoint}")
        check_at_least("random_batch_size", self.random_batch_size, 1)
        if self.random_batch_size > 1 and (not self.embeds or self.dataset_name == "jsonl"):
            problem = f"goes with endpoint={EMBEDDINGS} and random prompts only"
            raise ConfigError("random_batch_size", self.random_batch_size, problem)
        reads = self.dataset_name in ("trace", "jsonl", "audio")
        if reads and self.dataset_path is None:
            raise ConfigError("dataset_path", UNSET, f"is required with dataset_name={self.dataset_name!r}")
        if not reads and self.dataset_path is not None:
            raise ConfigError(
                "dataset_path", str(self.dataset_path), "goes with dataset_name='trace', 'jsonl' or 'audio' only"
            )
        if self.dataset_name == "trace":
            if self.endpoint != COMPLETIONS or self.prompt_format == "text":
                problem = f"has prompts of token ids, for endpoint={COMPLETIONS} alone"
                raise ConfigError("dataset_name", self.dataset_name, problem)
            if not math.isinf(self.request_rate):
                raise ConfigError("request_rate", self.request_rate, "contradicts the times of a trace; leave it out")
        if self.dataset_name in (("jsonl", "sharegpt-like") if self.hears else ("audio",)):
            works = "random or audio" if self.hears else f"{TRANSCRIPTIONS} and {TRANSLATIONS}"
            raise ConfigError("dataset_name", self.dataset_name, f"endpoint={self.endpoint} takes none; {works} work")
        if self.is_chat and self.prompt_format == "tokens":
            raise ConfigError("prompt_format", "tokens", "a chat takes text; leave it out, or use another endpoint")
        for name, value in (("request_rate", self.request_rate), ("burstiness", self.burstiness)):
            if not value > 0:
                raise ConfigError(name, value, "must be a number > 0, or inf")
        if self.request_timeout is not None and not 0 < self.request_timeout < math.inf:
            raise ConfigError("request_timeout", self.request_timeout, "must be a number of seconds > 0")
        check_at_least("num_prompts", 1 if self.num_prompts is None else self.num_prompts, 1)
        check_at_least("num_warmups", self.num_warmups, 0)
        check_at_least("max_concurrency", 1 if self.max_concurrency is None else self.max_concurrency, 1)
        Lengths.parse("input_len", self.input_len)
        Lengths.parse("output_len", self.output_len)
        Lengths.parse("audio_seconds", self.audio_seconds)
        self.extra_fields()

    @property
    def url(self) -> str:
        """URL of the host and the port."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def is_chat(self) -> bool:
        return self.endpoint == CHAT

    @property
    def embeds(self) -> bool:
        return self.endpoint == EMBEDDINGS

    @property
    def hears(self) -> bool:
        return self.endpoint in (TRANSCRIPTIONS, TRANSLATIONS)

    def extra_fields(self) -> dict[str, Any]:
        """Parse `extra_body`."""
        try:
            fields = json.loads(self.extra_body)
        except ValueError as error:
            raise ConfigError("extra_body", self.extra_body, f"is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError("extra_body", self.extra_body, "must be a JSON object")
        return fields

    def body(self, request: ServingRequest, model: str) -> bytes:
        """Return the request as JSON, or as the form of a recording.

        Answers that are generated are streamed, with the usage at their end.

        Raises:
            ConfigError: the endpoint does not take this kind of prompt.
        """
        prompt = request.prompt
        if isinstance(prompt, bytes):
            fields = {"model": model, "response_format": "json", "temperature": self.temperature, "stream": True}
            fields |= self.extra_fields()
            # Servers take the second field in a stream only.
            return make_form(prompt, {**fields, **({"stream_include_usage": True} if fields["stream"] else {})})
        if self.embeds and not (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
            return json.dumps({"model": model, "input": prompt, **self.extra_fields()}, ensure_ascii=False).encode()
        if self.is_chat:
            if isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            elif prompt and isinstance(prompt[0], int):
                raise ConfigError("endpoint", self.endpoint, f"takes no token ids; use {COMPLETIONS}")
            fields = {"messages": prompt, "max_completion_tokens": request.output_len}
        elif not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
            raise ConfigError("endpoint", self.endpoint, f"takes no messages; use {CHAT}")
        else:
            fields = {"prompt": prompt, "max_tokens": request.output_len}
        ignore_eos = self.dataset_name != "jsonl" if self.ignore_eos is None else self.ignore_eos
        body = {
            "model": model,
            **fields,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if ignore_eos else {}),
            **self.extra_fields(),
        }
        return json.dumps(body, ensure_ascii=False).encode()


def make_form(content: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a body of multipart/form-data with a file and text fields."""
    parts = [f'name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
    parts.append(b'name="file"; filename="recording"\r\n\r\n' + content)
    head = f"--{BOUNDARY}\r\nContent-Disposition: form-data; ".encode()
    return b"".join(head + part + b"\r\n" for part in parts) + f"--{BOUNDARY}--\r\n".encode()
