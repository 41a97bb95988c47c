"""Lines of the log: ids of requests, levels, JSON, and what the access log leaves out."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from servers import Server

from phonograph.config.server_config import ServerConfig
from phonograph.server.chat.serving import Serving
from phonograph.server.observe.logs import REQUEST_ID, AccessLogFilter, engine_logging, server_logging


def record(*arguments: Any) -> logging.LogRecord:
    return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "%s", arguments, None)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/v1/models", "/v1/models"),
        ("/health", None),
        ("/metrics?a=b", None),
        ("/v1/graphs", None),
        ("/health/more", "/health/more"),
        ("/" + 199 * "a", "/" + 199 * "a"),
        ("/" + 200 * "a", "/" + 199 * "a" + "..."),
    ],
)
def test_the_access_log_has_neither_polls_nor_long_paths(path: str, shown: str | None) -> None:
    entry = record("127.0.0.1:5", "GET", path, "1.1", 200)
    assert AccessLogFilter().filter(entry) == (shown is not None)
    assert not shown or entry.args == ("127.0.0.1:5", "GET", shown, "1.1", 200)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/llm/health", False),
        ("/health", False),
        ("/llm/metrics?a=b", False),
        ("/llm/v1/models", True),
        ("/llm", True),
        ("/llmx/health", True),
        ("/llm/llm/health", True),
    ],
)
def test_the_access_log_has_no_polls_through_a_proxy(path: str, shown: bool) -> None:
    settings = server_logging(ServerConfig(root_path="/llm"))["filters"]["access"]
    made = settings.pop("()")(**settings)
    assert made.filter(record("127.0.0.1:5", "GET", path, "1.1", 200)) == shown


def test_other_records_are_logged_as_they_are() -> None:
    for entry in (record(), record("GET", "/health"), record(*"abcdef")):
        arguments = entry.args
        assert AccessLogFilter().filter(entry) and entry.args is arguments


PROGRAM = """
import logging, logging.config, pickle, sys
from phonograph.server.observe.logs import REQUEST_ID
logging.config.dictConfig(pickle.loads(bytes.fromhex(sys.argv[1])))
log = logging.getLogger("phonograph.room")
log.info("quiet")
REQUEST_ID.set("abc")
log.warning("said %s", "\\"so\\"", extra=dict(other=1))
logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "GET", "/v1/models", "1.1", 200)
REQUEST_ID.set(None)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed", extra={"request_id": "other"})
"""


def lines_of(settings: dict[str, Any]) -> list[str]:
    """Lines that a process with these settings writes. They cross a process as the engine's do."""
    command = [sys.executable, "-c", PROGRAM, pickle.dumps(settings).hex()]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "NO_COLOR": "1"})
    return (result.stderr + result.stdout).splitlines()


def test_lines_of_text_begin_with_the_request() -> None:
    first, failed, *rest, access = lines_of(server_logging(ServerConfig(log_level="warning")))
    assert first == 'WARNING:  [abc] said "so"' and failed == "ERROR:    [other] failed"
    assert rest[-1] == "ZeroDivisionError: division by zero"
    assert access == 'INFO:     [abc] 1.2.3.4:5 - "GET /v1/models HTTP/1.1" 200 OK'


def test_lines_of_json() -> None:
    quiet, said, failed, access = map(json.loads, lines_of(server_logging(ServerConfig(log_format="json"))))
    assert quiet.keys() == {"time", "level", "logger", "message"} and quiet["message"] == "quiet"
    assert said | {"time": ""} == {
        "time": "",
        "level": "warning",
        "logger": "phonograph.room",
        "message": 'said "so"',
        "request_id": "abc",
    }
    assert failed["request_id"] == "other" and failed["exception"].startswith("Traceback")
    expected = {"client": "1.2.3.4:5", "method": "GET", "path": "/v1/models", "http_version": "1.1", "status": 200}
    assert access.items() >= {**expected, "request_id": "abc"}.items()
    assert all(line["time"].endswith("+00:00") for line in (quiet, said, failed, access))


def test_the_engines_process_logs_alike() -> None:
    quiet, said, *rest = lines_of(engine_logging(ServerConfig()))
    assert (quiet, said) == ("INFO:     quiet", 'WARNING:     said "so"') and rest
    (failed,) = map(json.loads, lines_of(engine_logging(ServerConfig(log_format="json", log_level="error"))))
    assert failed["message"] == "failed" and failed["level"] == "error"


@pytest.mark.parametrize(
    ("given", "kept"),
    [("my-id", True), ("x" * 200, True), ("x" * 201, False), ("", False), ("a\tb", False), ("ä".encode(), False)],
)
def test_the_id_of_a_request_comes_back(given: str | bytes, kept: bool, server: Server) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"x-request-id": given})
    name = answer.headers["x-request-id"]
    assert (name == given) == kept and name
    assert answer.json()["id"] == f"cmpl-{name}"


def test_every_answer_has_an_id_of_its_own(server: Server) -> None:
    answers = [
        server.get("/health"),
        server.get("/nothing"),
        server.post("/v1/completions", {"prompt": 5}),
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}),
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ]
    names = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(names)) == len(names)
    assert f'"id":"cmpl-{names[3]}"' in answers[3].text
    named = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": "mine"})
    assert named.json()["id"] == "cmpl-mine", "the field of the body is more exact"


def test_a_bug_is_answered_with_the_id(serve_with: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Serving, "check", fail)
    answer = serve_with().post("/tokenize", {"prompt": "a"}, headers={"x-request-id": "my-id"})
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "my-id"


def test_requests_are_logged_with_their_id(serve_with: Callable[..., Server], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="phonograph")
    server = serve_with(enable_log_requests=True, max_log_len=7)
    body = {"prompt": "Tom has 12 apples", "max_tokens": 3, "ignore_eos": True, "n": 2}
    ids: list[str | None] = []

    class Watch(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            ids.append(getattr(record, "request_id", None) or REQUEST_ID.get())
            return True

    watch = Watch()
    caplog.handler.addFilter(watch)
    try:
        assert server.post("/v1/completions", body, headers={"x-request-id": "my-id"}).status_code == 200
        server.wait_until_idle()
    finally:
        caplog.handler.removeFilter(watch)
    received, ended = caplog.messages
    assert received.startswith("received: prompt 'Tom has...' of ") and "max_tokens=3" in received
    assert ended.startswith("ended: length, length after 6 tokens in ")
    assert ids == ["my-id", "my-id"]
    caplog.clear()
    assert serve_with().post("/v1/completions", body).status_code == 200
    assert not caplog.messages


def test_a_whole_prompt_is_logged_without_a_limit(
    serve_with: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="phonograph")
    text = "Tom has 12 apples and buys 7 more. " * 20
    serve_with(enable_log_requests=True).post("/v1/completions", {"prompt": text, "max_tokens": 1})
    assert repr(text) in caplog.text
