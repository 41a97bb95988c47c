"""Beam search as a call of `AsyncLLM`: its samples are the sequences, which it gets when the search is complete."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phonograph.core.batch import TokenLogprobs
from phonograph.core.beam_search_params import BeamSearchParams
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.admission import refuse_logits
from phonograph.engine.offline.beam_search import BeamSearchSequence, beam_search
from phonograph.engine.process.calls import Call, Prompt, Sample
from phonograph.text.logprob_views import PositionLogprobs

if TYPE_CHECKING:
    from phonograph.engine.async_llm import AsyncLLM


_RULES = ("reasoning_end_token_ids", "reasoning_start_token_id")
"""Parameters that say where a constraint begins."""


class _Aborted(Exception):
    """A step of a search was aborted."""


def open_beams(
    engine: AsyncLLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    beams: BeamSearchParams,
    *,
    streams: bool = False,
    priority: int = 0,
    cache_salt: str | None = None,
) -> Call:
    """Begin a search, whose steps are calls of the engine. Closing its call ends it.

    Args:
        engine: the engine.
        prompts: token ids of each prompt.
        params: form of the samples' text and log-probabilities; `n` is the number of beams.
        beams: parameters of the search.
        streams: wake the caller at each change, not only at the end.
        priority: as for `AsyncLLM.open`.
        cache_salt: as for `AsyncLLM.open`.

    Raises:
        EngineUnavailable: the engine does not accept calls.
        RequestError: the engine reports logits as log-probabilities.
    """
    refuse_logits(engine.config.logprobs_mode, "a beam search")
    if engine.problem is not None:
        raise engine.problem
    indices = itertools.count()
    opened = [
        Prompt(
            place,
            token_ids,
            [Sample(next(indices), engine.tokenizer, params, token_ids) for _ in range(params.n)],
            num_growing=params.n,
            max_tokens=params.max_tokens,
        )
        for place, token_ids in enumerate(prompts)
    ]

    def end(_: Call) -> None:
        task.cancel()

    call = Call(opened, streams=streams, end=end)
    engine.searches.add(call)

    async def generate(growing: list[list[int]], step: SamplingParams) -> list[Sample]:
        inner = engine.open(growing, step, priority=priority, cache_salt=cache_salt, continues=True)
        inner.name = call.name
        try:
            await inner.wait()
        finally:
            inner.close()
        if any(sample.finish_reason == "abort" for sample in inner.samples):
            raise _Aborted
        if len(growing) == len(opened):  # the first step has the prompts themselves
            for prompt, first in zip(opened, inner.prompts, strict=True):
                prompt.num_cached_tokens = prompt.num_cached_tokens or first.num_cached_tokens
                prompt.warnings = first.warnings
        return inner.samples

    async def search() -> None:
        eos = {*engine.facts.eos_token_ids}
        if engine.tokenizer is not None and engine.tokenizer.eos_token_id is not None:
            eos.add(engine.tokenizer.eos_token_id)
        try:
            found = await beam_search(
                *(prompts, beams, generate),
                eos=frozenset(eos),
                context_len=engine.facts.context_len,
                rules={name: getattr(params, name) for name in _RULES},
            )
            for prompt, output in zip(opened, found, strict=True):
                call.drop(prompt, len(output.sequences))
                for sample, sequence in zip(prompt.samples, output.sequences, strict=True):
                    _end(sample, sequence, prompt, params.logprobs)
                    call.touch(prompt, sample)
        except _Aborted:
            for prompt in opened:
                for sample in prompt.samples:
                    sample.grow([], [], "abort", None)
                    call.touch(prompt, sample)
        except Exception as error:
            call.fail(error)
        if call.on_change is not None:
            call.on_change()

    task = asyncio.ensure_future(search())
    task.add_done_callback(lambda _: engine.searches.discard(call))
    return call


def _end(sample: Sample, sequence: BeamSearchSequence, prompt: Prompt, top: int | None) -> None:
    """Give a sample the tokens of a sequence."""
    token_ids = sequence.tokens[len(prompt.token_ids) :]
    positions = None if top is None else list(map(_position, token_ids, sequence.logprobs, [top] * len(token_ids)))
    sample.first_token = sample.last_token = time.monotonic()
    sample.grow(token_ids, positions, sequence.finish_reason, sequence.stop_reason)


def _position(token_id: int, found: PositionLogprobs, top: int) -> TokenLogprobs:
    """Return the log-probabilities of a token, and of the `top` most likely ones at its position."""
    likely = sorted(((one.rank, other) for other, one in found.items()))[: None if top < 0 else top]
    token_ids = [token_id, *(other for _, other in likely)]
    chosen = [found[one] for one in token_ids]
    return TokenLogprobs(token_ids, [one.logprob for one in chosen], [one.rank for one in chosen])
