"""Requests as users mean them, around the synchronous core: text in, text out, n samples, stop strings, validation.

The offline API drives a session directly; whatever serves over a network puts a queue around the same object.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TypeVar

from phonograph.config.engine_config import EngineConfig
from phonograph.core.grammar import Grammar
from phonograph.core.request import Request
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.admission import Prompt, admit_names, admit_parameters, admit_stops, admitted_prompt
from phonograph.engine.core import EngineCore
from phonograph.engine.outputs import CompletionOutput, RequestOutput
from phonograph.errors import RequestError, RequestFailure, cause_text, shortened
from phonograph.models.spec import ModelSpec
from phonograph.sampling.dead_ends import dead_end
from phonograph.structured.compiler import GrammarCompiler
from phonograph.structured.vocabulary import Vocabulary
from phonograph.text.output_text import text_builder
from phonograph.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Part = TypeVar("Part")
_HELD_SECONDS = 0.02
"""How long a step waits for a grammar when there is nothing else to do."""


@dataclass(slots=True)
class _Sample:
    """One of a request's n samples on its way."""

    request: Request
    completion: CompletionOutput
    parent: RequestOutput


@dataclass(slots=True, eq=False)
class _Held:
    """A request whose grammar is being compiled; the scheduler does not know of it yet."""

    output: RequestOutput
    samples: list[_Sample]
    grammar: Future[Grammar]


class Session:
    """Adds, steps and aborts requests. Not thread-safe: one thread drives it.

    `tokenizer` None serves token ids only. `seed` makes requests without a seed of their own repeatable. `grammars`
    compiles structured outputs, while others go on.
    """

    def __init__(
        self,
        core: EngineCore,
        model: ModelSpec,
        tokenizer: Tokenizer | None,
        seed: int | None,
        grammars: GrammarCompiler,
    ) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self._model = model
        self._seeds = random.Random(seed)
        self._ids = itertools.count()
        self._samples: dict[str, _Sample] = {}
        self.grammars = grammars
        self._held: list[_Held] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything to step for: requests that have not ended, or steps still in flight."""
        return self.core.has_work or bool(self._held)

    def add(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> RequestOutput:
        """Queues a request and returns the output that the steps will fill. Where its structured output turns out to be
        no grammar, or its parameters to leave no token on the way, a step sets the output's `error`.

        Raises:
            RequestError: the prompt or the parameters cannot be served; nothing has been queued.
        """
        token_ids = admitted_prompt(prompt, self.tokenizer, self._model.vocab_size)
        admit_parameters(params, len(token_ids), self._model.vocab_size, self.core.scheduler.limits)
        admit_stops(params, self.tokenizer)
        if params.seed is None:
            # Drawn here, not where sampling happens, so that a preempted request goes on with the same one.
            params = params.with_checked(seed=self._seeds.getrandbits(63))
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        admit_names(request_id, priority)
        output = RequestOutput(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
        )
        samples = [self._sample(output, params, index, priority) for index in range(params.n)]
        if any(sample.request.request_id in self._samples for sample in samples):
            raise RequestError("request_id", request_id, "is in use by a request that has not ended")
        if params.structured_outputs is None:
            self._queue(samples, None)
        else:
            # Before it is asked for: nobody would wait for the grammar of a request that is refused.
            for sample in samples:
                self.core.scheduler.check_request(sample.request)
            grammar = self.grammars.request(params.structured_outputs)
            if grammar.done():
                self._queue(samples, grammar.result())
            else:
                self._held.append(_Held(output, samples, grammar))
        self._samples.update((sample.request.request_id, sample) for sample in samples)
        return output

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the outputs that changed, each once.

        May return nothing although there is more to do: the results of a step may come with a later one.
        """
        changed = {id(output): output for output in self._take_compiled()} if self._held else {}
        samples = self._samples
        for request in self.core.step():
            sample = samples.get(request.request_id)
            if sample is None:  # another sample of its request has failed in this step
                continue
            changed[id(sample.parent)] = sample.parent
            self._contain(sample.parent, self._take, sample)
        return list(changed.values())

    def fail(self, output: RequestOutput, error: RequestError | RequestFailure) -> None:
        """Ends all samples of a request, for which work failed or which turns out to be one that cannot be served.

        Its output gets the error and loses its samples.
        """
        for completion in output.outputs:
            sample = self._samples.get(_sample_id(output, completion.index))
            if sample is None or sample.parent is not output:
                continue
            del self._samples[sample.request.request_id]
            if not self.core.scheduler.fail(sample.request.request_id):
                self._drop_held(sample)
        output.error = error.with_traceback(None)  # whose frames hold requests
        output.outputs.clear()

    def abort(self, output: RequestOutput, index: int | None = None) -> None:
        """Ends what is left of a request, or of one of its samples; what has been generated so far stays.

        A request that has ended already is fine.
        """
        for completion in list(output.outputs) if index is None else output.outputs[index : index + 1]:
            sample = self._samples.get(_sample_id(output, completion.index))
            if sample is None or sample.parent is not output:
                continue
            if not self.core.scheduler.abort(sample.request.request_id):
                self._drop_held(sample)
            self._contain(output, self._update, sample)
        self.core.settle()

    def _contain(self, output: RequestOutput, work: Callable[[Part], None], part: Part) -> None:
        """Calls `work` for a part of a request; if it raises, the request ends with that error."""
        try:
            work(part)
        except (RequestError, RequestFailure) as error:
            self.fail(output, error)
        except Exception as error:
            log.exception("request %s: its output could not be made", output.request_id)
            self.fail(output, RequestFailure(output.request_id, "output", cause_text(error)))

    def _take(self, sample: _Sample) -> None:
        """Takes over what a step brought for a sample."""
        request = sample.request
        if request.failure is not None:
            part, problem, no_token = request.failure
            structured = request.params.structured_outputs
            if no_token and part == "grammar" and structured is not None:
                problem = f"after {len(request.output_token_ids)} tokens {problem}"
                raise RequestError(structured.kind, shortened(structured.source), problem)
            error = dead_end(request, self._model.vocab_size) if no_token else None
            raise error or RequestFailure(sample.parent.request_id, part, problem)
        self._update(sample)

    def _update(self, sample: _Sample) -> None:
        """Turn new tokens into output, and end the request at a stop string."""
        request, completion = sample.request, sample.completion
        completion.update(request.finish_reason, request.stop_reason)
        if completion.finish_reason is not None:
            if not request.finished:
                self.core.scheduler.finish(request.request_id, completion.finish_reason, completion.stop_reason)
            self._close(sample)
        elif len(request.output_token_ids) == 1:
            self._report_prompt(sample)

    def _queue(self, samples: list[_Sample], grammar: Grammar | None) -> None:
        """Gives all samples of a request to the scheduler, or none."""
        if grammar is not None:
            samples[0].parent.warnings = grammar.warnings
        for queued, sample in enumerate(samples):
            sample.request.grammar = grammar
            try:
                self.core.scheduler.add(sample.request)
            except Exception:
                for earlier in samples[:queued]:
                    self.core.scheduler.abort(earlier.request.request_id)
                raise

    def _queue_held(self, held: _Held) -> None:
        self._queue(held.samples, held.grammar.result())

    def _take_compiled(self) -> list[RequestOutput]:
        """Queues the requests whose grammars have been compiled; returns those that failed."""
        futures = [held.grammar for held in self._held]
        # With nothing to step for, looking again and again would be all that this thread does.
        wait(futures, timeout=0 if self.core.has_work else _HELD_SECONDS, return_when=FIRST_COMPLETED)
        ready: list[_Held] = []
        pending: list[_Held] = []
        for held in self._held:
            (ready if held.grammar.done() else pending).append(held)
        self._held = pending
        failed: list[RequestOutput] = []
        for held in ready:
            self._contain(held.output, self._queue_held, held)
            if held.output.error is not None:
                failed.append(held.output)
        return failed

    def _drop_held(self, sample: _Sample) -> None:
        """Ends a sample that the scheduler does not know."""
        for held in self._held:
            if any(one is sample for one in held.samples):
                held.samples = [one for one in held.samples if one is not sample]
                sample.request.finish_reason = "abort"
                if not held.samples:
                    held.grammar.cancel()
        self._held = [held for held in self._held if held.samples]

    def _sample(self, output: RequestOutput, params: SamplingParams, index: int, priority: int) -> _Sample:
        request = Request(
            request_id=_sample_id(output, index),
            prompt_token_ids=output.prompt_token_ids,
            params=params,
            arrival=time.monotonic(),
            priority=priority,
            eos_token_ids=self._model.eos_token_ids,
            sample_index=index,
        )
        # The lists are the request's own: they grow in the output without being carried over.
        completion = CompletionOutput(
            index,
            text_builder(self.tokenizer, params, output.prompt_token_ids) or "",
            request.output_token_ids,
            logprobs=None if params.logprobs is None else request.logprobs,
        )
        output.outputs.append(completion)
        return _Sample(request, completion, output)

    def _close(self, sample: _Sample) -> None:
        """Report what is known of the prompt of a sample that has ended, and forget the sample."""
        self._report_prompt(sample)
        del self._samples[sample.request.request_id]

    @staticmethod
    def _report_prompt(sample: _Sample) -> None:
        """What is known of the prompt: everything, once the first token has come."""
        request, output = sample.request, sample.parent
        output.num_cached_tokens = max(output.num_cached_tokens, request.num_cached_tokens)
        known = output.prompt_logprobs
        # Of n samples the one that has got furthest tells.
        if request.params.prompt_logprobs is not None and len(known or ()) <= len(request.prompt_logprobs):
            output.prompt_logprobs = [None, *request.prompt_logprobs]


def grammar_compiler(load: Callable[[], Tokenizer | None], model: ModelSpec, config: EngineConfig) -> GrammarCompiler:
    """Returns what compiles structured outputs for a model; its tokenizer is loaded when it is needed."""

    def vocabulary() -> Vocabulary | None:
        tokenizer = load()
        return None if tokenizer is None else Vocabulary.of_tokenizer(tokenizer, model.vocab_size, model.eos_token_ids)

    return GrammarCompiler(vocabulary, tuple(model.eos_token_ids), config.structured_outputs_strictness)


def _sample_id(output: RequestOutput, index: int) -> str:
    """What the scheduler calls a sample."""
    return f"{output.request_id}-{index}" if index else output.request_id
