"""Results that a user gets: one `RequestOutput` for each prompt, with one `CompletionOutput` for each sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phonograph.core.batch import TokenLogprobs
from phonograph.core.request import FinishReason
from phonograph.errors import RequestError, RequestFailure
from phonograph.text.output_text import TextBuilder


class CompletionOutput:
    """One sample of a prompt. The engine assembles it: tokens are appended, and `update` reads them.

    finish_reason: "stop", "length", "abort", or None while it goes on; stop_reason: the stop token or string, if any
    logprobs: one entry a token, where asked for
    """

    def __init__(
        self,
        index: int,
        text: str | TextBuilder = "",
        token_ids: list[int] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        self.index = index
        self.token_ids = [] if token_ids is None else token_ids
        self.finish_reason: FinishReason | None = finish_reason
        self.stop_reason: int | str | None = stop_reason
        self.logprobs = logprobs
        self._text = text

    @property
    def text(self) -> str:
        """Text that is certain; it may go on. Each read costs time by its length while the sample goes on."""
        return self._text if isinstance(self._text, str) else self._text.text

    def text_from(self, start: int) -> str:
        """Return `text[start:]` in time by the length of that."""
        return self._text[start:] if isinstance(self._text, str) else self._text.text_from(start)

    def update(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> None:
        """Turn new tokens into text and take the reasons over; a stop string in the text ends the sample first."""
        text = self._text
        if not isinstance(text, str):
            text.push(self.token_ids)
            if finish_reason is not None:
                text.finish()
            if text.stopped is not None:
                # The same token may have reached max_tokens; the stop string is what the user asked about.
                finish_reason, stop_reason = "stop", text.stopped
            if finish_reason is not None:
                self._text = text.text
        self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def _values(self) -> tuple[Any, ...]:
        return self.index, self.text, self.token_ids, self.finish_reason, self.stop_reason, self.logprobs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompletionOutput) and self._values() == other._values()

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> tuple[type[CompletionOutput], tuple[Any, ...]]:
        return CompletionOutput, self._values()

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, token_ids={self.token_ids}, "
            f"finish_reason={self.finish_reason!r}, stop_reason={self.stop_reason!r}, logprobs={self.logprobs})"
        )


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt with its samples.

    prompt:            None where token ids were given
    prompt_logprobs:   one entry for each prompt token, the first None, where asked for
    num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache
    warnings:          what of its structured output the grammar does not hold
    error:             the reason why the request was refused or failed; it then has no outputs
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list[CompletionOutput])
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    warnings: tuple[str, ...] = ()
    error: RequestError | RequestFailure | None = None

    @property
    def finished(self) -> bool:
        return self.error is not None or all(output.finish_reason is not None for output in self.outputs)
