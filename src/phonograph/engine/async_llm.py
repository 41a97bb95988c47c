"""`AsyncLLM`: an engine for an event loop, with requests that start and end independently."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from phonograph.config.engine_config import EngineConfig
from phonograph.core.pooling_params import NO_SAMPLING, PoolingParams
from phonograph.core.sampling_params import RequestOutputKind, SamplingParams
from phonograph.core.token_types import plain_ids
from phonograph.engine.admission import admit_names, admit_stops, admitted_bad_words, admitted_config, admitted_prompt
from phonograph.engine.metrics.request_log import RequestLog
from phonograph.engine.metrics.step_log import StepLog
from phonograph.engine.offline.prompts import PromptInput, salt_of
from phonograph.engine.outputs import RequestMetrics, RequestOutput
from phonograph.engine.process.async_pooling import AsyncPooling
from phonograph.engine.process.async_verbs import shut_down
from phonograph.engine.process.calls import Call, Prompt, Sample
from phonograph.engine.process.client import EngineClient, StartProgress, no_progress
from phonograph.engine.process.messages import Abort, Add, Begin, EngineFacts, Report, SampleUpdate
from phonograph.engine.process.thread_client import ThreadClient
from phonograph.errors import EngineUnavailable, PhonographError, RequestError, RequestFailure, shortened
from phonograph.scheduling.scheduler_stats import SchedulerStats
from phonograph.text.output_text import token_text
from phonograph.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.02
CALLS_AT_ONCE = 32
"""Number of calls that write their new output before the event loop serves sockets and new requests."""
INLINE_CHARACTERS = 4096
"""Longest prompt in characters that is tokenized on the event loop, in about 1 ms; longer ones use a thread."""


class AsyncLLM(AsyncPooling):
    """A model that answers many prompts at once on an event loop, with streamed outputs.

    The engine starts with `start`, or with `async with`. One event loop uses it.

    Args:
        model: folder, GGUF file, hub id or "demo".
        config: configuration in place of `model` and `settings`.
        client: makes the connection to the engine. The default `ThreadClient` runs the engine on a thread of this
            process. `start_processes` (`phonograph.engine.process.process_client`) runs it in a separate process, where
            work on this event loop does not delay its steps, or `data_parallel_size` engines.
        progress: called during the start with the phase, the work done and the total work of the phase.
        settings: fields of EngineConfig, with its defaults.

    Attributes:
        facts: limits, graph mode and device of the engine; set by `start`.
        tokenizer: tokenizer of the model, or None; set by `start`.
        stats: scheduler statistics of the latest report; set by `start`.
        num_open: number of samples in progress.
        num_steps: number of steps of the engine.
        steps: latest steps, and counts of all.
        requests: counts and latencies of all requests.
        died: event that is set when the engine ends by itself; `death` has the reason.

    Raises:
        ConfigError: a setting is wrong.

    Example:
        ```python
        async with AsyncLLM("demo", max_num_seqs=1, cudagraph_capture_sizes=[1, 32]) as llm:
            async for output in llm.generate("Tom has 12 apples.", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)
        ```
    """

    facts: EngineFacts
    stats: SchedulerStats

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        client: Callable[[EngineConfig], EngineClient] = ThreadClient,
        progress: StartProgress = no_progress,
        **settings: Any,
    ) -> None:
        super().__init__(admitted_config(model, config, settings))
        self.num_open = 0
        self.num_steps = 0
        self.steps = StepLog()
        self.requests = RequestLog()
        self.died = asyncio.Event()
        self._make_client = client
        self._progress = progress
        self._keys = itertools.count()
        self._ids = itertools.count()
        self._open: dict[int, tuple[Call, Prompt]] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Make an engine from a whole configuration, as the constructor does with `config`.

        It starts at the first `generate`, unless it has been started before.

        Args:
            engine_args: configuration; `AsyncEngineArgs` is a name of its class.
        """
        engine = cls(config=engine_args)
        engine._starts_itself = True
        return engine

    async def start(self) -> None:
        """Load the model, capture its graphs, and wait until requests can be served.

        Raises:
            PhonographError: the configuration, the model or the machine does not allow it; the message says what would
                work.
        """
        if self._client is not None or self.draining:
            raise PhonographError("an AsyncLLM starts once; make a new one")
        self._client = client = self._make_client(self.config)
        starting = asyncio.ensure_future(client.ready(self._progress))
        try:
            # The tokenizer's library takes seconds to import, while the engine loads weights.
            loading = asyncio.to_thread(load_tokenizer, self.config)
            self.facts, self.tokenizer = await asyncio.gather(starting, loading)
        except BaseException:
            starting.cancel()
            await self.close()
            raise
        self.stats = self.facts.stats
        self.expert_load: Mapping[int, Sequence[int]] = {}
        client.send(Begin(None if self.tokenizer is None else self.tokenizer.eos_token_id))
        self._receiver = asyncio.create_task(self._receive(client), name="engine-reports")
        client.on_death(lambda: self._end(client.end()))

    def _released_client(self) -> EngineClient | None:
        self.draining = True
        if self._receiver is not None:
            self._receiver.cancel()
        self._fail_all(shut_down())
        client, self._client = self._client, None
        return client

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Continue one prompt, and yield its output each time the engine has added to it.

        All yields are the same object, which grows, unless `output_kind` of the parameters is DELTA; the last one is
        `finished`. Leaving the loop early, closing the generator or cancelling its task aborts the request.

        Args:
            prompt: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": token_ids}`; a mapping may have a
                `cache_salt`. For a conversation pass `llm.tokenizer.encode_chat(messages)`.
            sampling_params: defaults to `get_default_sampling_params()`.
            request_id: name of the output; generated by default.
            priority: lower values are served earlier with scheduling_policy "priority"; defaults to 0.

        Yields:
            The output of the prompt so far.

        Raises:
            RequestError: the prompt or the parameters cannot be served.
            RequestFailure: work for the request failed.
            EngineUnavailable: the engine has not started, has ended, or is closed.
        """
        params = await self.get_default_sampling_params() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError("sampling_params", shortened(repr(params)), "must be SamplingParams")
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        admit_names(name, priority)
        await self._start_itself()
        self._check()
        plain, cache_salt = await self._plain(prompt), salt_of(prompt)
        tokenizer, vocab_size = self.tokenizer, self.facts.vocab_size
        admit_stops(params, tokenizer)
        if isinstance(plain, str) and len(plain) > INLINE_CHARACTERS:
            token_ids = await asyncio.to_thread(admitted_prompt, plain, tokenizer, vocab_size)
        else:
            token_ids = admitted_prompt(plain, tokenizer, vocab_size)
        streams = params.output_kind is not RequestOutputKind.FINAL_ONLY
        call = self.open([token_ids], params, streams=streams, priority=priority, cache_salt=cache_salt)
        call.name = name
        (source,) = call.prompts
        text = plain if isinstance(plain, str) else None
        output = RequestOutput(
            request_id=name,
            prompt=text,
            prompt_token_ids=plain_ids(token_ids),
            outputs=[*source.samples],
            metrics=RequestMetrics(queued_ts=source.opened),
        )
        try:
            finished = False
            while not finished:
                await call.wait()
                # Read before the yield: the call may end while the caller has the output.
                finished = call.finished
                pieces = token_text(tokenizer)
                source.report(output, pieces)
                yield source.delta(output, pieces) if params.output_kind is RequestOutputKind.DELTA else output
        finally:
            call.close()

    def open(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | PoolingParams,
        *,
        streams: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
        continues: bool = False,
    ) -> Call:
        """Queue prompts of one call.

        The samples of the first prompt come first among those of the call. If the engine refuses a prompt, waiting for
        the call raises the error.

        Args:
            prompts: token ids of each prompt.
            params: parameters of all prompts; with `PoolingParams` they generate nothing.
            streams: wake the caller at each change, not only at the end.
            priority: as for `generate`.
            cache_salt: cached prefixes are shared only with prompts of the same salt.
            continues: the prompts are a step of one of `searches`, which may end during a shutdown.

        Raises:
            EngineUnavailable: the engine does not accept calls.
            RequestError: bad_words has texts and there is no tokenizer.
        """
        problem = self.problem
        if problem is not None and not (continues and problem.code == "shutting_down"):
            raise problem
        sampling, sent = NO_SAMPLING, params
        if isinstance(params, SamplingParams):
            # Stop strings are found on this side, where text is assembled.
            sampling, bare = params, admitted_bad_words(params, self.tokenizer)
            sent = bare.with_checked(stop=(), include_stop_str_in_output=False, detokenize=False)
        indices = itertools.count()
        call = Call(
            [
                Prompt(
                    next(self._keys),
                    token_ids,
                    [Sample(next(indices), self.tokenizer, sampling, token_ids) for _ in range(sampling.n)],
                    num_growing=sampling.n,
                    max_tokens=sampling.max_tokens if sampling is params else None,
                )
                for token_ids in self._pairs(prompts)
            ],
            streams=streams,
            interval=sampling.stream_interval,
            end=self._abandon,
        )
        for prompt in call.prompts:
            self._open[prompt.key] = call, prompt
            self.num_open += sampling.n
        self._send(Add({prompt.key: prompt.token_ids for prompt in call.prompts}, sent, priority, cache_salt))
        return call

    async def abort(self, request_id: str | Iterable[str]) -> int:
        """End requests. Their outputs end with the tokens so far and finish reason "abort".

        Args:
            request_id: id that `generate` was given, or several; an id that is not in use has no effect.

        Returns:
            The number of calls that were ended.
        """
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        calls = {id(call): call for call, _ in self._open.values() if call.name in names}
        for call in calls.values():
            self._abort(call)
        return len(calls)

    def _abort(self, call: Call) -> None:
        now = time.monotonic()
        for prompt in call.prompts:
            if prompt.key not in self._open:
                continue
            for place in range(len(prompt.samples)):
                self._grow(call, prompt, (prompt.key, place, [], None, "abort", None), made=now, seen=now)
            self._send(Abort(prompt.key))
        if call.on_change is not None:
            call.on_change()

    async def drain(self, seconds: float) -> None:
        """Stop accepting calls, let those in progress run for a while, and fail the rest.

        Args:
            seconds: longest time to wait.
        """
        self.draining = True
        until = time.monotonic() + seconds
        while (self._open or self.searches) and self.death is None and time.monotonic() < until:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        self._fail_all(shut_down())

    async def _receive(self, client: EngineClient) -> None:
        try:
            while True:
                # If steps are faster than writes to clients, each write has the tokens of several steps.
                changed: dict[int, Call] = {}
                for report in await client.receive():
                    self._take(report, changed)
                for number, call in enumerate(changed.values(), 1):
                    if call.on_change is not None:
                        call.on_change()
                    if number % CALLS_AT_ONCE == 0:
                        await asyncio.sleep(0)
                await asyncio.sleep(0)
        except Exception as error:
            log.exception("a report of the engine could not be taken")
            self._end(f"the client lost track of its engine: {error!r}")

    def _take(self, report: Report, changed: dict[int, Call]) -> None:
        """Apply a report to the calls, and add those that grew to `changed`."""
        self.stats, self.num_steps = report.stats, report.num_steps
        self.expert_load = report.expert_load or self.expert_load
        now = time.monotonic()
        self.steps.take(report.steps, report.engine)
        self.asleep, self.sleep_level = report.asleep, report.sleep_level
        self._take_answers(report.done)
        for key, error in report.refused.items():
            if key in self._open:
                call, _ = self._open[key]
                call.fail(error)
        for key, facts in report.prompts.items():
            if key in self._open:
                prompt = self._open[key][1]
                prompt.num_cached_tokens, prompt.logprobs = facts.num_cached_tokens, facts.prompt_logprobs
                prompt.warnings, prompt.pooled, prompt.listed = facts.warnings, facts.pooled, facts.listed
                self.requests.begun(prompt)
        for (key, index), admitted in report.admitted.items():
            if key in self._open:
                self._open[key][1].samples[index].admitted = admitted
        for (key, index), count in report.preempted.items():
            if key in self._open:
                self._open[key][1].samples[index].num_preemptions = count
        for update in report.updates:
            if update[0] not in self._open:
                continue
            call, prompt = self._open[update[0]]
            try:
                self._grow(call, prompt, update, made=report.time, seen=now)
            except Exception:  # a failure of one answer must not end the others
                log.exception("a token could not be turned into text")
                call.fail(RequestFailure(str(prompt.key), "text", "the output could not be turned into text"))
            else:
                changed[id(call)] = call

    def _grow(self, call: Call, prompt: Prompt, update: SampleUpdate, *, made: float, seen: float) -> None:
        """Apply an update to one sample of a call."""
        key, index, token_ids, logprobs, finish_reason, stop_reason = update
        sample = prompt.samples[index]
        if sample.finish_reason is not None:
            return
        num_new = sample.grow(token_ids, logprobs, finish_reason, stop_reason)
        self.requests.grown(prompt, sample, num_new, made=made, seen=seen)
        call.touch(prompt, sample)
        if sample.finish_reason is not None:
            self.num_open -= 1
            if finish_reason is None:
                self._send(Abort(key, index))
            if not prompt.num_growing:
                del self._open[key]

    def _abandon(self, call: Call) -> None:
        for prompt in call.prompts:
            if self._open.pop(prompt.key, None) is not None:
                self.num_open -= prompt.num_growing
                self.requests.num_ended["abort"] += prompt.num_growing
                self._send(Abort(prompt.key))

    def _end(self, reason: str) -> None:
        log.error("%s", reason)
        self.death = reason
        self._fail_all(EngineUnavailable(reason, "engine_died"))
        self.died.set()

    def _fail_all(self, error: EngineUnavailable) -> None:
        for call in {*self.searches, *(call for call, _ in self._open.values())}:
            call.fail(error)
        self._fail_verbs(error)
