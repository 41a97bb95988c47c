"""Results of requests: one `RequestOutput` per prompt, with one `CompletionOutput` per sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phonograph.core.batch import TokenLogprobs
from phonograph.core.request import FinishReason
from phonograph.errors import RequestError, RequestFailure
from phonograph.text.output_text import TextBuilder

_FIELDS = ("index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs")
"""Arguments of a CompletionOutput, in order."""


class CompletionOutput:
    """One sample of a prompt. The engine appends tokens, and `update` turns them into text.

    Attributes:
        index: number of the sample among those of its prompt.
        token_ids: tokens so far.
        finish_reason: "stop", "length", "abort", or None while the sample is in progress.
        stop_reason: the stop token or stop string that ended the sample, or None.
        logprobs: one entry per token if the parameters request them, else None.

    Example:
        ```python
        (output,) = llm.generate("1 2 3", SamplingParams(temperature=0.0, max_tokens=4))
        (sample,) = output.outputs
        assert len(sample.token_ids) <= 4 and sample.finish_reason in ("stop", "length")
        ```
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
        """Text that further tokens cannot change; a read takes time proportional to its length."""
        return self._text if isinstance(self._text, str) else self._text.text

    def text_from(self, start: int) -> str:
        """Return `text[start:]`, in time proportional to its length.

        Args:
            start: first character to return.
        """
        return self._text[start:] if isinstance(self._text, str) else self._text.text_from(start)

    def update(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> None:
        """Turn new tokens into text and store the reasons. A stop string in the text ends the sample first.

        Tokens after the one that completes a stop string are removed from the lists, with their log-probabilities.

        Args:
            finish_reason: as the engine reports it; None while the sample grows.
            stop_reason: stop token that ended the sample, or None.
        """
        text = self._text
        if not isinstance(text, str):
            text.push(self.token_ids)
            if finish_reason is not None:
                text.finish()
            if text.stopped is not None:
                # The same run of tokens may have reached max_tokens; the stop string has precedence.
                finish_reason, stop_reason = "stop", text.stopped
                del self.token_ids[text.num_tokens :]
                if self.logprobs is not None:
                    del self.logprobs[text.num_tokens :]
            if finish_reason is not None:
                self._text = text.text
        self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in _FIELDS)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompletionOutput) and self._values() == other._values()

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> tuple[type[CompletionOutput], tuple[Any, ...]]:
        return CompletionOutput, self._values()

    def __repr__(self) -> str:
        fields = zip(_FIELDS, self._values(), strict=True)
        return f"CompletionOutput({', '.join(f'{name}={value!r}' for name, value in fields)})"


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt with its samples.

    Attributes:
        request_id: name of the request.
        prompt: text of the prompt, or None if it was passed as token ids.
        prompt_token_ids: tokens of the prompt.
        outputs: the samples.
        prompt_logprobs: one entry per prompt token, the first None, if the parameters request them; else None.
        num_cached_tokens: prompt tokens found in the prefix cache.
        warnings: parts of the structured output that the grammar does not enforce.
        error: reason why the request was refused or failed; it then has no outputs.

    Example:
        ```python
        first, second = llm.generate(["1 2 3", "4 5 6"], SamplingParams(max_tokens=4))
        assert first.finished and first.error is None and first.prompt == "1 2 3"
        ```
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
        """True if no sample grows any more."""
        return self.error is not None or all(output.finish_reason is not None for output in self.outputs)
