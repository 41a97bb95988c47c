"""Host-side types that pass between scheduler, runner and engine: plain integers and lists, no torch.

Data flows one way: Request -> ScheduledBatch -> (runner: metadata, decision, logits) -> StepOutput. The scheduler knows
requests and blocks; the runner knows *slots*, rows of persistent per-request state, and learns of requests only through
these types. That is why neither imports the other.

A batch is ordered decodes first (query length 1), then prefills, and `num_decodes` says where the border is. Kernels
and graphs rely on that order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from phonograph.core.grammar import Grammar
from phonograph.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """Loads a runner slot: a request scheduled for the first time, or again after a preemption.

    `token_ids` are all tokens known so far (prompt, then whatever was generated before a preemption);
    `num_computed` of them already have their keys and values in the blocks (prefix cache).
    """

    slot: int
    request_id: str
    token_ids: list[int]
    prompt_len: int
    num_computed: int
    params: SamplingParams
    end_token_ids: tuple[int, ...] = ()
    """Token ids that end this request (end of sequence, stop tokens); held back until `min_tokens` are out."""
    sample_index: int = 0
    """Which of the request's `n` samples this is; part of its random seed."""
    grammar: Grammar | None = None
    """What its output has to be, where that is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAppend:
    """Blocks appended to the block table of a slot: `block_ids` go to rows `start`, `start + 1`, ..."""

    slot: int
    start: int
    block_ids: list[int]


@dataclass(slots=True, kw_only=True)
class ScheduledBatch:
    """One step. The per-sequence lists run parallel, decodes first, then prefills.

    slots:        runner slot of each sequence
    query_lens:   tokens of it to compute in this step, >= 1
    context_lens: tokens of it computed before this step; its seq_len is context + query
    samples:      whether this step reaches its last known token, so that a next token is sampled
    freed:        slots to clear *before* `new` is loaded (finished, aborted or preempted sequences)
    """

    slots: list[int] = field(default_factory=list[int])
    query_lens: list[int] = field(default_factory=list[int])
    context_lens: list[int] = field(default_factory=list[int])
    samples: list[bool] = field(default_factory=list[bool])
    num_decodes: int = 0
    num_tokens: int = 0
    new: list[NewSequence] = field(default_factory=list[NewSequence])
    appends: list[BlockAppend] = field(default_factory=list[BlockAppend])
    freed: list[int] = field(default_factory=list[int])

    @property
    def num_reqs(self) -> int:
        return len(self.slots)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the token itself first, then the `top` most likely ones.

    `ranks[i]` is 1 + the number of tokens more likely than `token_ids[i]`. A tuple, because there are many of them and
    a server sends them from process to process.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class SlotFailure(NamedTuple):
    """The reason why one sequence of a step has to end.

    part:     the work that failed, such as "grammar"
    problem:  what went wrong in it
    no_token: True if no token could be chosen for it, because of its logits or its grammar; its parameters may be why
    """

    part: str
    problem: str
    no_token: bool = False


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """Result of a step. Only sequences with `samples` set have a token.

    slots, token_ids:  sampled token of each such slot, in batch order
    failures:          by slot, sequences of the step that have to end; a token of theirs means nothing
    logprobs:          by slot, for requests that asked for them
    prompt_logprobs:   by slot, the positions of this step's chunk, for requests that asked (first position of a prompt
                       has none)
    """

    slots: list[int] = field(default_factory=list[int])
    token_ids: list[int] = field(default_factory=list[int])
    failures: dict[int, SlotFailure] = field(default_factory=dict[int, SlotFailure])
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict[int, list[TokenLogprobs]])
