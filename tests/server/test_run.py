"""The server's process: connections, the access log, and addresses that cannot be bound."""

from __future__ import annotations

import logging
import resource
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from phonograph.config.server_config import ServerConfig
from phonograph.errors import ConfigError, RequestError
from phonograph.server.http import run

INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 65_537), (65_536, 65_537)),
        ((1024, INFINITY), (65_536, INFINITY)),
        ((65_535, INFINITY), (65_536, INFINITY)),
        ((65_536, INFINITY), None),
        ((100_000, 200_000), None),
        ((4096, 4096), None),
        ((INFINITY, INFINITY), None),
    ],
)
def test_file_descriptors_are_raised_to_the_connections_and_never_lowered(
    limits: tuple[int, int], raised: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(run.resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(run.resource, "setrlimit", lambda which, values: made.append((which, values)))
    run._allow_many_connections()
    assert made == ([] if raised is None else [(resource.RLIMIT_NOFILE, raised)])


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
    assert run.AccessLogFilter().filter(entry) == (shown is not None)
    assert not shown or entry.args == ("127.0.0.1:5", "GET", shown, "1.1", 200)


def test_other_records_are_logged_as_they_are() -> None:
    for entry in (record(), record("GET", "/health"), record(*"abcdef")):
        arguments = entry.args
        assert run.AccessLogFilter().filter(entry) and entry.args is arguments


def test_addresses_that_cannot_be_bound_are_named() -> None:
    with run._bound(ServerConfig(host="127.0.0.1", port=0)) as listener:
        port = listener.getsockname()[1]
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        listener.listen()
        with pytest.raises(ConfigError, match=f"port={port}: cannot be bound on 127.0.0.1: Address already in use"):
            run._bound(ServerConfig(host="127.0.0.1", port=port))
    with pytest.raises(ConfigError, match="host='no.such.host.invalid': is not an address of this machine"):
        run._bound(ServerConfig(host="no.such.host.invalid", port=0))


@pytest.mark.parametrize(
    ("template", "has_template", "warns"),
    [(None, False, False), (None, True, True), ("mine", False, True), ("mine", True, True)],
)
def test_a_template_that_fails_is_a_warning(
    template: str | None, has_template: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that the server uses; completions need none."""
    used: list[str | None] = []

    def encode_chat(messages: Any, *, template: str | None) -> None:
        used.append(template)
        raise RequestError("messages", messages, "the chat template rejects them")

    tokenizer = SimpleNamespace(has_chat_template=has_template, encode_chat=encode_chat)
    serving: Any = SimpleNamespace(chat_template=template, tokenizer=tokenizer, harmony=None)
    with caplog.at_level(logging.WARNING):
        run.try_chat(serving)
    assert used == [template] * warns
    assert ("chats may fail: messages=" in caplog.text) == warns
