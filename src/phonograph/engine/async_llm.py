"""The engine as the server's event loop sees it: calls are opened, grow by themselves, and end. A queue, no engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence

from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.metrics.request_log import RequestLog
from phonograph.engine.metrics.step_log import StepLog
from phonograph.engine.process.calls import Call, Prompt, Sample
from phonograph.engine.process.client import EngineProcess
from phonograph.engine.process.messages import Abort, Add, EngineFacts, Report, SampleUpdate
from phonograph.errors import EngineUnavailable, RequestFailure
from phonograph.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.02
CALLS_AT_ONCE = 32
"""Calls that write what they got before sockets and new requests have their turn."""


class AsyncEngine:
    """Calls in progress, by the keys of their prompts. One event loop drives it.

    num_open: samples that have not ended
    stats:    of the scheduler, as of the latest report
    steps:    the latest ones and counts of all
    requests: counts and times of all
    died:     set when the engine's process has ended by itself, with the reason in `death`
    """

    def __init__(self, process: EngineProcess, facts: EngineFacts, tokenizer: Tokenizer) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.num_open = 0
        self.stats = facts.stats
        self.num_steps = 0
        self.steps = StepLog()
        self.requests = RequestLog()
        self.died = asyncio.Event()
        self.death: str | None = None
        self.draining = False
        self._process = process
        self._keys = itertools.count()
        self._open: dict[int, tuple[Call, Prompt]] = {}
        self._receiver = asyncio.create_task(self._receive(), name="engine-reports")
        process.on_death(self._mourn)

    @property
    def problem(self) -> EngineUnavailable | None:
        """Why no call can be opened, if so."""
        if self.death is not None:
            return EngineUnavailable(self.death, "engine_died")
        if self.draining:
            return EngineUnavailable("the server is shutting down", "shutting_down")
        return None

    def open(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        streams: bool = False,
        priority: int = 0,
    ) -> Call:
        """Queues prompts, given as token ids. The samples of the first come first among those of the call.

        A prompt that the engine refuses fails the call, which says so where it is waited for.

        Raises:
            EngineUnavailable: the engine takes no calls any more.
        """
        if self.problem is not None:
            raise self.problem
        # Stop strings are found here, where text is made.
        bare = params.with_checked(stop=(), include_stop_str_in_output=False, detokenize=False)
        indices = itertools.count()
        call = Call(
            [
                Prompt(
                    next(self._keys),
                    token_ids,
                    [Sample(next(indices), self.tokenizer, params, token_ids) for _ in range(params.n)],
                    num_growing=params.n,
                )
                for token_ids in prompts
            ],
            streams=streams,
            end=self._abandon,
        )
        for prompt in call.prompts:
            self._open[prompt.key] = call, prompt
            self.num_open += params.n
        self._process.send(Add({prompt.key: prompt.token_ids for prompt in call.prompts}, bare, priority))
        return call

    async def drain(self, seconds: float) -> None:
        """Opens no call any more, gives those in progress so many seconds, and fails the rest."""
        self.draining = True
        until = time.monotonic() + seconds
        while self._open and self.death is None and time.monotonic() < until:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        self._fail_all(EngineUnavailable("the server was shut down before the answer was complete", "shutting_down"))

    def close(self) -> None:
        """Forgets the process, which its owner closes."""
        self._receiver.cancel()

    async def _receive(self) -> None:
        try:
            await self._take_all()
        except Exception as error:
            log.exception("a report of the engine could not be taken")
            self._end(f"the server lost track of its engine: {error!r}")

    async def _take_all(self) -> None:
        while True:
            # Where steps come faster than clients can be written to, each write has the tokens of several.
            changed: dict[int, Call] = {}
            for report in await self._process.receive():
                self._take(report, changed)
            for number, call in enumerate(changed.values(), 1):
                if call.on_change is not None:
                    call.on_change()
                if number % CALLS_AT_ONCE == 0:
                    await asyncio.sleep(0)
            await asyncio.sleep(0)

    def _take(self, report: Report, changed: dict[int, Call]) -> None:
        """Lets calls grow by what a report brought, and adds them to `changed`."""
        self.stats, self.num_steps = report.stats, report.num_steps
        now = time.monotonic()
        self.steps.take(report.steps)
        for key, error in report.refused.items():
            if key in self._open:
                call, _ = self._open[key]
                call.fail(error)
        for key, facts in report.prompts.items():
            if key in self._open:
                prompt = self._open[key][1]
                prompt.num_cached_tokens, prompt.logprobs = facts.num_cached_tokens, facts.prompt_logprobs
                prompt.warnings = facts.warnings
                self.requests.num_prompt_tokens += len(prompt.token_ids)
        for update in report.updates:
            if update[0] not in self._open:
                continue
            call, prompt = self._open[update[0]]
            try:
                self._grow(call, prompt, update, made=report.time, seen=now)
            except Exception:  # one answer that cannot be made text must not end the others
                log.exception("a token could not be turned into text")
                call.fail(RequestFailure(str(prompt.key), "text", "the output could not be turned into text"))
            else:
                changed[id(call)] = call

    def _grow(self, call: Call, prompt: Prompt, update: SampleUpdate, *, made: float, seen: float) -> None:
        """Lets one sample of a call grow."""
        key, index, token_ids, logprobs, finish_reason, stop_reason = update
        sample = prompt.samples[index]
        if sample.finish_reason is not None:
            return
        sample.grow(token_ids, logprobs, finish_reason, stop_reason)
        self.requests.grown(prompt, sample, len(token_ids), made=made, seen=seen)
        call.touch(prompt, sample)
        if sample.finish_reason is not None:
            self.num_open -= 1
            if finish_reason is None:
                self._process.send(Abort(key, index))
            if not prompt.num_growing:
                del self._open[key]

    def _abandon(self, call: Call) -> None:
        for prompt in call.prompts:
            if self._open.pop(prompt.key, None) is not None:
                self.num_open -= prompt.num_growing
                self.requests.num_ended["abort"] += prompt.num_growing
                self._process.send(Abort(prompt.key))

    def _mourn(self) -> None:
        self._end(self._process.end())

    def _end(self, reason: str) -> None:
        log.error("%s", reason)
        self.death = reason
        self._fail_all(EngineUnavailable(reason, "engine_died"))
        self.died.set()

    def _fail_all(self, error: EngineUnavailable) -> None:
        for call in {id(call): call for call, _ in self._open.values()}.values():
            call.fail(error)
