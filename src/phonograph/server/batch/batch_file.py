"""OpenAI's batch files: a request a line in, an answer a line out."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phonograph.errors import RequestError, quoted, shortened


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of a batch file.

    custom_id: name of the request, unique in its file
    url:       path of the endpoint
    body:      JSON of the request
    problem:   reason why no endpoint gets it, or None
    """

    custom_id: str
    url: str
    body: bytes
    problem: str | None = None


def read_batch(path: Path, urls: Collection[str]) -> list[BatchRequest]:
    """Return the requests of a file; blank lines are skipped.

    A request for another endpoint, or for a stream, has a problem, which becomes its answer.

    Args:
        path: the file.
        urls: paths of the endpoints that a request may name.

    Raises:
        RequestError: the file cannot be read, a line is no request, or all requests have problems; the message has the
            number of the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("input_file", str(path), f"cannot be read: {error}") from None
    found: dict[str, BatchRequest] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        problem = None
        try:
            request = _read_line(line, urls)
            if request.custom_id in found:
                problem = f"custom_id {quoted(request.custom_id)} is in an earlier line; it must be unique"
            found[request.custom_id] = request
        except (ValueError, RecursionError) as error:
            problem = str(error)
        if problem is not None:
            raise RequestError("input_file", str(path), f"line {number}: {problem}")
    requests = list(found.values())
    if requests and all(request.problem is not None for request in requests):
        raise RequestError("input_file", str(path), f"no line can be answered; the first one: {requests[0].problem}")
    return requests


EXAMPLE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 64}}'
)


def _read_line(line: str, urls: Collection[str]) -> BatchRequest:
    value: Any = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"is not a JSON object such as {EXAMPLE}")
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a text that is not empty")
    if value.get("method", "POST") != "POST":
        raise ValueError(f"method={quoted(value['method'])}: must be POST")
    if not isinstance(url, str):
        raise ValueError("url must be a text")
    if not isinstance(body, dict):
        raise ValueError("body must be a JSON object")
    problem = None
    if url not in urls:
        problem = f"url={quoted(url)}: must be one of {', '.join(urls)}"
    elif body.get("stream"):
        problem = "stream=true: answers of a batch are not streamed; leave it out"
    return BatchRequest(custom_id, url, json.dumps(body).encode(), problem)


def answer_line(request: BatchRequest, status: int, request_id: str, body: bytes) -> str:
    """Return the line of an answer, which may be an error of its request."""
    response = {"status_code": status, "request_id": request_id, "body": json.loads(body)}
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id, "response": response, "error": None}
    return json.dumps(line, ensure_ascii=False) + "\n"


def check_output(path: Path) -> None:
    """Check that a file can be written, before the work starts.

    Raises:
        RequestError: it cannot.
    """
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise RequestError("output_file", shortened(str(path)), f"cannot be written: {error.strerror}") from None
