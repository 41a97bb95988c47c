"""Parser of a growing answer: reasoning first, then content with calls."""

from __future__ import annotations

from phonograph.text.formats.answer_parts import Found, ToolParser
from phonograph.text.formats.reasoning import ReasoningReader


class AnswerParser:
    """Parser of one answer. A whole answer is parsed in one push.

    Args:
        reasoning: reader of the reasoning, or None without.
        tools: parser of calls in the content, or None without.
    """

    def __init__(self, reasoning: ReasoningReader | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return 0 if self._tools is None or self._is_inside else self._tools.num_calls

    def push(self, text: str) -> Found:
        """Return the new parts of further text. Text that may be part of a marker or a call is kept back.

        Args:
            text: what follows the text so far.
        """
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
        if self._is_inside:
            return Found(reasoning=reasoning)
        found = Found(text) if self._tools is None else self._tools.push(text)
        found.reasoning = reasoning
        return found

    def finish(self) -> Found:
        """End the answer; return what was kept back. Reasoning that has not ended has neither content nor calls."""
        reasoning, text = ("", "") if self._reasoning is None else self._reasoning.finish()
        if self._tools is None or self._is_inside:
            return Found(text, reasoning=reasoning)
        found, rest = self._tools.push(text), self._tools.finish()
        return Found(found.content + rest.content, found.calls + rest.calls, reasoning)

    @property
    def _is_inside(self) -> bool:
        return self._reasoning is not None and self._reasoning.inside
