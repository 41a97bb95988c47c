"""Formats of answers that an installed package has: the guide's example, and each kind of package that is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from installed_package import LINE_CALLS, install

from phonograph.config.server_config import ServerConfig
from phonograph.errors import ConfigError
from phonograph.server.chat.answer_reader import AnswerReader
from phonograph.server.chat.tools import ToolChoice
from phonograph.text.formats.find_formats import TOOL_FORMATS, check_formats, find_formats

GROUPS = {"tool_call_parser": "phonograph.tool_formats", "reasoning_parser": "phonograph.reasoning_formats"}
ENTRIES = {"tool_call_parser": {"lines": "line_calls:LINES"}, "reasoning_parser": {"thought": "line_calls:THOUGHT"}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]


class Vocabulary:
    """Stands for a tokenizer with these tokens."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def token_id(self, piece: str) -> int | None:
        return self.tokens.index(piece) if piece in self.tokens else None


def found(*tokens: str, **settings: Any) -> Any:
    config = ServerConfig(**settings)
    check_formats(config)
    return find_formats(
        Vocabulary(*tokens),  # type: ignore[arg-type]
        "",
        reasoning_parser=config.reasoning_parser,
        tool_call_parser=config.tool_call_parser,
    )


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a package by its name, module and entry points."""

    def make(
        setting: str, entries: dict[str, str] | None = None, source: str = LINE_CALLS, name: str = "line-calls"
    ) -> None:
        entries = ENTRIES[setting] if entries is None else entries
        install(tmp_path, monkeypatch, name, source, GROUPS[setting], entries)

    return make


def test_calls_in_a_form_of_a_package_whole_and_streamed(put: Any) -> None:
    put("tool_call_parser", {"Lines": "line_calls:LINES"})
    formats = found(tool_call_parser="LINES")
    assert formats.notes[1] == "tool calls: lines (set by tool_call_parser, from the package line-calls 0.1.0)"
    text = 'I add.\nCALL add {"a": 1}\nCALL rain {}\nCALL now {}'
    for size in (1, 2, 7, len(text)):
        reader = AnswerReader(ToolChoice(form="parsed", tools=TOOLS), formats.tools, None)
        parts = [reader.read(text[at : at + size], ended=at + size >= len(text)) for at in range(0, len(text), size)]
        assert "".join(part.content for part in parts) == "I add.\nCALL rain {}\n" and reader.has_calls
        calls = [(call.index, call.name, call.arguments) for part in parts for call in part.calls]
        assert calls == [(0, "add", '{"a": 1}'), (1, "now", "{}")]


def test_reasoning_between_the_markers_of_a_package(put: Any) -> None:
    put("reasoning_parser")
    formats = found("<thought>", "</thought>", reasoning_parser="thought")
    assert formats.notes[0] == "reasoning: thought (set by reasoning_parser, from the package line-calls 0.1.0)"
    form = formats.reasoning
    assert (form.start, form.end, form.start_id, form.end_id, form.always) == ("<thought>", "</thought>", 0, 1, False)
    with pytest.raises(ConfigError, match=r"'thought': needs the tokens <thought> and </thought>"):
        found("<thought>", reasoning_parser="thought")


@pytest.mark.parametrize("setting", GROUPS)
def test_an_unknown_name_is_told_all_that_work(put: Any, setting: str) -> None:
    with pytest.raises(ConfigError) as before:
        ServerConfig(**{setting: "line"})
    put(setting)
    with pytest.raises(ConfigError) as after:
        ServerConfig(**{setting: "line"})
    (name,) = ENTRIES[setting]
    assert str(after.value) == f"{before.value}, {name}" and f"{setting}='line': must be one of " in str(after.value)


def test_a_package_whose_format_no_setting_names_is_not_imported(put: Any) -> None:
    put("tool_call_parser", source="raise ImportError('broken')")
    assert found(tool_call_parser="hermes").tools is TOOL_FORMATS["hermes"]
    assert found().tools is None and "line_calls" not in sys.modules


NO_FORMAT = {"tool_call_parser": "find_formats.ToolFormat", "reasoning_parser": "reasoning.ReasoningMarkers"}


@pytest.mark.parametrize("setting", GROUPS)
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import nothing_here", "cannot be imported .* ModuleNotFoundError: No module named 'nothing_here'"),
        ("1 / 0", "cannot be imported .* ZeroDivisionError"),
        ("", "cannot be imported .* AttributeError"),
        ("LINES = THOUGHT = 5", "has int .*; must be phonograph.text.formats.{}"),
        (
            "class LINES: name = 'lines'\nclass THOUGHT: name = 'thought'",
            "has type .*; must be phonograph.text.formats.{}",
        ),
        (
            LINE_CALLS.replace('"lines", ', '"other", ').replace('"thought", ', '"other", '),
            r"has \w+ 'other' .*; must be phonograph.text.formats.{} with the name '(lines|thought)'",
        ),
    ],
)
def test_a_package_that_does_not_work_is_refused(put: Any, setting: str, source: str, problem: str) -> None:
    put(setting, source=source)
    ((name, target),) = ENTRIES[setting].items()
    expected = rf"{setting}='{name}': the package line-calls 0\.1\.0 {problem.format(NO_FORMAT[setting])}"
    with pytest.raises(ConfigError, match=expected) as caught:
        check_formats(ServerConfig(**{setting: name}))
    assert target in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "to", "problem"),
    [
        ("def push", "def feed", "AttributeError: .* no attribute 'push'"),
        ("def finish", "def end", "must have num_calls, finish"),
        ("        self.num_calls = 0\n", "", "must have num_calls, finish"),
        ("return found", "return text", "push that returns Found"),
        ("(self, functions)", "(self)", "TypeError"),
        ('ToolFormat("lines", LineCalls)', 'ToolFormat("lines", 5)', "'int' object is not callable"),
    ],
)
def test_a_parser_that_does_not_work_is_refused(put: Any, changed: str, to: str, problem: str) -> None:
    source = LINE_CALLS.partition("\nparser = ")[0]
    assert changed in source
    put("tool_call_parser", source=source.replace(changed, to))
    expected = rf"'lines': the parser of the package line-calls 0\.1\.0 does not work: .*{problem}"
    with pytest.raises(ConfigError, match=expected):
        check_formats(ServerConfig(tool_call_parser="lines"))


@pytest.mark.parametrize("marker", ["", "<a<"])
def test_markers_that_cannot_be_found_in_growing_text_are_refused(put: Any, marker: str) -> None:
    put("reasoning_parser", source=LINE_CALLS.replace('"</thought>"', f'"{marker}"'))
    with pytest.raises(ConfigError, match=rf"line-calls 0\.1\.0 cannot be imported .*marker '{marker}': its first"):
        check_formats(ServerConfig(reasoning_parser="thought"))


@pytest.mark.parametrize(
    ("setting", "name"), [("tool_call_parser", "hermes"), ("reasoning_parser", "qwen3"), ("reasoning_parser", "none")]
)
def test_the_name_of_a_built_in_format_is_refused(put: Any, setting: str, name: str) -> None:
    put(setting, {name.upper(): "line_calls:LINES"})
    expected = (
        rf"{setting}='{name}': is a built-in format, and the package line-calls 0\.1\.0 has .* rename or uninstall"
    )
    with pytest.raises(ConfigError, match=expected):
        check_formats(ServerConfig(**{setting: name}))


@pytest.mark.parametrize("setting", GROUPS)
def test_a_name_of_two_packages_is_refused(put: Any, setting: str) -> None:
    put(setting)
    put(setting, name="more-calls")
    expected = (
        r"of the package (line|more)-calls 0\.1\.0 and the package (line|more)-calls 0\.1\.0; uninstall all but one"
    )
    with pytest.raises(ConfigError, match=expected):
        check_formats(ServerConfig(**{setting: next(iter(ENTRIES[setting]))}))
