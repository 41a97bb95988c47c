"""The server's process: connections, and chat templates that fail."""

from __future__ import annotations

import logging
import resource
from types import SimpleNamespace
from typing import Any

import pytest

from phonograph.errors import RequestError
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
    serving.engine = SimpleNamespace(facts=SimpleNamespace(pooler=None))
    with caplog.at_level(logging.WARNING):
        run.try_chat(serving)
    assert used == [template] * warns
    assert ("chats may fail: messages=" in caplog.text) == warns
