"""Host-side types that pass between scheduler, runner and engine: plain integers and lists, without torch.

Data flows one way: Request -> ScheduledBatch -> (runner: metadata, decision, logits) -> StepOutput. The scheduler knows
requests and blocks. The runner knows slots, the rows of its per-request state, and sees requests only through these
types, so that neither imports the other.

A batch is ordered by kind: decodes first, which continue their output, then prefills; `num_decodes` is the boundary. A
decode has one token, or several if it verifies drafts. A prefill may have one token as well; such prefills come before
the longer ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from phonograph.core.grammar import Grammar
from phonograph.core.pooling_params import PoolingParams
from phonograph.core.sampling_params import SamplingParams

MAX_LEN = 1 << 30
"""Tokens of a sequence without a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """Load of a runner slot: a request scheduled for the first time, or again after a preemption.

    Attributes:
        token_ids: all known tokens: the prompt, then the output before a preemption.
        num_computed: leading tokens whose keys and values are in the blocks already (prefix cache).
        max_len: tokens of the whole sequence, at most.
        end_token_ids: tokens that end the request (end of sequence, stop tokens); masked until `min_tokens` are
            generated.
        sample_index: index of this sample among the request's `n`; part of its random seed.
        grammar: constraint on the output, if any.
        salted: True if the request has a `cache_salt`: its output must not change the time of other answers.
        pooling: of a request that generates nothing, or None.
        features: input of an encoder, see `EncoderTokens`; None if there is none, or if the blocks have the keys of the
            encoder already.
        encoder_len: positions of the encoder that the sequence reads; 0 for all.
    """

    slot: int
    request_id: str
    token_ids: list[int]
    prompt_len: int
    num_computed: int
    params: SamplingParams
    max_len: int = MAX_LEN
    end_token_ids: tuple[int, ...] = ()
    sample_index: int = 0
    grammar: Grammar | None = None
    salted: bool = False
    pooling: PoolingParams | None = None
    features: np.ndarray | None = None
    encoder_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAppend:
    """Blocks appended to a slot's block table of a KV group: `block_ids` go to entries `start`, `start + 1`, ..."""

    slot: int
    start: int
    block_ids: list[int]
    group: int = 0


class StateCopy(NamedTuple):
    """Checkpoint that a sequence of a step reads or writes, for layers with a state.

    Attributes:
        slot: of the sequence.
        row: of the checkpoint, behind the slots.
        num_tokens: tokens of the sequence at the checkpoint.
    """

    slot: int
    row: int
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class ScheduledBatch:
    """One step. The per-sequence lists are parallel, decodes first, then prefills.

    Attributes:
        slots: runner slot of each sequence.
        query_lens: tokens to compute in this step, >= 1. Of a decode, all but the first are drafts.
        context_lens: tokens computed before this step; seq_len is context_len + query_len. An upper bound for a decode
            while a step with drafts of it is in flight.
        samples: True if the step reaches the last known token, so that a next token is sampled.
        num_decode_tokens: tokens of the decodes, of the `num_tokens` of all sequences.
        copies: pages to copy before the step, from and to; no page is in both places.
        freed: slots to clear before `new` is loaded (finished, aborted or preempted sequences).
        makes_drafts: the step ends with the passes of a draft model, where there is one that runs in steps.
        restored: checkpoints from which sequences start, at most one for each.
        saved: checkpoints that the step writes, at most one for each sequence, within its tokens or at their end.
    """

    slots: list[int] = field(default_factory=list[int])
    query_lens: list[int] = field(default_factory=list[int])
    context_lens: list[int] = field(default_factory=list[int])
    samples: list[bool] = field(default_factory=list[bool])
    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_tokens: int = 0
    new: list[NewSequence] = field(default_factory=list[NewSequence])
    appends: list[BlockAppend] = field(default_factory=list[BlockAppend])
    copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    freed: list[int] = field(default_factory=list[int])
    makes_drafts: bool = False
    restored: Sequence[StateCopy] = ()
    saved: Sequence[StateCopy] = ()

    @property
    def num_reqs(self) -> int:
        return len(self.slots)

    @property
    def num_logits(self) -> int:
        """Rows of logits: of each token of a decode, and of the last one of a prefill."""
        return len(self.slots) + max(self.num_decode_tokens - self.num_decodes, 0)


class DraftCounts(NamedTuple):
    """Counts since the start.

    Attributes:
        decodes: decodes that verified drafts.
        verified: drafts.
        accepted: drafts that were kept.
        accepted_by_position: these by their position in a step, the first draft first.
        choices: reasons of depths, each with its number of steps.
    """

    decodes: int = 0
    verified: int = 0
    accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()
    choices: tuple[tuple[str, int], ...] = ()


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the token itself first, then the `top` most likely ones.

    `ranks[i]` is 1 + the number of tokens more likely than `token_ids[i]`. A tuple, because many are sent between
    processes.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class SlotFailure(NamedTuple):
    """Reason why one sequence of a step must end.

    Attributes:
        part: the failed work, such as "grammar".
        problem: description of the error.
        no_token: True if no token could be chosen, because of the logits, the grammar or the sampling parameters.
    """

    part: str
    problem: str
    no_token: bool = False


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """Result of a step. Only sequences with `samples` set have tokens.

    Attributes:
        slots: slots with sampled tokens, in batch order.
        token_ids: the tokens of each of these slots, in the order of their positions, at least one. A prefill has one.
            A request that generates nothing has none.
        failures: by slot, sequences that must end; their tokens are invalid.
        logprobs: by slot, one entry a token, for requests with `logprobs`.
        prompt_logprobs: by slot, positions of this step's chunk, for requests with `prompt_logprobs`. The first
            position of a prompt has none.
        attention_units: units of attention in a layer: those of prefixes that sequences share, and others of short
            queries. Zeros where no kernel counts them.
        pooled: by slot, result of a request that generates nothing; see `Request.pooled`.
    """

    slots: list[int] = field(default_factory=list[int])
    token_ids: list[list[int]] = field(default_factory=list[list[int]])
    failures: dict[int, SlotFailure] = field(default_factory=dict[int, SlotFailure])
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict[int, list[TokenLogprobs]])
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict[int, list[TokenLogprobs]])
    attention_units: tuple[int, int] = (0, 0)
    pooled: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
