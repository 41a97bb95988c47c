"""One request and where it stands: the state that scheduler and engine share, and nothing else.

The scheduler owns every field below "Progress"; the engine reads them. It is a leaf, so that the cache, which knows
blocks and tokens only, and the runner, which knows slots only, need not import it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from phonograph.core.batch import SlotFailure, TokenLogprobs
from phonograph.core.grammar import Grammar
from phonograph.core.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again after it lost its blocks; it keeps its output and computes its keys and values anew."""
    ENDING = "ending"
    """Its last token is being computed. It has given its slot and blocks back, and waits for that token only."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A prompt being continued. Two requests are equal only if they are the same object.

    priority:      smaller is served earlier (policy "priority")
    arrival:       any clock; earlier is served earlier
    eos_token_ids: the model's end-of-sequence tokens
    sample_index:  which of `params.n` samples of the prompt this is

    Progress:
    output_token_ids: tokens generated so far, and `logprobs` beside them where asked for
    prompt_logprobs:  positions of the prompt computed so far, where asked for
    finish_reason, stop_reason: set when FINISHED; stop_reason is the stop token or stop string that ended it
    failure:       set when FINISHED because work for it failed
    num_cached_tokens: prompt tokens found in the prefix cache when first admitted
    num_computed:  tokens whose keys and values are, or are being, written
    slot:          row of the runner's state while RUNNING, else -1
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    priority: int = 0
    eos_token_ids: Collection[int] = ()
    sample_index: int = 0
    grammar: Grammar | None = None

    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    failure: SlotFailure | None = None
    num_cached_tokens: int = 0
    num_computed: int = 0
    slot: int = -1

    # Set once: by the request itself, and by the scheduler when it is added.
    prompt_len: int = field(init=False)
    end_token_ids: frozenset[int] = field(init=False)
    """Tokens that end the output: stop_token_ids, and end-of-sequence unless it is ignored."""
    rank: tuple[int, float, int] = field(init=False)
    """Order of service among requests, smallest first: priority, arrival, order of adding."""
    max_len: int = field(init=False)
    """Tokens, prompt and output, at which it ends: by max_tokens, or where the context ends."""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt_token_ids)
        eos = () if self.params.ignore_eos else self.eos_token_ids
        self.end_token_ids = frozenset((*self.params.stop_token_ids, *eos))

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return self.prompt_len + len(self.output_token_ids)

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def tokens(self, start: int, stop: int) -> list[int]:
        """A copy of the known tokens from `start` up to `stop`, prompt and output laid end to end."""
        if start >= self.prompt_len:
            return self.output_token_ids[start - self.prompt_len : stop - self.prompt_len]
        if stop <= self.prompt_len:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - self.prompt_len]
