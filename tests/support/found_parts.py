"""Parts of an answer that the protocols write out in their forms: reasoning, text, and two calls."""

from __future__ import annotations

from phonograph.server.chat.chat_parts import TokenUsage
from phonograph.text.formats.answer_parts import Found, ToolDelta

USAGE = TokenUsage(7, 3, 9, 4)
PARTS = [
    Found(reasoning="I "),
    Found(reasoning="think."),
    Found("Let "),
    Found("me.", [ToolDelta(0, "", "add"), ToolDelta(0, '{"a":')]),
    Found(" \n", [ToolDelta(0, " 1}")]),
    Found("", [ToolDelta(1, "{}", "now")]),
]
