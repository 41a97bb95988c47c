"""The parts of one answer as a row of items, for protocols whose streams begin and end each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from phonograph.text.formats.answer_parts import Found, ToolDelta

ItemKind = Literal["reasoning", "text", "call"]
Change = Literal["begin", "grow", "end"]


@dataclass(slots=True)
class AnswerItem:
    """A stretch of reasoning, a stretch of text, or a call.

    index: place in the answer
    name:  function of a call
    custom: the call is that of a custom tool
    """

    kind: ItemKind
    index: int
    name: str = ""
    custom: bool = False
    _pieces: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        """The text of the item so far; of a call, its arguments."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call, up to where `max_tokens` cut them."""
        try:
            found = from_json(self.text or "{}", allow_partial=True)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def add(self, text: str) -> None:
        self._pieces.append(text)


class ItemEvent(NamedTuple):
    """Change of an item. `text` is what it grew by."""

    change: Change
    item: AnswerItem
    text: str = ""


class AnswerItems:
    """Makes the items of one answer from its parts. Items do not overlap: one ends before the next begins.

    White space before a call or at the end, with no text before it, is no item.
    """

    def __init__(self) -> None:
        self.items: list[AnswerItem] = []
        self._open: AnswerItem | None = None
        self._space = ""

    @property
    def has_calls(self) -> bool:
        return any(item.kind == "call" for item in self.items)

    def read(self, found: Found) -> Iterator[ItemEvent]:
        """Yield the changes that new parts make.

        Parts that come together have no order among them. Arguments of a call that has begun come before text, because
        text ends the call.
        """
        if found.reasoning:
            yield from self._grow("reasoning", found.reasoning)
        calls, num_continued = found.calls, 0
        if found.content and self._open is not None and self._open.kind == "call":
            num_continued = next((at for at, call in enumerate(calls) if call.name is not None), len(calls))
        for call in calls[:num_continued]:
            yield from self._call(call)
        if found.content:
            yield from self._text(found.content)
        for call in calls[num_continued:]:
            yield from self._call(call)

    def end(self) -> Iterator[ItemEvent]:
        """Yield the end of the last item."""
        if self._open is not None:
            yield ItemEvent("end", self._open)
            self._open = None

    def _text(self, text: str) -> Iterator[ItemEvent]:
        if self._open is None or self._open.kind != "text":
            text = self._space + text
            if text.isspace():
                self._space = text
                return
        self._space = ""
        yield from self._grow("text", text)

    def _call(self, call: ToolDelta) -> Iterator[ItemEvent]:
        if call.name is not None:
            self._space = ""
            yield from self._begin("call", call.name, custom=call.custom)
        item = self._open
        assert item is not None and item.kind == "call", "arguments follow the name of their call"
        if call.arguments:
            item.add(call.arguments)
            yield ItemEvent("grow", item, call.arguments)

    def _grow(self, kind: ItemKind, text: str) -> Iterator[ItemEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.add(text)
        yield ItemEvent("grow", self._open, text)

    def _begin(self, kind: ItemKind, name: str = "", *, custom: bool = False) -> Iterator[ItemEvent]:
        yield from self.end()
        item = self._open = AnswerItem(kind, len(self.items), name, custom)
        self.items.append(item)
        yield ItemEvent("begin", item)
