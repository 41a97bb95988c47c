"""The parts of a chat's answers as they grow: reasoning, text and calls of each sample, their end, and the usage."""

from __future__ import annotations

from typing import Any, NamedTuple

from phonograph.engine.process.calls import Call, Delta, Sample
from phonograph.server.chat.answer_reader import AnswerReader
from phonograph.server.chat.custom_tools import CustomInputs
from phonograph.server.chat.harmony import Harmony, HarmonyReader
from phonograph.server.chat.tools import ToolChoice
from phonograph.text.formats.answer_parts import Found
from phonograph.text.formats.find_formats import Formats
from phonograph.text.formats.reasoning import Opening, ReasoningReader, ReasoningTokens


class TokenUsage(NamedTuple):
    """Tokens of a call so far.

    cached:    those of the prompt whose keys and values were in the prefix cache
    reasoning: those of the answer that are reasoning; None if the format of the model's reasoning is unknown
    """

    prompt: int
    cached: int
    completion: int
    reasoning: int | None


class ChatParts:
    """Reads the samples of one call.

    Args:
        call: the call of the engine.
        formats: formats of the model's answers.
        harmony: format of chats in place of `formats`, or None.
        tools: tools of the request, or None.
        opening: state of the answers at their beginning.
    """

    def __init__(
        self,
        call: Call,
        formats: Formats,
        harmony: Harmony | None,
        tools: ToolChoice | None,
        opening: Opening = Opening.OUTSIDE,
    ) -> None:
        self.call = call
        self.tools = tools
        self.short_ids = formats.tools is not None and formats.tools.short_ids and tools is not None
        self._formats = formats
        self._harmony = harmony
        self._opening = opening
        self._readers: dict[int, AnswerReader | HarmonyReader | None] = {}
        self._inputs: dict[int, CustomInputs] = {}
        self._reasoning: dict[int, ReasoningTokens] = {}

    def found(self, sample: Sample, delta: Delta) -> Found | None:
        """Return the parts of a sample's new output; None if its text is content and nothing else."""
        try:
            reader = self._readers[sample.index]
        except KeyError:
            reader = self._readers[sample.index] = self._reader()
        if reader is None:
            return None
        ended = sample.finish_reason is not None
        if isinstance(reader, HarmonyReader):
            found = reader.read(delta.token_ids, ended=ended)
        else:
            found = reader.read(delta.text, ended=ended)
        if self.tools is not None and self.tools.custom:
            inputs = self._inputs.setdefault(sample.index, CustomInputs(self.tools.custom, is_raw=self.tools.is_raw))
            found.calls = inputs.read(found.calls, ended=ended)
        return found

    def whole(self, sample: Sample) -> Found:
        """Return the parts of a sample that has ended and was not read before."""
        return self.found(sample, Delta(sample.text, sample.token_ids, [])) or Found(sample.text)

    def has_calls(self, sample: Sample) -> bool:
        """Return True if a sample has calls that the model chose."""
        reader = self._readers.get(sample.index)
        return reader is not None and reader.has_calls

    def usage(self) -> TokenUsage:
        """Return the tokens of the call so far."""
        prompts, samples = self.call.prompts, self.call.samples
        return TokenUsage(
            sum(len(prompt.token_ids) for prompt in prompts),
            sum(prompt.num_cached_tokens for prompt in prompts),
            sum(len(sample.token_ids) for sample in samples),
            self.num_reasoning_tokens(),
        )

    def num_reasoning_tokens(self) -> int | None:
        """Return the tokens of reasoning so far; None if the format of the reasoning is unknown."""
        form = None if self._harmony is not None else self._formats.reasoning
        if form is None:
            return None
        samples = self.call.samples
        for sample in samples:
            if sample.index not in self._reasoning:
                self._reasoning[sample.index] = ReasoningTokens(form, self._opening)
        return sum(self._reasoning[sample.index].count(sample.token_ids) for sample in samples)

    def _reader(self) -> AnswerReader | HarmonyReader | None:
        """Return the reader of one sample; None if its text is its content."""
        tools = self.tools
        if self._harmony is not None:
            functions: list[dict[str, Any]] = [] if tools is None else [tool["function"] for tool in tools.tools]
            names = [function["name"] for function in functions]
            return self._harmony.reader(names, parallel=tools is None or tools.parallel)
        reasoning = None
        if self._formats.reasoning is not None and self._opening is not Opening.OUTSIDE:
            reasoning = ReasoningReader(self._formats.reasoning, self._opening)
        if tools is None and reasoning is None:
            return None
        return AnswerReader(tools, self._formats.tools, reasoning)
