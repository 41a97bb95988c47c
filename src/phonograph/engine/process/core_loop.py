"""Loop of the engine's process: executes commands between steps, and reports the results of each step."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Protocol

from phonograph.core.kv_group import KVGroup
from phonograph.core.request import Request
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.metrics.profiler import Profiler
from phonograph.engine.metrics.step_record import StepRecord
from phonograph.engine.outputs import RequestOutput
from phonograph.engine.process.messages import (
    Abort,
    Add,
    Align,
    Answer,
    Channel,
    Pause,
    Profile,
    PromptFacts,
    Refusal,
    Report,
    ResetPrefixCache,
    Resume,
    SampleUpdate,
    Sleep,
    Stop,
    Verb,
    WakeUp,
)
from phonograph.engine.session import Session
from phonograph.engine.startup.sleeper import Sleeper, checked_sleeper
from phonograph.errors import PhonographError, RequestError, RequestFailure, cause_text
from phonograph.kv_cache.block_events import BlockEvent
from phonograph.runner.pools.encoder_keys import EncoderKeys
from phonograph.scheduling.engine_router import IndexChange, index_changes
from phonograph.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

EXPERT_LOAD_SECONDS = 1.0
"""Least time between two readings of the counters of experts while requests run."""
COMMAND_SECONDS = 0.002
"""Time for commands between two steps, so that new requests, of one call or of many, do not delay running ones."""


@dataclass(slots=True)
class _Open:
    """A prompt in progress: its output, and for each sample the request and the number of reported tokens."""

    key: int
    output: RequestOutput
    requests: list[Request]
    num_reported: list[int]
    prompt_reported: bool = False
    ended: set[int] = field(default_factory=set[int])


class EventPublisher(Protocol):
    """Receiver of the prefix cache's events."""

    def publish(self, events: Sequence[BlockEvent], groups: Sequence[KVGroup]) -> None: ...


class _Adding:
    """A call whose prompts are being queued.

    keys: all prompts of the call
    left: those that are not queued yet
    """

    def __init__(self, command: Add) -> None:
        self.keys = list(command.prompts)
        self.left = dict(command.prompts)
        self.params, self.priority, self.cache_salt = command.params, command.priority, command.cache_salt
        self.num_samples = command.params.n if isinstance(command.params, SamplingParams) else 1


class CoreLoop:
    """A session driven by commands. It reports token ids; the client makes text and finds stop strings.

    Args:
        session: the session.
        channel: connection to the client.
        sleeper: executes `Sleep` and `WakeUp`, which are refused without it.
        profiler: executes `Profile`; without it there is no folder for traces.
        publisher: gets the events of the prefix cache.
        reports_cache: report the changes of the prefix cache.
        encoder_keys: executes `Align`; None for a model without an encoder of audio.
    """

    def __init__(
        self,
        session: Session,
        channel: Channel,
        sleeper: Sleeper | None = None,
        profiler: Profiler | None = None,
        publisher: EventPublisher | None = None,
        *,
        reports_cache: bool = False,
        encoder_keys: EncoderKeys | None = None,
    ) -> None:
        self._session = session
        self._channel = channel
        self._by_key: dict[int, _Open] = {}
        self._by_output: dict[int, _Open] = {}
        self._adding: deque[_Adding] = deque()
        self._sleeper = sleeper
        self._profiler = profiler or Profiler(None)
        self._publisher = publisher
        self._reports_cache = reports_cache
        self._encoder_keys = encoder_keys
        self._cached: list[IndexChange] = []
        self._paused = self._sleeping = False  # by Pause, and by Sleep
        self._stopped = False  # the pause or sleep has begun: no step runs
        self._held: deque[_Adding] = deque()  # calls that came after it
        self._unanswered: list[Pause | Sleep] = []  # those that wait for requests
        self._done: dict[int, Answer] = {}
        self._ended: list[SampleUpdate] = []  # samples that ended before they were queued
        self._num_steps = 0
        self._expert_load_read = 0.0
        self._steps: list[StepRecord] = []
        session.core.on_step = lambda record: self._steps.append(record)

    def run(self) -> None:
        """Run until `Stop`."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """Execute pending commands, then run a step. Wait for a command if there is nothing else to do.

        Returns:
            False after `Stop`.
        """
        refused: dict[int, Refusal] = {}
        changed: dict[int, RequestOutput] = {}
        aborted = False
        command = self._channel.receive(wait=self._stopped or not self._has_work)
        until = time.monotonic() + COMMAND_SECONDS
        while command is not None:
            if isinstance(command, Stop):
                return False
            if isinstance(command, Add):
                (self._held if self._paused or self._sleeping else self._adding).append(_Adding(command))
            elif isinstance(command, Abort):
                self._abort(command)
                aborted = True
            elif isinstance(command, Verb):
                changed |= {id(output): output for output in self._execute(command)}
            command = self._channel.receive(wait=False) if time.monotonic() < until else None
        if not self._stopped:
            self._add_prompts(until, refused)
            if self._session.has_unfinished:
                changed |= {id(output): output for output in self._session.step()}
                self._num_steps += 1
            if self._unanswered and not self._has_work:
                self._stop()
        if self._scheduler.events is not None:
            self._take_events(self._scheduler.events.take())
        # Steps without a token, such as a chunk of a long prompt, are reported too.
        if changed or refused or aborted or self._steps or self._done or self._ended or self._cached:
            self._report(list(changed.values()), refused)
        return True

    def _take_events(self, events: list[BlockEvent]) -> None:
        groups = self._scheduler.groups
        if self._publisher is not None:
            self._publisher.publish(events, groups)
        if self._reports_cache:
            self._cached += index_changes(events, next((at for at, one in enumerate(groups) if one.window is None), 0))

    @property
    def _scheduler(self) -> Scheduler:
        return self._session.core.scheduler

    @property
    def _has_work(self) -> bool:
        return self._session.has_unfinished or bool(self._adding)

    def _execute(self, verb: Verb) -> list[RequestOutput]:
        """Execute a verb, or begin to; return the outputs that it changed."""
        if isinstance(verb, Pause | Sleep):
            return self._begin_to_stop(verb)
        try:
            self._done[verb.key] = self._execute_at_once(verb)
        except PhonographError as error:
            self._done[verb.key] = error
        return []

    def _execute_at_once(self, verb: Resume | ResetPrefixCache | WakeUp | Profile | Align) -> Answer:
        if isinstance(verb, Align):
            assert self._encoder_keys is not None, "clients align transcripts of models with an encoder"
            try:
                return self._encoder_keys.align(verb.prompt, verb.token_ids, verb.num_positions)
            except RuntimeError as error:  # such as too little memory
                raise RequestFailure("transcription", "alignment", cause_text(error)) from error
        if isinstance(verb, Profile):
            return self._profiler.start() if verb.start else self._profiler.stop()
        if isinstance(verb, ResetPrefixCache):
            self._scheduler.reset_prefix_cache()
        elif isinstance(verb, WakeUp):
            sleeper = checked_sleeper(self._sleeper)
            sleeper.wake_up(verb.tags)
            self._sleeping = bool(sleeper.asleep)
            self._end_waits(Sleep)
        elif self._sleeping:
            raise RequestError("resume", "now", "the engine sleeps; wake_up lets it continue")
        else:
            self._paused = False
            self._end_waits(Pause)
        self._continue()
        return None

    def _continue(self) -> None:
        """Let steps run, if neither a pause nor a sleep is left."""
        if not (self._paused or self._sleeping):
            self._stopped = False
            self._adding += self._held
            self._held.clear()

    def _end_waits(self, kind: type[Pause | Sleep]) -> None:
        """Answer the verbs that wait for requests, because the opposite has come."""
        for verb in self._unanswered:
            if isinstance(verb, kind):
                problem = "the engine was woken up before its requests had ended"
                self._done[verb.key] = RequestError("sleep", "now", problem) if kind is Sleep else None
        self._unanswered = [verb for verb in self._unanswered if not isinstance(verb, kind)]

    def _begin_to_stop(self, verb: Pause | Sleep) -> list[RequestOutput]:
        """Abort requests, wait for them or keep them, and stop when none is left to run."""
        if isinstance(verb, Sleep):
            try:
                checked_sleeper(self._sleeper)
            except PhonographError as error:
                self._done[verb.key] = error
                return []
            self._sleeping = True
        else:
            self._paused = True
        self._unanswered.append(verb)
        changed = self._abort_all() if verb.mode == "abort" else []
        if self._session.core.asleep:
            self._stop()  # Requests that are kept cannot run.
            return changed
        self._stopped = False
        if verb.mode == "keep":
            while self._session.core.in_flight:
                changed += self._session.step(schedules=False)
        if verb.mode == "keep" or not self._has_work:
            self._stop()
        return changed

    def _stop(self) -> None:
        """Begin the pause or sleep: requests have ended, or are kept."""
        self._stopped = True
        waiting, self._unanswered = self._unanswered, []
        for verb in waiting:
            self._done[verb.key] = None
            if isinstance(verb, Sleep):
                self._scheduler.preempt_all()
                try:
                    checked_sleeper(self._sleeper).sleep(verb.level)
                except PhonographError as error:
                    self._done[verb.key] = error
                    self._sleeping = self._session.core.asleep
                    self._continue()
            elif verb.clear_cache:
                self._scheduler.reset_prefix_cache()

    def _abort_all(self) -> list[RequestOutput]:
        """End the requests in progress, also those that are not queued yet; return the outputs."""
        for call in self._adding:
            for key, index in product(call.left, range(call.num_samples)):
                self._ended.append((key, index, [], None, "abort", None))
        self._adding.clear()
        outputs = [opened.output for opened in self._by_key.values()]
        for output in outputs:
            self._session.abort(output)
        return outputs

    def _add_prompts(self, until: float, refused: dict[int, Refusal]) -> None:
        """Queue prompts until the time is over, at least one. The rest follows after the next step."""
        while self._adding:
            call = self._adding[0]
            if not call.left:
                self._adding.popleft()
                continue
            key = next(iter(call.left))
            self._add(key, call.left.pop(key), call, refused)
            if time.monotonic() >= until:
                return

    def _add(self, key: int, token_ids: list[int], call: _Adding, refused: dict[int, Refusal]) -> None:
        try:
            output = self._session.add(token_ids, call.params, priority=call.priority, cache_salt=call.cache_salt)
        except Exception as error:
            refused[key] = self._error_of(f"prompt {key}", error)
            call.left.clear()
            for other in call.keys:
                self._abort(Abort(other))
            return
        opened = _Open(key, output, self._session.requests_of(output), [0] * len(output.outputs))
        self._by_key[key] = self._by_output[id(output)] = opened

    def _abort(self, command: Abort) -> None:
        opened = self._by_key.get(command.key)
        if opened is None:
            for call in (*self._adding, *self._held):
                call.left.pop(command.key, None)
            return
        self._session.abort(opened.output, command.index)
        if opened.output.finished:
            self._forget(opened)

    def _forget(self, opened: _Open) -> None:
        del self._by_key[opened.key], self._by_output[id(opened.output)]

    def _report(self, changed: list[RequestOutput], refused: dict[int, Refusal]) -> None:
        steps, self._steps = self._steps, []
        stats = replace(self._scheduler.stats, num_deferred=self._session.num_deferred)
        report = Report(
            stats=stats, num_steps=self._num_steps, refused=refused, steps=steps, expert_load=self._expert_load()
        )
        if self._sleeper is not None:
            report.asleep, report.sleep_level = self._sleeper.asleep, self._sleeper.level
        report.updates, self._ended = self._ended, []
        report.done, self._done = self._done, {}
        report.cached, self._cached = self._cached, []
        for output in changed:
            opened = self._by_output.get(id(output))
            if opened is None:  # aborted after it changed
                continue
            if output.error is None:
                try:
                    self._report_output(opened, report)
                except Exception as error:
                    self._session.fail(output, self._error_of(output.request_id, error))
            if output.error is not None:
                refused[opened.key] = output.error
            if output.finished:
                self._forget(opened)
        self._channel.send(report)

    def _expert_load(self) -> dict[int, list[int]] | None:
        """Read the counters of experts, which waits for the device: once in a while, and after the last request."""
        load, now = self._session.core.expert_load, time.monotonic()
        if not load or (self._session.has_unfinished and now < self._expert_load_read + EXPERT_LOAD_SECONDS):
            return None
        self._expert_load_read = now
        return {layer: load_X.tolist() for layer, load_X in load.items()}

    @staticmethod
    def _report_output(opened: _Open, report: Report) -> None:
        """Add the new part of one prompt's output to a report."""
        output = opened.output
        if not opened.prompt_reported:
            opened.prompt_reported = True
            scored = None if output.prompt_logprobs is None else list(output.prompt_logprobs.positions)
            report.prompts[opened.key] = PromptFacts(
                output.num_cached_tokens, scored, output.warnings, output.pooled, output.prompt_token_id_logprobs
            )
        for index, completion in enumerate(output.outputs):
            start, end = opened.num_reported[index], len(completion.token_ids)
            ended = completion.finish_reason is not None and index not in opened.ended
            if start == end and not ended:
                continue
            opened.num_reported[index] = end
            request = opened.requests[index]
            if not start and request.admitted is not None:
                report.admitted[opened.key, index] = request.admitted
            if ended:
                opened.ended.add(index)
                if request.num_preemptions:
                    report.preempted[opened.key, index] = request.num_preemptions
            logprobs = None if completion.positions is None else completion.positions[start:end]
            token_ids = completion.token_ids[start:end]
            reasons = completion.finish_reason, completion.stop_reason
            report.updates.append((opened.key, index, token_ids, logprobs, *reasons))

    @staticmethod
    def _error_of(name: str, error: Exception) -> RequestError | RequestFailure:
        """Return an error that a client can be answered with, for any exception."""
        if isinstance(error, RequestError | RequestFailure):
            return error
        log.exception("%s: the engine's process could not serve it", name)
        return RequestFailure(name, "engine", cause_text(error))
