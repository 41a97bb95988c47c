"""Beam search: keep the likeliest sequences after each token.

A host loop over log-probabilities. Each token of each beam is a request of one token, whose prompt is the beam; the
prefix cache has the keys and values of all its full blocks. With a constraint, the engine continues the grammar after
the tokens of the beam, and reports the likeliest tokens among those that it allows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from phonograph.core.beam_search_params import BeamSearchParams
from phonograph.core.request import FinishReason
from phonograph.core.sampling_params import BeamStep, SamplingParams
from phonograph.engine.outputs import CompletionOutput
from phonograph.text.logprob_views import PositionLogprobs

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One sequence of a beam search.

    Attributes:
        tokens: tokens of the prompt and the output.
        logprobs: mapping of log-probabilities at each token of the output.
        cum_logprob: sum of the log-probabilities of the output's tokens, with the end-of-sequence token.
        text: text of `tokens`, or None without a tokenizer; set when the search is complete.
        finish_reason: "stop" after an end-of-sequence token, "length" at max_tokens or the end of the context.
        stop_reason: the end-of-sequence token, or None.
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs] = field(default_factory=list[PositionLogprobs])
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """Sequences of one prompt, the best first.

    Attributes:
        sequences: at most `beam_width` sequences.
    """

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class _BeamState:
    """The search of one prompt: sequences that grow, and those that have ended."""

    beams: list[BeamSearchSequence]
    ended: list[BeamSearchSequence]


async def beam_search(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    generate: Callable[[list[list[int]], SamplingParams], Awaitable[Sequence[CompletionOutput]]],
    *,
    eos: frozenset[int],
    context_len: int,
    rules: Mapping[str, Any] = {},
) -> list[BeamSearchOutput]:
    """Search the likeliest continuations of prompts, of all together.

    Args:
        prompts: token ids of each.
        params: parameters of all searches.
        generate: returns the output of each prompt, and raises if one fails.
        eos: end-of-sequence tokens of the model.
        context_len: tokens of prompt and output that a request may have.
        rules: sampling parameters that belong to the constraint of the output, if it has one.

    Raises:
        RequestError: a prompt cannot be served.
    """
    num_tokens, constrained = 2 * params.beam_width, params.has_constraint
    step = SamplingParams(
        logprobs=-1 if constrained else num_tokens,
        max_tokens=1,
        temperature=params.temperature,
        detokenize=False,
        ignore_eos=not constrained,
        structured_outputs=params.structured_outputs,
        allowed_token_ids=params.allowed_token_ids,
        **rules if constrained else {},
    )
    ends = frozenset[int]() if params.ignore_eos else eos

    def score(sequence: BeamSearchSequence) -> float:
        length = len(sequence.tokens) - (sequence.stop_reason is not None and params.include_stop_str_in_output)
        return sequence.cum_logprob / length**params.length_penalty

    searches = [_BeamState([BeamSearchSequence(tokens=list(prompt))], []) for prompt in prompts]
    for place in range(params.max_tokens):
        for search in searches:
            # The first step refuses prompts that are too long.
            full = place > 0 and bool(search.beams) and len(search.beams[0].tokens) >= context_len
            if full:
                search.ended += [replace(beam, finish_reason="length") for beam in search.beams]
                search.beams = []
        growing = [beam for search in searches for beam in search.beams]
        if not growing:
            break
        if constrained:
            step = step.with_checked(beam_step=BeamStep(place, num_tokens))
        outputs = iter(await generate([beam.tokens for beam in growing], step))
        for search in searches:
            grown = [one for beam in search.beams for one in _grown(beam, next(outputs), params, ends)]
            search.ended += [one for one in grown if one.finish_reason is not None]
            growing = [one for one in grown if one.finish_reason is None]
            search.beams = sorted(growing, key=score, reverse=True)[: params.beam_width]
    found: list[BeamSearchOutput] = []
    for search in searches:
        sequences = [*search.ended, *(replace(beam, finish_reason="length") for beam in search.beams)]
        found.append(BeamSearchOutput(sorted(sequences, key=score, reverse=True)[: params.beam_width]))
    return found


def completed(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine was suspended")


def _grown(
    beam: BeamSearchSequence, output: CompletionOutput, params: BeamSearchParams, ends: frozenset[int]
) -> list[BeamSearchSequence]:
    """Return a beam with each of its likeliest next tokens."""
    logprobs = output.logprobs
    assert logprobs is not None, "the step asks for log-probabilities"
    (position,) = logprobs
    found: list[BeamSearchSequence] = []
    for token_id, one in position.items():
        ended = token_id in ends
        shown = not ended or params.include_stop_str_in_output
        found.append(
            BeamSearchSequence(
                tokens=[*beam.tokens, token_id] if shown else beam.tokens,
                logprobs=[*beam.logprobs, position],
                cum_logprob=beam.cum_logprob + one.logprob,
                finish_reason="stop" if ended else None,
                stop_reason=token_id if ended else None,
            )
        )
    return found
