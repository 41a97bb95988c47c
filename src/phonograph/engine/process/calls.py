"""One call in progress: its prompts with their samples as they grow, and the task that waits for them.

The engine's reports are taken in as they come, however slowly a client reads; what has come since the client's last
turn is then one piece. So a slow client costs memory for its own answer, and nobody else anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from phonograph.core.batch import TokenLogprobs
from phonograph.core.request import FinishReason
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.outputs import CompletionOutput
from phonograph.text.output_text import text_builder
from phonograph.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """What a sample got since the last one was taken."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


class Sample(CompletionOutput):
    """One choice of an answer, which a stream takes piece by piece.

    last_token: when the engine made the latest one, in seconds of `time.monotonic`
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: list[int]
    ) -> None:
        text = text_builder(tokenizer, params, prompt_token_ids) or ""
        super().__init__(index, text, logprobs=None if params.logprobs is None else [])
        self.last_token: float | None = None
        self._num_taken = 0
        self._text_taken = 0

    def grow(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> None:
        """Take what the engine reported. A stop string in the text ends the sample, whatever the engine said."""
        self.token_ids += token_ids
        if self.logprobs is not None:
            self.logprobs += logprobs or ()
        self.update(finish_reason, stop_reason)

    def take(self) -> Delta:
        """Return what is new since the last call."""
        start, text = self._num_taken, self.text_from(self._text_taken)
        self._num_taken = len(self.token_ids)
        self._text_taken += len(text)
        return Delta(text, self.token_ids[start:], [] if self.logprobs is None else self.logprobs[start:])


@dataclass(slots=True)
class Prompt:
    """A prompt and its samples. `num_cached_tokens`, `logprobs` and `warnings` are known once its first token has come.

    opened: when it was asked for, in seconds of `time.monotonic`
    """

    key: int
    token_ids: list[int]
    samples: list[Sample]
    num_growing: int
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs | None] | None = None
    warnings: tuple[str, ...] = ()
    opened: float = field(default_factory=time.monotonic)


class Call:
    """Prompts that were opened together. The caller that opened it closes it, whatever happened.

    streams:   whether its owner wants to know of every change, or of the end only
    end:       tells the engine that nobody waits any more
    on_change: where set, is called once for what a round of reports brought; `wait` returns for the end and errors
    """

    def __init__(
        self,
        prompts: list[Prompt],
        *,
        streams: bool,
        end: Callable[[Call], None],
    ) -> None:
        self.prompts = prompts
        self._streams = streams
        self._end = end
        self._num_growing = sum(prompt.num_growing for prompt in prompts)
        self._error: Exception | None = None
        self._closed = False
        self._changed: dict[int, Sample] = {}
        self.on_change: Callable[[], None] | None = None
        self._event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def samples(self) -> list[Sample]:
        """The choices of the answer, in their order."""
        return [sample for prompt in self.prompts for sample in prompt.samples]

    @property
    def finished(self) -> bool:
        return not self._num_growing

    async def wait(self, *, peek: bool = False) -> None:
        """Wait until samples have changed since the last wait; without `streams`, until all have ended.

        peek: the next wait returns at once for the same change

        Raises:
            Exception: the call has failed, with the error that `fail` was given.
        """
        await self._event.wait()
        if self._error is not None:
            raise self._error
        if not peek:
            self._event.clear()

    def take_changed(self) -> list[Sample]:
        """The samples that changed since the last call of this."""
        changed, self._changed = self._changed, {}
        return list(changed.values())

    def wake(self) -> None:
        """Let `wait` return."""
        self._event.set()

    def touch(self, prompt: Prompt, sample: Sample) -> None:
        """A sample has grown, and may have ended by it. Whoever calls this calls `on_change` later, where it is set."""
        if sample.finish_reason is not None:
            prompt.num_growing -= 1
            self._num_growing -= 1
        if self._streams:
            self._changed[sample.index] = sample
        if self.finished or (self._streams and self.on_change is None):
            self._event.set()

    def fail(self, error: Exception) -> None:
        """Ends the call; whoever waits for it is told why. The first error stays, and after the end there is none."""
        if not self._closed:
            self._error = error
            self.close()
            self._event.set()

    def limit(self, seconds: float, error: Exception) -> None:
        """Fails the call with `error` unless it is closed in time."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.fail, error)

    def watch(self, client_gone: Awaitable[object], error: Exception) -> None:
        """Fails the call with `error` once `client_gone` is done."""

        async def fail_when_gone() -> None:
            await client_gone
            self.fail(error)

        self._watcher = asyncio.create_task(fail_when_gone())

    def close(self) -> None:
        """Ends what is still growing. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        for helper in (self._timer, self._watcher):
            if helper is not None:
                helper.cancel()
        self._end(self)
