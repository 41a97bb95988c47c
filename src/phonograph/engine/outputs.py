"""What a user gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

from phonograph.core.batch import TokenLogprobs
from phonograph.core.request import FinishReason
from phonograph.errors import RequestError, RequestFailure


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One sample of a prompt.

    finish_reason: "stop", "length", "abort", or None while it goes on; stop_reason: the stop token or string, if any
    logprobs: one entry a token, where asked for
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None


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
