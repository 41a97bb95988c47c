"""Parts of a model's answer, and the protocol of the parsers that find calls in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(slots=True)
class ToolDelta:
    """New part of call `index`: its name if it begins, and text of its arguments, or of the input of a custom tool."""

    index: int
    arguments: str = ""
    name: str | None = None
    custom: bool = False


@dataclass(slots=True)
class Found:
    """New reasoning, content and calls of a text."""

    content: str = ""
    calls: list[ToolDelta] = field(default_factory=list[ToolDelta])
    reasoning: str = ""


@runtime_checkable
class ToolParser(Protocol):
    """Parser of the calls in one answer, in time proportional to its length.

    num_calls: calls that have ended, and at the end of the text all calls
    """

    num_calls: int

    def push(self, text: str) -> Found:
        """Parse further text. Text that may be the start of a call is kept back."""
        ...

    def finish(self) -> Found:
        """End the text; return what was kept back and is not part of a call."""
        ...


def partial_suffix(text: str, marker: str) -> int:
    """Return the length of the proper prefix of `marker` that ends `text`.

    The first character of the marker must occur in it once, so that there is one such prefix at most.
    """
    start = text.rfind(marker[0], max(0, len(text) - len(marker) + 1))
    return len(text) - start if start >= 0 and marker.startswith(text[start:]) else 0
