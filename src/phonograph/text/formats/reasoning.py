"""Reasoning before an answer: text between two markers, found in growing text.

White space around the markers belongs to the format, and is in neither part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from phonograph.text.formats.answer_parts import partial_suffix
from phonograph.text.tokenizer import Tokenizer

_SPACE = 64
"""Characters of white space at a marker that belong to the format. More are text, so that little is kept back."""
_TAIL = 8
"""Tokens at the end of a prompt that hold a marker with the white space after it."""
_FIRST = 4
"""Tokens at the start of an answer among which its opening marker is."""


class Opening(Enum):
    """State of an answer at its beginning.

    INSIDE:  the prompt has opened the reasoning
    OUTSIDE: there is none, or the prompt has closed it
    OPEN:    the opening marker decides
    """

    INSIDE = "inside"
    OUTSIDE = "outside"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Markers of a format of reasoning. Each is a token of the vocabulary.

    always: text without an opening marker is reasoning too, as with models that write only the closing one
    """

    name: str
    start: str
    end: str
    always: bool = False

    def __post_init__(self) -> None:
        for marker in (self.start, self.end):
            if not marker or marker[0] in marker[1:]:
                raise ValueError(f"marker {marker!r}: its first character must occur in it once (`partial_suffix`)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Markers of reasoning, each with its token.

    always: text without an opening marker is reasoning too, as with models that write only the closing one
    """

    name: str
    start: str
    end: str
    start_id: int
    end_id: int
    always: bool

    def opening(self, tokenizer: Tokenizer, prompt: Sequence[int], continued: Mapping[str, object] | None) -> Opening:
        """Return the state in which the answer to a prompt begins.

        Args:
            tokenizer: that of the prompt.
            prompt: token ids.
            continued: message that the answer continues, if it does.
        """
        if continued is not None:
            text = str(continued.get("content") or "")
            return Opening.INSIDE if text.rfind(self.start) > text.rfind(self.end) else Opening.OUTSIDE
        tail = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith(self.start):
            return Opening.INSIDE
        if tail.endswith(self.end):
            return Opening.OUTSIDE
        return Opening.OPEN


class ReasoningReader:
    """Splits one answer into reasoning and content. `inside` is True while the text is reasoning, or may be."""

    def __init__(self, form: ReasoningFormat, opening: Opening) -> None:
        self._form = form
        self.inside = opening is not Opening.OUTSIDE
        self._undecided = self.inside  # an opening marker may still come
        self._always = form.always or opening is Opening.INSIDE
        self._held = ""
        self._begun = False  # the current part has text
        self._trims = False  # white space at the start of the content belongs to the format

    def push(self, text: str) -> tuple[str, str]:
        """Return the new reasoning and the new content of further text."""
        if not self.inside:
            return "", self._content(text)
        self._held += text
        if self._undecided:
            text = self._held.lstrip()
            is_near = len(self._held) - len(text) <= _SPACE
            markers = (self._form.start, self._form.end)
            if is_near and text not in markers and any(marker.startswith(text) for marker in markers):
                return "", ""
            self._undecided = False
            if is_near and text.startswith(self._form.start):
                self._held = text[len(self._form.start) :]
            elif not self._always and not (is_near and text.startswith(self._form.end)):
                self.inside = False
                return "", self._take()
        return self._reasoning()

    def finish(self) -> tuple[str, str]:
        """End the text; return what was kept back."""
        if not self.inside:
            return "", ""
        rest = self._take()
        if self._undecided and not self._always:
            self.inside = False
            return "", rest
        return _trimmed(rest if self._begun else rest.lstrip()), ""

    def _reasoning(self) -> tuple[str, str]:
        if not self._begun:
            self._held = self._held.lstrip()
        reasoning, marker, rest = self._held.partition(self._form.end)
        if marker:
            self.inside, self._held, self._trims = False, "", True
            return _trimmed(reasoning), self._content(rest)
        kept = len(reasoning) - partial_suffix(reasoning, self._form.end)
        kept = len(_trimmed(reasoning[:kept]))
        reasoning, self._held = reasoning[:kept], reasoning[kept:]
        self._begun = self._begun or bool(reasoning)
        return reasoning, ""

    def _content(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text

    def _take(self) -> str:
        held, self._held = self._held, ""
        return held


def _trimmed(text: str) -> str:
    """Return a text without the white space at its end that belongs to the format."""
    return text[: max(len(text.rstrip()), len(text) - _SPACE)]


class ReasoningTokens:
    """Number of tokens of one sample between the markers, counted as the sample grows."""

    def __init__(self, form: ReasoningFormat, opening: Opening) -> None:
        self._form, self._opening = form, opening
        self._num_read = self._num_before = 0
        self._ended = opening is Opening.OUTSIDE
        self._num_counted = 0

    def count(self, token_ids: Sequence[int]) -> int:
        """Return the number among all tokens of the sample so far."""
        if self._ended:
            return self._num_counted
        form, first = self._form, token_ids[:_FIRST]
        if not self._num_before and form.start_id in first:
            self._num_before = first.index(form.start_id) + 1
        is_reasoning = self._num_before or form.always or self._opening is Opening.INSIDE
        end = len(token_ids)
        for place in range(self._num_read, len(token_ids)):
            if token_ids[place] == form.end_id:
                self._ended, end = True, place
                break
        self._num_read = end
        self._num_counted = max(end - self._num_before, 0) if is_reasoning else 0
        return self._num_counted
