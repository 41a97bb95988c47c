"""Chats and completions of a server with OpenAI's interface, for `chat --url` and `generate --url`.

Only Python's own library is used: these commands need no extra.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from phonograph.core.sampling_params import SamplingParams
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import ConfigError, EndpointError, RequestError, shortened

TIMEOUT = 600
"""Seconds without a byte after which a server counts as gone."""
PARAMETERS = (
    *("n", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"),
    *("seed", "stop", "stop_token_ids", "ignore_eos"),
)
"""Parameters that are sent if they differ from their defaults; a server of another maker may know few of them."""


@dataclass(slots=True)
class RemoteAnswer:
    """Answer of a server, which grows while it is streamed.

    pieces:     text of each sample
    reasons:    finish reason of each sample
    usage:      numbers of tokens, if the server sent them
    ttft:       seconds to the first text
    seconds:    seconds to the end
    interrupted: Ctrl-C ended it
    """

    pieces: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    reasons: dict[int, str | None] = field(default_factory=dict[int, "str | None"])
    usage: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ttft: float = 0.0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def texts(self) -> list[str]:
        """Text of each sample, in order."""
        return ["".join(pieces) for _, pieces in sorted(self.pieces.items())]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second after the first text; None if the server sent no numbers."""
        later = int(self.usage.get("completion_tokens") or 0) - 1
        return later / (self.seconds - self.ttft) if later > 0 and self.seconds > self.ttft else None

    def facts(self) -> dict[str, Any]:
        """Return the JSON fields of the answer apart from its text."""
        speed = self.tokens_per_second
        return {
            "num_prompt_tokens": self.usage.get("prompt_tokens"),
            "num_output_tokens": self.usage.get("completion_tokens"),
            "seconds": round(self.seconds, 4),
            "ttft_seconds": round(self.ttft, 4),
            "tokens_per_second": None if speed is None else round(speed, 2),
        }


class RemoteModel:
    """A model of a server.

    Args:
        url: address of the server, with or without `/v1`.
        model: name of the model; default: the server's first.
        api_key: key; default: OPENAI_API_KEY of the environment.

    Raises:
        ConfigError: the address is no URL.
        EndpointError: the server cannot be reached, or lists no model.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ConfigError("url", url, "must be an address such as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        key = api_key or os.environ.get("OPENAI_API_KEY")
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        with self._open("/v1/models", None) as answer:
            listed = json.load(answer)
        self.names = [str(one["id"]) for one in listed.get("data", [])]
        if not self.names and model is None:
            raise EndpointError(f"{self.url} lists no model; give one with --model")
        self.name = model or self.names[0]

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams, show: Callable[[str], None]) -> RemoteAnswer:
        """Answer a conversation, and pass each piece of the first sample's text to `show`."""
        return self._stream("/v1/chat/completions", {"messages": messages}, params, show)

    def complete(self, prompt: str | list[int], params: SamplingParams, show: Callable[[str], None]) -> RemoteAnswer:
        """Continue a prompt, as `chat`."""
        return self._stream("/v1/completions", {"prompt": prompt}, params, show)

    def _stream(
        self, path: str, asked: Mapping[str, Any], params: SamplingParams, show: Callable[[str], None]
    ) -> RemoteAnswer:
        """Stream an answer. Ctrl-C ends it, and the server stops with the connection.

        Raises:
            RequestError: the server refuses the request.
            EndpointError: the server cannot be reached, or the answer breaks off.
        """
        plain = SamplingParams()
        body = {
            **asked,
            "model": self.name,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            **{name: value for name in PARAMETERS if (value := getattr(params, name)) != getattr(plain, name)},
        }
        if params.structured_outputs is not None:
            body |= _constraint(params.structured_outputs)
        found = RemoteAnswer()
        began = time.monotonic()
        try:
            with self._open(path, body) as answer:
                for chunk in _events(answer):
                    self._take(chunk, found, show, began)
            if not found.reasons or None in found.reasons.values():
                raise EndpointError(f"{self.url}: the answer broke off")
        except KeyboardInterrupt:
            found.interrupted = True
        except (OSError, HTTPException, ValueError) as error:
            raise EndpointError(f"{self.url}: the answer broke off ({error})") from None
        found.seconds = time.monotonic() - began
        return found

    def _take(self, chunk: Mapping[str, Any], found: RemoteAnswer, show: Callable[[str], None], began: float) -> None:
        if "error" in chunk:
            raise RequestError("url", self.url, f"the server answered: {_error_text(chunk)}")
        found.usage = chunk.get("usage") or found.usage
        for choice in chunk.get("choices") or ():
            index = choice.get("index", 0)
            text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
            found.reasons[index] = choice.get("finish_reason") or found.reasons.get(index)
            found.pieces.setdefault(index, []).append(text)
            if text:
                found.ttft = found.ttft or time.monotonic() - began
                if index == 0:
                    show(text)

    def _open(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            said = _message(error.read(100_000))
            if error.code in (400, 404, 422) and body is not None:
                raise RequestError("url", self.url, f"the server answered {error.code}: {said}") from None
            raise EndpointError(f"{self.url}{path} answered {error.code}: {said}") from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            reason = getattr(reason, "strerror", None) or reason
            raise EndpointError(
                f"{self.url} cannot be reached ({reason}); `phonograph serve MODEL` starts a server"
            ) from None


def _events(answer: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of server-sent events."""
    for line in answer:
        data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
        if data == b"[DONE]":
            return
        if data:
            yield json.loads(data)


def _message(body: bytes) -> str:
    """Return the message of an error's body, which may be of any kind."""
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    return shortened(_error_text(value) if isinstance(value, Mapping) else body.decode("utf-8", "replace"), 500)


def _error_text(body: Mapping[str, Any]) -> str:
    error = body.get("error", body)
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)


def _constraint(constraint: StructuredOutputs) -> dict[str, Any]:
    """Return the field of a request: OpenAI's for JSON, which servers of other makers know too."""
    if constraint.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if constraint.kind == "json":
        schema = {"name": "answer", "schema": json.loads(constraint.source)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"structured_outputs": {constraint.kind: constraint.source}}
