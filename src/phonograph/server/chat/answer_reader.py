"""Reasoning, content and tool calls of one sample, found in its growing text."""

from __future__ import annotations

from phonograph.server.chat.tools import ToolChoice
from phonograph.text.formats.answer_parser import AnswerParser
from phonograph.text.formats.answer_parts import Found, ToolParser
from phonograph.text.formats.find_formats import ToolFormat
from phonograph.text.formats.json_calls import JsonCalls, NamedCall
from phonograph.text.formats.reasoning import ReasoningReader


class AnswerReader:
    """Reads the text of one sample. `has_calls` is True if its finish reason is "tool_calls".

    Args:
        choice: tools of the request, or None.
        form: form of the model's own calls, if the choice leaves calls to the model.
        reasoning: reader of the reasoning, or None.
    """

    def __init__(self, choice: ToolChoice | None, form: ToolFormat | None, reasoning: ReasoningReader | None) -> None:
        self._choice = choice
        self._parser = AnswerParser(reasoning, None if choice is None else _parser(choice, form))

    @property
    def has_calls(self) -> bool:
        # With a named function the finish reason is "stop", as at OpenAI.
        return self._parser.num_calls > 0 and self._choice is not None and self._choice.form != "named"

    def read(self, text: str, *, ended: bool) -> Found:
        """Return the parts of new text; of the whole text, if `ended` is True at once."""
        found = self._parser.push(text)
        if ended:
            rest = self._parser.finish()
            found = Found(found.content + rest.content, found.calls + rest.calls, found.reasoning + rest.reasoning)
        if self._choice is not None and not self._choice.parallel:
            found.calls = [call for call in found.calls if call.index == 0]
        return found


def _parser(choice: ToolChoice, form: ToolFormat | None) -> ToolParser:
    if choice.form == "named":
        assert choice.function is not None
        return NamedCall(choice.function)
    functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in choice.tools}
    if choice.form == "required":
        return JsonCalls(functions, listed=True)
    assert form is not None, "a request is refused if calls of an unknown form are left to the model"
    return form.parser(functions)
