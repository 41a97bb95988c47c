"""Messages between an event loop and its engine. Between processes they are pickles on private sockets."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from phonograph.core.batch import TokenLogprobs
from phonograph.core.pooling_params import PoolingParams
from phonograph.core.request import FinishReason
from phonograph.core.sampling_params import SamplingParams
from phonograph.core.token_types import EncoderTokens
from phonograph.engine.groups.group_facts import GroupFacts
from phonograph.engine.metrics.step_record import StepRecord
from phonograph.errors import EngineUnavailable, PhonographError, RequestError, RequestFailure
from phonograph.graphs.capture_list import CaptureList, CaptureRetry
from phonograph.graphs.resolve import Resolution
from phonograph.kernels.triton.ranks.choose_sum import SumChoice
from phonograph.models.heads.encoder_specs import AudioEncoder, TextEncoder
from phonograph.models.heads.pooler_spec import Pooler
from phonograph.scheduling.engine_router import IndexChange
from phonograph.scheduling.scheduler_stats import SchedulerStats


@dataclass(slots=True)
class Begin:
    """First command to a started engine: the end-of-sequence token of the client's tokenizer."""

    eos_token_id: int | None


@dataclass(slots=True)
class Add:
    """Prompts of one call, by unique keys that the client chooses.

    If one of them cannot be served, none is. With `PoolingParams` they generate nothing, and may be `TypedTokens`.
    """

    prompts: dict[int, list[int]]
    params: SamplingParams | PoolingParams
    priority: int
    cache_salt: str | None = None


@dataclass(slots=True)
class Abort:
    """Ends a prompt, or one of its samples. It has no effect if that has ended."""

    key: int
    index: int | None = None


PauseMode = Literal["abort", "wait", "keep"]


@dataclass(slots=True)
class Pause:
    """Stops the steps of the engine until `Resume`. Prompts that come meanwhile wait for it.

    key:         of the answer, which comes when no step is in flight
    mode:        "abort" ends the requests in progress, "wait" lets them end first, "keep" continues them later
    clear_cache: forget the cached prefixes then
    """

    key: int
    mode: PauseMode
    clear_cache: bool


@dataclass(slots=True)
class Resume:
    """Ends a pause; it has no effect without one."""

    key: int


@dataclass(slots=True)
class ResetPrefixCache:
    """Forgets all cached prefixes. Requests in progress continue."""

    key: int


@dataclass(slots=True)
class Sleep:
    """Gives memory back until `WakeUp`. Prompts that come meanwhile wait for it.

    key:   of the answer, which comes when the engine sleeps
    level: 1 keeps the weights on the host, 2 reads them again
    mode:  as of `Pause`; kept requests are computed again
    """

    key: int
    level: int
    mode: PauseMode


@dataclass(slots=True)
class WakeUp:
    """Takes memory again; `tags` names its parts."""

    key: int
    tags: tuple[str, ...]


@dataclass(slots=True)
class Profile:
    """Starts or stops a profile of the engine's thread; the answer is the file of the trace."""

    key: int
    start: bool


@dataclass(slots=True)
class Align:
    """Compares a transcript with its recording; the answer is the matrix of `align_words`.

    token_ids:     of the transcript, behind the prompt
    num_positions: of the recording, without padding
    """

    key: int
    prompt: EncoderTokens
    token_ids: list[int]
    num_positions: int


@dataclass(slots=True)
class Stop:
    """Ends the engine and all requests in progress."""


Verb = Pause | Resume | ResetPrefixCache | Sleep | WakeUp | Profile | Align
"""Commands that the engine answers by their keys."""
Answer = str | np.ndarray | PhonographError | None
"""Result of a verb."""
Command = Begin | Add | Abort | Verb | Stop


class Progress(NamedTuple):
    """Progress of the start: `done` of `total` in a phase."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Properties of the engine's model.

    weight_bytes:  size of the weights in memory
    weight_format: format of most weights, such as "bfloat16"
    """

    architecture: str
    num_parameters: int
    weight_bytes: int
    weight_format: str


@dataclass(slots=True, kw_only=True)
class EngineFacts:
    """Properties of an engine that has started.

    context_len: maximum tokens of prompt and output of a request
    eos_token_ids: end-of-sequence tokens of the model's files; the tokenizer may have another one
    pooler:      end of a model that generates nothing, with its tasks, or None
    encoder:     encoder of audio, or None; so is that of text
    row_size:    numbers of a row of logits, or of an embedding or classifier
    has_token_types: the model tells the texts of a pair apart by the types of their tokens
    resolution:  graph mode with its reasons
    captures:    list of the captured graphs; `graph_memory_bytes` and `capture_seconds` are their cost
    capture_retries: graphs captured at the second attempt, with the reasons
    block_size:  tokens of a KV block of the first group of `kv_groups`
    sums:        kernels that sum over ranks, by rows; empty for one rank
    notes:       decisions that the configuration left open, or that differ from it
    stats:       scheduler statistics before the first step
    """

    model: ModelFacts
    context_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    pooler: Pooler | None = None
    encoder: AudioEncoder | None = None
    text_encoder: TextEncoder | None = None
    row_size: int = 0
    has_token_types: bool = False
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
    kv_groups: tuple[GroupFacts, ...]
    sums: tuple[SumChoice, ...] = ()
    notes: tuple[str, ...]
    start_seconds: float
    stats: SchedulerStats


@dataclass(slots=True)
class StartFailed:
    """The engine could not start, for the reason in `error`."""

    error: PhonographError


SampleUpdate = tuple[int, int, list[int], list[TokenLogprobs] | None, FinishReason | None, int | str | None]
"""New output of one sample: key, index, tokens, log-probabilities or None, finish reason and stop reason.

A plain tuple, because there is one per running sequence and step.
"""


@dataclass(slots=True)
class PromptFacts:
    """Facts about a prompt that come with its first token, or with the result of one that generates nothing.

    See `RequestOutput`, where `listed` is `prompt_token_id_logprobs`.
    """

    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs | None] | None
    warnings: tuple[str, ...] = ()
    pooled: np.ndarray | None = None
    listed: np.ndarray | None = None


Refusal = RequestError | RequestFailure | EngineUnavailable
"""Reason for which a prompt has no answer. An engine that is gone is one only where there are several."""


@dataclass(slots=True)
class Report:
    """Results of a step, or of commands.

    prompts: by key, for prompts whose first token is among the updates
    refused: by key, prompts that cannot be served, or for which work failed
    stats:   scheduler statistics after `num_steps` steps
    admitted: times of admission of samples whose first token is among the updates, by key and index
    preempted: numbers of preemptions of samples that ended and had some, by key and index
    steps:   steps whose results were taken since the last report
    expert_load: pairs of each expert since the start, by the index of a layer; None if they were not read
    done:    results of verbs that were executed, or errors, by their keys
    asleep:  parts of the memory that were given back
    sleep_level: of the sleep, 0 while the engine is awake
    cached:  changes of the prefix cache, if there are several engines
    engine:  number of the engine; the statistics are then those of all engines together
    time:    time of the report in seconds of `time.monotonic`, which the processes of a machine share
    """

    stats: SchedulerStats
    num_steps: int
    updates: list[SampleUpdate] = field(default_factory=list[SampleUpdate])
    prompts: dict[int, PromptFacts] = field(default_factory=dict[int, PromptFacts])
    refused: dict[int, Refusal] = field(default_factory=dict[int, Refusal])
    admitted: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    preempted: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    expert_load: dict[int, list[int]] | None = None
    done: dict[int, Answer] = field(default_factory=dict[int, "Answer"])
    asleep: frozenset[str] = frozenset()
    sleep_level: int = 0
    cached: list[IndexChange] = field(default_factory=list[IndexChange])
    engine: int = 0
    time: float = field(default_factory=time.monotonic)


Message = Progress | EngineFacts | StartFailed | Report


class Channel(Protocol):
    """The engine's end of a connection."""

    def send(self, message: Message) -> None:
        """Send without waiting."""
        ...

    def receive(self, *, wait: bool) -> Command | None:
        """Return the next command. If there is none, wait for one, or return None without `wait`."""
        ...
