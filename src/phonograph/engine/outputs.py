"""Results of requests: one `RequestOutput` per prompt, with one `CompletionOutput` per sample."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from phonograph.core.batch import TokenLogprobs
from phonograph.core.request import FinishReason
from phonograph.errors import RequestError, RequestFailure
from phonograph.text.logprob_views import LogprobsView, PositionLogprobs, TokenText, no_text
from phonograph.text.output_text import TextBuilder

_FIELDS = ("index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs")
"""Arguments of a CompletionOutput, in order."""


class CompletionOutput:
    """One sample of a prompt. The engine appends tokens, and `update` turns them into text.

    Attributes:
        index: number of the sample among those of its prompt.
        token_ids: tokens so far.
        finish_reason: "stop", "length", "abort", "repetition", or None while the sample is in progress.
        stop_reason: the stop token or stop string that ended the sample, or None.
        positions: log-probabilities as the engine appends them, one entry per token, or None.

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
        token_text: TokenText = no_text,
    ) -> None:
        self.index = index
        self.token_ids = [] if token_ids is None else token_ids
        self.finish_reason: FinishReason | None = finish_reason
        self.stop_reason: int | str | None = stop_reason
        self.positions = logprobs
        self._token_text = token_text
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

    @property
    def logprobs(self) -> LogprobsView[PositionLogprobs] | None:
        """One mapping from token ids to log-probabilities per token if the parameters request them, else None."""
        return None if self.positions is None else LogprobsView(self.positions, self._token_text)

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log-probabilities if the parameters request them, else None; added up at each read."""
        return None if self.positions is None else sum(position.logprobs[0] for position in self.positions)

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
                if self.positions is not None:
                    del self.positions[text.num_tokens :]
            if finish_reason is not None:
                self._text = text.text
        self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in _FIELDS)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompletionOutput) and self._values() == other._values()

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> tuple[type[CompletionOutput], tuple[Any, ...]]:
        *values, logprobs = self._values()
        if logprobs is None:
            return CompletionOutput, (*values, None)
        # A view leaves the tokenizer behind.
        _, (positions, token_text) = logprobs.__reduce__()
        return CompletionOutput, (*values, positions, token_text)

    def __repr__(self) -> str:
        fields = zip(_FIELDS, self._values(), strict=True)
        return f"CompletionOutput({', '.join(f'{name}={value!r}' for name, value in fields)})"


class FailedOutputs(list[CompletionOutput]):
    """Outputs of a request that was refused or failed: none. The error of an index has the reason."""

    def __init__(self, error: RequestError | RequestFailure) -> None:
        super().__init__()
        self._error = error

    def __getitem__(self, index: Any) -> NoReturn:
        raise IndexError(f"the request has no outputs, because it was refused or failed: {self._error}")

    def __reduce__(self) -> tuple[type[FailedOutputs], tuple[RequestError | RequestFailure]]:
        return FailedOutputs, (self._error,)


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Times of a request, with vLLM's names. Times that end in `_ts` are in seconds of `time.monotonic`.

    Attributes:
        arrival_time: time at which the request was queued, in seconds since the epoch.
        queued_ts: the same time.
        first_token_ts: time of the first token, or 0 before it.
        last_token_ts: time of the last token, known when the samples have ended.
        num_generation_tokens: tokens of all samples, known when they have ended.
    """

    arrival_time: float = field(default_factory=time.time)
    queued_ts: float = field(default_factory=time.monotonic)
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0

    @property
    def first_token_latency(self) -> float:
        """Seconds from the arrival to the first token, or 0 before it."""
        return self.first_token_ts - self.queued_ts if self.first_token_ts else 0.0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt with its samples.

    Attributes:
        request_id: name of the request.
        prompt: text of the prompt, for a conversation that of the chat template; None if it was passed as token ids.
        prompt_token_ids: tokens of the prompt.
        outputs: the samples.
        prompt_logprobs: one mapping per prompt token, the first None, if the parameters request them; else None.
        prompt_token_id_logprobs: log-probabilities of `prompt_logprob_token_ids`, float32 [rows, tokens]; else None.
        num_cached_tokens: prompt tokens found in the prefix cache.
        pooled: result of a request that generates nothing, float32 [F], or [T, F] of all tokens; else None.
        metrics: times of the request; None if it was refused.
        warnings: parts of the structured output that the grammar does not enforce.
        error: reason why the request was refused or failed; it then has no outputs, and `outputs[0]` raises an
            IndexError with the reason.

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
    prompt_logprobs: LogprobsView[PositionLogprobs | None] | None = None
    prompt_token_id_logprobs: np.ndarray | None = None
    num_cached_tokens: int = 0
    pooled: np.ndarray | None = None
    metrics: RequestMetrics | None = None
    warnings: tuple[str, ...] = ()
    error: RequestError | RequestFailure | None = None

    def __post_init__(self) -> None:
        if self.error is not None:
            self.fail(self.error)

    def fail(self, error: RequestError | RequestFailure) -> None:
        """End the request with an error. It loses its samples.

        Args:
            error: reason why it was refused or failed.
        """
        self.error = error
        self.outputs = FailedOutputs(error)

    @property
    def finished(self) -> bool:
        """True if no sample grows any more."""
        return self.error is not None or None not in [output.finish_reason for output in self.outputs]


class PoolingOutput:
    """Result of a request that generates nothing, under the name of each task.

    Attributes:
        data: float32 [F], or [T, F] of all tokens.
    """

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    @property
    def embedding(self) -> list[float]:
        """The numbers of an embedding."""
        return self.data.tolist()

    @property
    def probs(self) -> list[float]:
        """The probabilities of the classes."""
        return self.data.tolist()

    @property
    def score(self) -> float:
        """The score of a pair of texts.

        Raises:
            RequestError: the model has several classes.
        """
        if self.data.size != 1:
            raise RequestError("score", list(self.data.shape), "the model has several classes; probs has them")
        return float(self.data.item())


@dataclass(slots=True, kw_only=True)
class PoolingRequestOutput:
    """A prompt with its embedding, classes or score.

    Attributes:
        request_id: name of the request.
        prompt_token_ids: tokens of the prompt, without what `truncate_prompt_tokens` cut off.
        result: the result, or the reason why there is none.
        num_cached_tokens: prompt tokens found in the prefix cache.
        finished: True, as in vLLM's class.

    Example:
        ```python
        with LLM("demo", convert="embed", max_num_seqs=1, enforce_eager=True) as embedder:
            (output,) = embedder.embed("Tom has 12 apples.")
        assert len(output.outputs.embedding) == 256 and output.error is None
        ```
    """

    request_id: str
    prompt_token_ids: list[int]
    result: PoolingOutput | RequestError | RequestFailure
    num_cached_tokens: int = 0
    finished: bool = True

    @property
    def error(self) -> RequestError | RequestFailure | None:
        """The reason why the request was refused or failed, or None."""
        return None if isinstance(self.result, PoolingOutput) else self.result

    @property
    def outputs(self) -> PoolingOutput:
        """The result.

        Raises:
            RequestError: the request was refused.
            RequestFailure: it failed.
        """
        if not isinstance(self.result, PoolingOutput):
            raise self.result
        return self.result


def pooling_output(output: RequestOutput) -> PoolingRequestOutput:
    """Return the result of a request that generates nothing.

    Args:
        output: of the request, which has ended.
    """
    error = output.error
    if error is None and output.pooled is None:
        error = RequestFailure(output.request_id, "engine", "was aborted")
    return PoolingRequestOutput(
        request_id=output.request_id,
        prompt_token_ids=output.prompt_token_ids,
        result=PoolingOutput(output.pooled) if error is None and output.pooled is not None else error,  # pyright: ignore
        num_cached_tokens=output.num_cached_tokens,
    )
