"""A form of calls that an installed package has, in a server: whole answers, streams, notes, and the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from installed_package import LINE_CALLS, install
from servers import QUESTION

from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.errors import ConfigError
from phonograph.server.http.run import checked_template

TEXT = 'Yes.\nCALL add {"a": 1}'


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the guide's example, and a package that cannot be imported."""
    group = "phonograph.tool_formats"
    install(tmp_path, monkeypatch, "line-calls", LINE_CALLS, group, {"lines": "line_calls:LINES"})
    install(tmp_path, monkeypatch, "broken-calls", "import nothing_here", group, {"broken": "broken_calls:FORM"})


@pytest.mark.usefixtures("package")
def test_calls_whole_and_streamed(serve_with: Any) -> None:
    server = serve_with(tool_call_parser="lines")
    note = "tool calls: lines (set by tool_call_parser, from the package line-calls 0.1.0)"
    assert server.get("/v1/graphs").json()["notes"][-1] == note
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": schema}}
    settings: Any = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "tools": [tool]}
    settings |= {"temperature": 0, "max_tokens": 60, "extra_body": {"guided_choice": [TEXT]}}
    create = server.client().chat.completions.create
    (choice,) = create(**settings).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Yes.\n"
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    deltas = [chunk.choices[0].delta for chunk in create(stream=True, **settings) if chunk.choices]
    calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(delta.content or "" for delta in deltas) == "Yes.\n" and len(deltas) > 2
    assert calls[0].name == "add" and "".join(call.arguments for call in calls) == '{"a": 1}'


@pytest.mark.usefixtures("package")
def test_a_broken_package_is_refused_before_the_engine_starts() -> None:
    config = EngineConfig(model="demo")
    checked_template(config, ServerConfig(tool_call_parser="lines"))
    with pytest.raises(ConfigError, match=r"tool_call_parser='broken': the package broken-calls 0\.1\.0 cannot be"):
        checked_template(config, ServerConfig(tool_call_parser="broken"))
