"""Requests with text, n samples, stop strings and validation, on top of the synchronous core.

The offline API drives a session directly. Servers put a queue in front of it.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TypeVar

from phonograph.config.engine_config import EngineConfig
from phonograph.core.grammar import Grammar
from phonograph.core.pooling_params import NO_SAMPLING, PoolingParams
from phonograph.core.request import Request
from phonograph.core.sampling_params import SamplingParams
from phonograph.core.token_types import EncoderTokens, plain_ids
from phonograph.engine.admission import (
    Prompt,
    admit_cache_salt,
    admit_encoder_input,
    admit_names,
    admit_parameters,
    admit_stops,
    admitted_bad_words,
    admitted_pooling,
    admitted_prompt,
    admitted_whole_prompt,
    refuse_generation,
    with_model_rules,
)
from phonograph.engine.core import EngineCore
from phonograph.engine.metrics.session_counts import SessionCounts
from phonograph.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from phonograph.errors import RequestError, RequestFailure, cause_text, counted, shortened
from phonograph.models.spec import ModelSpec
from phonograph.sampling.dead_ends import dead_end
from phonograph.structured.compiler import GrammarCompiler
from phonograph.structured.min_tokens import with_min_tokens
from phonograph.structured.phases import with_reasoning
from phonograph.structured.token_rules import BegunGrammar, likeliest_allowed
from phonograph.structured.vocabulary import Vocabulary
from phonograph.text.logprob_views import LogprobsView, without_listed
from phonograph.text.output_text import text_builder, token_text
from phonograph.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Part = TypeVar("Part")
_GRAMMAR_SECONDS = 0.02
"""Time that a step waits for a grammar if it has no other work."""


@dataclass(slots=True)
class _Sample:
    """One of a request's n samples in progress."""

    request: Request
    completion: CompletionOutput
    parent: RequestOutput
    prompt_reported: bool = False


@dataclass(slots=True, eq=False)
class _Compiling:
    """A request whose grammar is being compiled. The scheduler does not have it yet."""

    output: RequestOutput
    samples: list[_Sample]
    grammar: Future[Grammar]


class Session:
    """Adds, steps and aborts requests. Not thread-safe: one thread drives it.

    Args:
        core: scheduler and runner.
        model: vocabulary and end-of-sequence tokens.
        tokenizer: None serves token ids only.
        seed: makes requests without their own seed repeatable.
        grammars: compiles structured outputs in the background.
    """

    def __init__(
        self,
        core: EngineCore,
        model: ModelSpec,
        tokenizer: Tokenizer | None,
        seed: int,
        grammars: GrammarCompiler,
    ) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self._model = model
        self._seeds = random.Random(seed)
        self._ids = itertools.count()
        self._samples: dict[str, _Sample] = {}
        self.grammars = grammars
        self.counts = SessionCounts()
        self._compiling: list[_Compiling] = []

    @property
    def eos_token_ids(self) -> Collection[int]:
        """End-of-sequence tokens of the model."""
        return self._model.eos_token_ids

    @property
    def has_unfinished(self) -> bool:
        """True if there are unfinished requests or steps in flight."""
        return self.core.has_work or bool(self._compiling)

    @property
    def num_deferred(self) -> int:
        """Number of samples whose grammar is being compiled."""
        return sum(len(entry.samples) for entry in self._compiling)

    def requests_of(self, output: RequestOutput) -> list[Request]:
        """Return the scheduler's requests of an output that has just been added, one for each sample."""
        return [self._samples[_sample_id(output, one.index)].request for one in output.outputs]

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Queue a request, and return the output that later steps fill.

        If its structured output turns out to have no grammar, or its parameters to allow no token, a later step sets
        the output's `error`.

        Raises:
            RequestError: the prompt or the parameters cannot be served; nothing has been queued.
            EngineUnavailable: the engine sleeps; likewise.
        """
        self.core.check_awake()
        pooling = None
        if isinstance(params, PoolingParams):
            pooling = admitted_pooling(params, self._model.pooler, self._model.num_outputs)
            longest = self.core.scheduler.context_len - 1
            token_ids = admitted_whole_prompt(prompt, pooling, self.tokenizer, self._model.vocab_size, longest)
            params = NO_SAMPLING
        else:
            refuse_generation(self._model.pooler)
            admit_encoder_input(prompt, self._model.encoder, self._model.vocab_size)
            token_ids = admitted_prompt(prompt, self.tokenizer, self._model.vocab_size)
            params = admitted_bad_words(params, self.tokenizer)
            admit_parameters(params, len(token_ids), self._model.vocab_size, self.core.scheduler.context_len)
            admit_stops(params, self.tokenizer)
            if params.seed is None:
                # Drawn once, so that a preempted request continues with the same seed.
                params = params.with_checked(seed=self._seeds.getrandbits(63))
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        admit_names(request_id, priority)
        admit_cache_salt(cache_salt)
        output = RequestOutput(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            metrics=RequestMetrics(),
        )
        samples = [self._sample(output, params, index, priority, cache_salt) for index in range(params.n)]
        if isinstance(prompt, EncoderTokens):
            digest = prompt.digest
            for sample in samples:
                sample.request.features, sample.request.encoder_digest = prompt.features, digest
        if pooling is not None:
            samples[0].request.pooling = pooling
        output.prompt_token_ids = plain_ids(token_ids)
        if any(sample.request.request_id in self._samples for sample in samples):
            raise RequestError("request_id", request_id, "is in use by a request that has not ended")
        if params.structured_outputs is None:
            self._queue(samples, with_reasoning(None, params, self._model.eos_token_ids))
        else:
            # Before compiling: the grammar of a refused request has no use.
            for sample in samples:
                self.core.scheduler.check_request(sample.request)
            grammar = self.grammars.request(params.structured_outputs)
            if grammar.done():
                self._queue(samples, with_reasoning(grammar.result(), params, self._model.eos_token_ids))
            else:
                self._compiling.append(_Compiling(output, samples, grammar))
        self._samples.update((sample.request.request_id, sample) for sample in samples)
        return output

    def step(self, *, schedules: bool = True) -> list[RequestOutput]:
        """Run one step, and return the outputs that changed, each once.

        The list may be empty while there is more to do, because results can come with a later step. Without
        `schedules`, only the results of the oldest step in flight are taken.
        """
        changed = {id(output): output for output in self._take_compiled()} if self._compiling else {}
        samples, take = self._samples, self._take
        for request in self.core.step(schedules=schedules):
            sample = samples.get(request.request_id)
            if sample is None:  # another sample of its request has failed in this step
                continue
            parent = sample.parent
            changed[id(parent)] = parent
            self._contain(parent, take, sample)
        return list(changed.values())

    def fail(self, output: RequestOutput, error: RequestError | RequestFailure) -> None:
        """End all samples of a request with an error. Its output gets the error and loses its samples."""
        for completion in output.outputs:
            sample = self._samples.get(_sample_id(output, completion.index))
            if sample is None or sample.parent is not output:
                continue
            del self._samples[sample.request.request_id]
            if not self.core.scheduler.fail(sample.request.request_id):
                self._drop_compiling(sample)
        output.fail(error.with_traceback(None))  # the frames of a traceback hold requests

    def abort(self, output: RequestOutput, index: int | None = None) -> None:
        """End the unfinished samples of a request, or one of them. The output so far stays.

        It has no effect on a request that has ended.
        """
        for completion in list(output.outputs) if index is None else output.outputs[index : index + 1]:
            sample = self._samples.get(_sample_id(output, completion.index))
            if sample is None or sample.parent is not output:
                continue
            if not self.core.scheduler.abort(sample.request.request_id):
                self._drop_compiling(sample)
            self._contain(output, self._update, sample)
        self.core.settle()

    def close(self, reason: str) -> None:
        """Fail all requests, wait for the steps in flight, and end the threads that compile grammars.

        Args:
            reason: problem of the requests.
        """
        for output in {id(sample.parent): sample.parent for sample in self._samples.values()}.values():
            self.fail(output, RequestFailure(output.request_id, "engine", reason))
        self.core.settle()
        self.grammars.close()

    def _contain(self, output: RequestOutput, work: Callable[[Part], None], part: Part) -> None:
        """Call `work` for a part of a request. If it raises, the request ends with that error."""
        try:
            work(part)
        except (RequestError, RequestFailure) as error:
            self.fail(output, error)
        except Exception as error:
            log.exception("request %s: its output could not be made", output.request_id)
            self.fail(output, RequestFailure(output.request_id, "output", cause_text(error)))

    def _take(self, sample: _Sample) -> None:
        """Apply the result of a step to a sample."""
        request = sample.request
        if request.failure is not None:
            part, problem, no_token = request.failure
            structured = request.params.structured_outputs
            if no_token and part == "grammar" and structured is not None:
                problem = f"after {counted(len(request.output_token_ids), 'token')} {problem}"
                raise RequestError(structured.kind, shortened(structured.source), problem)
            error = dead_end(request, self._model.vocab_size) if no_token else None
            raise error or RequestFailure(sample.parent.request_id, part, problem)
        self._update(sample)

    def _update(self, sample: _Sample) -> None:
        """Turn new tokens into output, and end the request at a stop string."""
        request, completion = sample.request, sample.completion
        sample.parent.pooled = request.pooled
        completion.update(request.finish_reason, request.stop_reason)
        if completion.finish_reason is not None:
            if not request.finished:
                self.core.scheduler.finish(request.request_id, completion.finish_reason, completion.stop_reason)
            self._close(sample)
        elif not sample.prompt_reported:
            self._report_prompt(sample)

    def _queue(self, samples: list[_Sample], grammar: Grammar | None) -> None:
        """Add all samples of a request to the scheduler, or none."""
        params = samples[0].request.params
        if grammar is not None:
            samples[0].parent.warnings = grammar.warnings
        grammar = with_model_rules(grammar, samples[0].request, self._model)
        if grammar is not None and params.beam_step is not None:
            prompt = samples[0].request.prompt_token_ids
            grammar = BegunGrammar(grammar, prompt[len(prompt) - params.beam_step.prefix_len :])
        grammar = with_min_tokens(grammar, params, samples[0].request.end_token_ids)
        for queued, sample in enumerate(samples):
            sample.request.grammar = grammar
            try:
                self.core.scheduler.add(sample.request)
            except Exception:
                for earlier in samples[:queued]:
                    self.core.scheduler.abort(earlier.request.request_id)
                raise

    def _queue_compiled(self, entry: _Compiling) -> None:
        params = entry.samples[0].request.params
        self._queue(entry.samples, with_reasoning(entry.grammar.result(), params, self._model.eos_token_ids))

    def _take_compiled(self) -> list[RequestOutput]:
        """Queue the requests whose grammars are compiled; return those that failed."""
        futures = [entry.grammar for entry in self._compiling]
        # Without other work the thread waits, to avoid polling.
        wait(futures, timeout=0 if self.core.has_work else _GRAMMAR_SECONDS, return_when=FIRST_COMPLETED)
        ready: list[_Compiling] = []
        pending: list[_Compiling] = []
        for entry in self._compiling:
            (ready if entry.grammar.done() else pending).append(entry)
        self._compiling = pending
        failed: list[RequestOutput] = []
        for entry in ready:
            self._contain(entry.output, self._queue_compiled, entry)
            if entry.output.error is not None:
                failed.append(entry.output)
        return failed

    def _drop_compiling(self, sample: _Sample) -> None:
        """End a sample that the scheduler does not have."""
        for entry in self._compiling:
            if any(one is sample for one in entry.samples):
                entry.samples = [one for one in entry.samples if one is not sample]
                sample.request.finish_reason = "abort"
                if not entry.samples:
                    entry.grammar.cancel()
        self._compiling = [entry for entry in self._compiling if entry.samples]

    def _sample(
        self, output: RequestOutput, params: SamplingParams, index: int, priority: int, cache_salt: str | None
    ) -> _Sample:
        request = Request(
            request_id=_sample_id(output, index),
            prompt_token_ids=output.prompt_token_ids,
            params=params,
            arrival=time.monotonic(),
            priority=priority,
            eos_token_ids=self._model.eos_token_ids,
            sample_index=index,
            cache_salt=cache_salt,
        )
        # The output shares the request's lists, which grow in place.
        completion = CompletionOutput(
            index,
            text_builder(self.tokenizer, params, output.prompt_token_ids) or "",
            request.output_token_ids,
            logprobs=None if params.logprobs is None else request.logprobs,
            token_text=token_text(self.tokenizer),
        )
        output.outputs.append(completion)
        return _Sample(request, completion, output)

    def _close(self, sample: _Sample) -> None:
        """Report the prompt of a sample that has ended, and remove the sample."""
        self._report_prompt(sample)
        step, grammar, found = sample.request.params.beam_step, sample.request.grammar, sample.request.logprobs
        if step is not None and grammar is not None:
            found[:] = [likeliest_allowed(one, grammar, self._model.vocab_size, step.num_tokens) for one in found]
        metrics, num_tokens = sample.parent.metrics, len(sample.request.output_token_ids)
        counts, reason = self.counts, sample.completion.finish_reason
        counts.num_output_tokens += num_tokens
        if reason is not None:
            counts.num_ended[reason] += 1
        if not sample.completion.index:
            counts.num_prompt_tokens += sample.request.prompt_len
        if metrics is not None and num_tokens:
            metrics.last_token_ts = time.monotonic()
            metrics.num_generation_tokens += num_tokens
        del self._samples[sample.request.request_id]

    def _report_prompt(self, sample: _Sample) -> None:
        """Copy the facts about the prompt to the output. All are known once the first token has come."""
        request, output, metrics = sample.request, sample.parent, sample.parent.metrics
        if metrics is not None and request.output_token_ids and not metrics.first_token_ts:
            metrics.first_token_ts = time.monotonic()
        sample.prompt_reported = True
        output.num_cached_tokens = max(output.num_cached_tokens, request.num_cached_tokens)
        known = output.prompt_logprobs
        # Of n samples, the one that has progressed most has the longest list.
        if request.params.prompt_logprobs is not None and len(known or ()) <= len(request.prompt_logprobs):
            positions, output.prompt_token_id_logprobs = without_listed(request.prompt_logprobs, request.params)
            output.prompt_logprobs = LogprobsView([None, *positions], token_text(self.tokenizer))


def grammar_compiler(load: Callable[[], Tokenizer | None], model: ModelSpec, config: EngineConfig) -> GrammarCompiler:
    """Return the compiler of structured outputs for a model. It loads the tokenizer when a grammar needs it."""

    def vocabulary() -> Vocabulary | None:
        tokenizer = load()
        return None if tokenizer is None else Vocabulary.of_tokenizer(tokenizer, model.vocab_size, model.eos_token_ids)

    return GrammarCompiler(vocabulary, tuple(model.eos_token_ids), config.structured_outputs_strictness)


def _sample_id(output: RequestOutput, index: int) -> str:
    """Return the scheduler's id of a sample."""
    return f"{output.request_id}-{index}" if index else output.request_id
