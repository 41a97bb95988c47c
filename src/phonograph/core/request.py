"""One request and its progress: the state that scheduler and engine share.

The scheduler writes every field from `state` on; the engine reads them. The module imports neither, so that the cache,
which knows blocks and tokens, and the runner, which knows slots, need not depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np

from phonograph.core.batch import NewSequence, SlotFailure, TokenLogprobs
from phonograph.core.grammar import Grammar
from phonograph.core.pooling_params import PoolingParams
from phonograph.core.repetition_detection import RepetitionDetector
from phonograph.core.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "repetition"]


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again after losing its blocks. The output is kept; its keys and values are computed anew."""
    ENDING = "ending"
    """Its last token is being computed. Slot and blocks are released already."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A prompt being continued. Compared by identity.

    Attributes:
        priority: smaller is served earlier (policy "priority").
        arrival: time on any clock; earlier is served earlier.
        eos_token_ids: the model's end-of-sequence tokens.
        sample_index: index of this sample among `params.n`.
        cache_salt: cached prefixes are shared only with requests of the same salt.
        pooling: of a request that generates nothing and ends with its prompt, or None.
        features: of its audio; see `NewSequence`.
        encoder_digest: names the audio.
        encoded: its blocks have the keys of the encoder since the latest admission.
        output_token_ids: generated tokens, with `logprobs` beside them if requested.
        prompt_logprobs: computed positions of the prompt, if requested.
        pooled: result of `pooling`, float32 [F], or [T, F] of all tokens.
        finish_reason: set when FINISHED.
        stop_reason: stop token or stop string that ended the request.
        failure: set when FINISHED because of an error.
        admitted: time of the first admission in seconds of `time.monotonic`, or None before it.
        num_preemptions: times that it lost its blocks.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
        min_computed, max_computed: bounds of the tokens whose keys and values are right when all scheduled steps have
            run. They differ while a step with drafts is in flight.
        slot: row of the runner's state while RUNNING, else -1.
        repetition: detects repeated patterns of the output, or None.
        end_token_ids: tokens that end the output: stop_token_ids, and end-of-sequence unless it is ignored.
        rank: order of service, smallest first: priority, arrival, order of `Scheduler.add`, which sets it.
        max_len: tokens of prompt and output at which the request ends, by max_tokens or the context; set by the
            scheduler.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    priority: int = 0
    eos_token_ids: Collection[int] = ()
    sample_index: int = 0
    grammar: Grammar | None = None
    cache_salt: str | None = None
    pooling: PoolingParams | None = None
    features: np.ndarray | None = None
    encoder_digest: str = ""
    encoded: bool = False

    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    pooled: np.ndarray | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    failure: SlotFailure | None = None
    admitted: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    min_computed: int = 0
    max_computed: int = 0
    slot: int = -1
    whole_drafts: bool = True

    prompt_len: int = field(init=False)
    repetition: RepetitionDetector | None = field(init=False)
    end_token_ids: frozenset[int] = field(init=False)
    rank: tuple[int, float, int] = field(init=False)
    max_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt_token_ids)
        repetition = self.params.repetition_detection
        self.repetition = None if repetition is None else RepetitionDetector(repetition)
        eos = () if self.params.ignore_eos else self.eos_token_ids
        self.end_token_ids = frozenset((*self.params.stop_token_ids, *eos))

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: prompt and output."""
        return self.prompt_len + len(self.output_token_ids)

    @property
    def prefix_salt(self) -> str | None:
        """Salt of its cached prefixes: keys of a decoder depend on the audio."""
        return f"{self.encoder_digest} {self.cache_salt or ''}" if self.encoder_digest else self.cache_salt

    @property
    def encoder_len(self) -> int:
        """Positions of the encoder that it reads; 0 for all, as of every audio."""
        return 0 if self.features is None or self.features.ndim > 1 else len(self.features)

    @property
    def num_computed(self) -> int:
        """Number of known tokens whose keys and values are right when all scheduled steps have run."""
        return min(self.min_computed, self.num_tokens)

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def unscored(self) -> bool:
        """True if log-probabilities of the prompt are requested and not complete."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len - 1

    @property
    def may_end(self) -> bool:
        """True if a token may end the output: it has `min_tokens`, or its grammar determines the end."""
        params = self.params
        return len(self.output_token_ids) >= params.min_tokens or params.structured_outputs is not None

    def admit(self, num_cached_tokens: int) -> None:
        """Record the first admission."""
        self.admitted = time.monotonic()
        self.num_cached_tokens = num_cached_tokens

    def preempt(self) -> None:
        """Record the loss of its blocks."""
        self.state = RequestState.PREEMPTED
        self.num_preemptions += 1

    def new_sequence(self) -> NewSequence:
        """Return the load of the request's slot."""
        return NewSequence(
            slot=self.slot,
            request_id=self.request_id,
            token_ids=self.tokens(0, self.num_tokens),
            prompt_len=self.prompt_len,
            num_computed=self.num_computed,
            params=self.params,
            max_len=self.max_len,
            end_token_ids=tuple(self.end_token_ids),
            sample_index=self.sample_index,
            grammar=self.grammar,
            salted=self.cache_salt is not None,
            pooling=self.pooling,
            features=None if self.encoded else self.features,
            encoder_len=self.encoder_len,
        )

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return a copy of the known tokens from `start` to `stop` of prompt and output concatenated."""
        if start >= self.prompt_len:
            return self.output_token_ids[start - self.prompt_len : stop - self.prompt_len]
        if stop <= self.prompt_len:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - self.prompt_len]
