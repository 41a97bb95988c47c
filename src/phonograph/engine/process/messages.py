"""What the server's process and the engine's process say to each other, as pickles on a socket that only they have."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from phonograph.core.batch import TokenLogprobs
from phonograph.core.request import FinishReason
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.metrics.step_record import StepRecord
from phonograph.errors import PhonographError, RequestError, RequestFailure
from phonograph.graphs.capture_list import CaptureList, CaptureRetry
from phonograph.graphs.resolve import Resolution
from phonograph.scheduling.limits import SchedulerStats

# -- to the engine -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Begin:
    """First message to a started engine: the end-of-sequence token of the tokenizer, which the server has loaded."""

    eos_token_id: int | None


@dataclass(slots=True)
class Add:
    """Prompts of one call to continue, by keys that the server gives them and never gives again.

    If one of them cannot be served, none is.
    """

    prompts: dict[int, list[int]]
    params: SamplingParams
    priority: int


@dataclass(slots=True)
class Abort:
    """Ends a prompt, or one of its samples. One that has ended already is fine."""

    key: int
    index: int | None = None


@dataclass(slots=True)
class Stop:
    """Ends the process, with whatever is in progress."""


Command = Begin | Add | Abort | Stop

# -- from the engine ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Progress:
    """How far the start has come: `done` of `total` in a phase."""

    phase: str
    done: int
    total: int


@dataclass(slots=True, kw_only=True)
class EngineFacts:
    """The engine is ready, and what the server has to know of it.

    context_len: tokens of prompt and output together that a request can have
    resolution:  the graph mode that runs, with its reasons
    captures:    the graphs that there are, their memory in bytes, and what capturing them took
    capture_retries: graphs that were captured at the second try, with the reasons
    notes:       decisions that the configuration left open, or that could not be met as asked
    stats:       of the scheduler, before the first step
    """

    context_len: int
    vocab_size: int
    max_num_seqs: int
    scheduling_policy: str
    device: str
    attention_backend: str
    resolution: Resolution
    captures: CaptureList
    graph_memory_bytes: int
    capture_seconds: float
    capture_retries: tuple[CaptureRetry, ...] = ()
    block_size: int
    notes: tuple[str, ...]
    start_seconds: float
    stats: SchedulerStats


@dataclass(slots=True)
class StartFailed:
    """The engine could not start; the message of the error says why."""

    error: PhonographError


SampleUpdate = tuple[int, int, list[int], list[TokenLogprobs] | None, FinishReason | None, int | str | None]
"""What one sample got: key, index, its new tokens, their log-probabilities where asked for, and where it has ended the
finish reason and the stop reason. A plain tuple: there is one for each running sequence in each step."""


@dataclass(slots=True)
class PromptFacts:
    """What is known of a prompt once its first token has come; see `RequestOutput`."""

    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs | None] | None
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class Report:
    """What a step brought, or what commands changed.

    prompts: by key, for prompts whose first token is among the updates
    refused: by key, prompts that cannot be served, or for which work failed
    stats:   of the scheduler, after `num_steps` steps
    steps:   those whose results were taken since the last report
    time:    when it was made, in seconds of `time.monotonic`, which the processes of a machine share
    """

    stats: SchedulerStats
    num_steps: int
    updates: list[SampleUpdate] = field(default_factory=list[SampleUpdate])
    prompts: dict[int, PromptFacts] = field(default_factory=dict[int, PromptFacts])
    refused: dict[int, RequestError | RequestFailure] = field(default_factory=dict[int, RequestError | RequestFailure])
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    time: float = field(default_factory=time.monotonic)


Message = Progress | EngineFacts | StartFailed | Report


class Channel(Protocol):
    """The engine's end of a connection."""

    def send(self, message: Message) -> None:
        """Send without waiting."""
        ...

    def receive(self, *, wait: bool) -> Command | None:
        """Return the next command. With `wait` it is waited for; without, None where there is none yet."""
        ...
