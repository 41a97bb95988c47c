"""Calls in progress: prompts, their growing samples, and the task that waits for them.

Reports of the engine are applied as they arrive, even if a client reads slowly. A client that falls behind gets
everything since its last read in one piece, so it costs memory for its own answer only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import numpy as np

from phonograph.core.batch import TokenLogprobs
from phonograph.core.request import FinishReason
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.outputs import CompletionOutput, RequestOutput
from phonograph.text.logprob_views import LogprobsView, TokenText
from phonograph.text.output_text import text_builder, token_text
from phonograph.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """New text, tokens and log-probabilities of a sample since the last delta."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


class Sample(CompletionOutput):
    """One choice of an answer, which a stream reads in deltas.

    admitted, first_token, last_token: times of the admission, and at which the engine made the first and the latest
        token, in seconds of `time.monotonic`
    num_preemptions: known when the sample has ended
    num_taken: tokens of the deltas so far
    num_reported: tokens for which the caller was woken last, if it does not wake for each
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: list[int]
    ) -> None:
        text = text_builder(tokenizer, params, prompt_token_ids) or ""
        logprobs = None if params.logprobs is None else list[TokenLogprobs]()
        super().__init__(index, text, logprobs=logprobs, token_text=token_text(tokenizer))
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.num_preemptions = 0
        self.num_reported = 0
        self.num_taken = 0
        self._text_taken = 0

    def grow(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> int:
        """Apply an update of the engine. A stop string in the text ends the sample, whatever the update says.

        Returns:
            The number of new tokens, without those after a stop string.
        """
        before = len(self.token_ids)
        self.token_ids += token_ids
        if self.positions is not None:
            self.positions += logprobs or ()
        self.update(finish_reason, stop_reason)
        return len(self.token_ids) - before

    def take(self) -> Delta:
        """Return what is new since the last call."""
        start, text = self.num_taken, self.text_from(self._text_taken)
        self.num_taken = len(self.token_ids)
        self._text_taken += len(text)
        return Delta(text, self.token_ids[start:], [] if self.positions is None else self.positions[start:])


@dataclass(slots=True)
class Prompt:
    """A prompt and its samples. The first token brings `num_cached_tokens`, `logprobs` and `warnings`.

    pooled: result of a prompt that generates nothing, which has one sample without tokens
    listed: see `RequestOutput.prompt_token_id_logprobs`
    max_tokens: as requested
    opened: time of the request, in seconds of `time.monotonic`
    """

    key: int
    token_ids: list[int]
    samples: list[Sample]
    num_growing: int
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs | None] | None = None
    warnings: tuple[str, ...] = ()
    pooled: np.ndarray | None = None
    listed: np.ndarray | None = None
    max_tokens: int | None = None
    opened: float = field(default_factory=time.monotonic)

    def report(self, output: RequestOutput, text: TokenText) -> None:
        """Copy what is known now to the output of this prompt, whose samples are its `outputs`."""
        output.num_cached_tokens, output.warnings = self.num_cached_tokens, self.warnings
        output.prompt_token_id_logprobs = self.listed
        if self.logprobs is not None:
            output.prompt_logprobs = LogprobsView(self.logprobs, text)
        metrics = output.metrics
        if metrics is not None:
            metrics.first_token_ts = min((one.first_token for one in self.samples if one.first_token), default=0.0)
            metrics.last_token_ts = max((one.last_token for one in self.samples if one.last_token), default=0.0)
            metrics.num_generation_tokens = sum(len(one.token_ids) for one in self.samples)

    def delta(self, output: RequestOutput, text: TokenText) -> RequestOutput:
        """Return a copy of the output of this prompt, with what its samples have gained since the last call."""
        deltas = [(sample, sample.take()) for sample in self.samples]
        return replace(
            output,
            outputs=[
                CompletionOutput(
                    *(sample.index, new.text, new.token_ids, sample.finish_reason, sample.stop_reason),
                    logprobs=None if sample.positions is None else new.logprobs,
                    token_text=text,
                )
                for sample, new in deltas
            ],
        )


class Call:
    """Prompts that were opened together. The caller that opened a call also closes it.

    name:      name of the request for `AsyncLLM.abort`, or None
    streams:   wake the caller at every change, not only at the end
    interval:  new tokens of a sample for which the caller wakes; the first and the last one always do
    end:       called when the call closes
    on_change: if set, called once for the changes of a round of reports; `wait` then returns only for the end and
        errors
    """

    def __init__(
        self,
        prompts: list[Prompt],
        *,
        streams: bool,
        interval: int = 1,
        end: Callable[[Call], None],
    ) -> None:
        self.prompts = prompts
        self.name: str | None = None
        self._streams = streams
        self._interval = interval
        self._end = end
        self._num_growing = sum(prompt.num_growing for prompt in prompts)
        self._error: Exception | None = None
        self._closed = False
        self._changed: dict[int, Sample] = {}
        self.on_change: Callable[[], None] | None = None
        self._event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Future[object] | None = None
        self._at_end: list[Callable[[Call], None]] = []

    @property
    def samples(self) -> list[Sample]:
        """The choices of the answer, in order."""
        return [sample for prompt in self.prompts for sample in prompt.samples]

    @property
    def finished(self) -> bool:
        return not self._num_growing

    async def wait(self, *, peek: bool = False) -> None:
        """Wait until samples have changed since the last wait; without `streams`, until all have ended.

        Args:
            peek: do not consume the change; the next wait returns at once.

        Raises:
            Exception: the error passed to `fail`.
        """
        await self._event.wait()
        if self._error is not None:
            raise self._error
        if not peek:
            self._event.clear()

    def take_changed(self) -> list[Sample]:
        """Return the samples that changed since the last call of this method."""
        changed, self._changed = self._changed, {}
        return list(changed.values())

    def wake(self) -> None:
        """Let `wait` return."""
        self._event.set()

    def touch(self, prompt: Prompt, sample: Sample) -> None:
        """Record that a sample has grown, and may have ended. The caller then calls `on_change` if it is set."""
        if sample.finish_reason is not None:
            prompt.num_growing -= 1
            self._num_growing -= 1
        elif self._interval > 1:
            if 0 < max(sample.num_reported, sample.num_taken) > len(sample.token_ids) - self._interval:
                return
            sample.num_reported = len(sample.token_ids)
        if self._streams:
            self._changed[sample.index] = sample
        if self.finished or (self._streams and self.on_change is None):
            self._event.set()

    def drop(self, prompt: Prompt, num_samples: int) -> None:
        """Remove the growing samples of a prompt after its first `num_samples`."""
        num_dropped = len(prompt.samples[num_samples:])
        del prompt.samples[num_samples:]
        prompt.num_growing -= num_dropped
        self._num_growing -= num_dropped
        if self.finished:
            self._event.set()

    def fail(self, error: Exception) -> None:
        """End the call with an error, which `wait` raises. Later errors, and errors after the end, are ignored."""
        if not self._closed:
            self._error = error
            self.close()
            self._event.set()

    def limit(self, seconds: float, error: Exception) -> None:
        """Fail the call with `error` after `seconds`, unless it has closed."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.fail, error)

    def watch(self, client_gone: Awaitable[object], error: Exception) -> None:
        """Fail the call with `error` when `client_gone` completes."""

        def fail(watcher: asyncio.Future[object]) -> None:
            if not watcher.cancelled() and watcher.exception() is None:
                self.fail(error)

        # A task of its own, so that closing the call before the task begins leaves no coroutine behind.
        self._watcher = asyncio.ensure_future(client_gone)
        self._watcher.add_done_callback(fail)

    def at_end(self, callback: Callable[[Call], None]) -> None:
        """Call `callback` with this call when it closes."""
        self._at_end.append(callback)

    def close(self) -> None:
        """Abort unfinished samples. Further calls have no effect."""
        if self._closed:
            return
        self._closed = True
        for helper in (self._timer, self._watcher):
            if helper is not None:
                helper.cancel()
        self._end(self)
        for callback in self._at_end:
            callback(self)
