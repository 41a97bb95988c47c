"""`EnginePool`: several engines behind one connection. Each prompt goes to one of them, verbs go to all."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import zip_longest

import numpy as np

from phonograph.core.batch import DraftCounts
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.process.client import REPORTS_AT_ONCE, EngineClient, StartProgress, no_progress
from phonograph.engine.process.messages import (
    Abort,
    Add,
    Align,
    Answer,
    Begin,
    Command,
    EngineFacts,
    Pause,
    Report,
    Resume,
    Sleep,
    Stop,
    Verb,
    WakeUp,
)
from phonograph.errors import EngineUnavailable, PhonographError
from phonograph.kv_cache.checkpoints import CheckpointCounts
from phonograph.scheduling.engine_router import EngineRouter
from phonograph.scheduling.scheduler_stats import SchedulerStats

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Member:
    """One engine of a pool.

    client: connection to it
    stats: its latest statistics, since it has started first
    idle: its statistics at the start
    latest: its latest report, of this process
    up: True while it runs
    num_restarts: restarts after it has ended by itself
    receiver: task that takes its reports
    """

    client: EngineClient
    stats: SchedulerStats | None = None
    idle: SchedulerStats | None = None
    latest: Report | None = None
    up: bool = False
    num_restarts: int = 0
    receiver: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Answer:
    """Answers of the engines to one verb: those that are missing, and what has come."""

    missing: set[int]
    results: list[str | np.ndarray]
    error: PhonographError | None = None


class EnginePool:
    """Connection to several engines. See `EngineClient`.

    An engine that ends by itself is started again. Its prompts fail, the others are served meanwhile. Prompts wait
    while no engine runs. The pool has ended when no engine is left that could be started.

    Args:
        num_engines: number of engines.
        start: starts the engine of a number, and returns the connection to it.
    """

    def __init__(self, num_engines: int, start: Callable[[int], EngineClient]) -> None:
        self._start = start
        self.members = [Member(start(rank)) for rank in range(num_engines)]
        self.router = EngineRouter(num_engines, 1)
        self._reports: asyncio.Queue[Report] = asyncio.Queue()
        self._open: dict[int, tuple[int, set[int]]] = {}  # engine and open samples of each prompt, by key
        self._held: list[Add] = []  # while no engine runs
        self._answers: dict[int, _Answer] = {}
        self._standing: list[Pause | Sleep] = []  # for engines that start again
        self._begin: Begin | None = None
        self._restarts: set[asyncio.Task[None]] = set()
        self._callback: Callable[[], None] | None = None
        self._reason = "no engine was started"

    async def ready(self, progress: StartProgress) -> EngineFacts:
        # One engine shows the progress; all have the same work.
        starts = [one.client.ready(no_progress if rank else progress) for rank, one in enumerate(self.members)]
        facts = await asyncio.gather(*starts)
        self.router = EngineRouter(len(self.members), _prefix_block_size(facts[0]))
        for rank, (member, its) in enumerate(zip(self.members, facts, strict=True)):
            member.stats = member.idle = its.stats
            self._serve(rank)
        note = f"{len(facts)} engines serve behind one address; these decisions are of each"
        return replace(
            facts[0],
            stats=self.stats,
            context_len=min(one.context_len for one in facts),
            max_num_seqs=sum(one.max_num_seqs for one in facts),
            start_seconds=max(one.start_seconds for one in facts),
            notes=(note, *facts[0].notes),
        )

    @property
    def stats(self) -> SchedulerStats:
        """Statistics of all engines together."""
        return merged_stats([one.stats for one in self.members if one.stats is not None])

    def send(self, command: Command) -> None:
        if isinstance(command, Add):
            self._add(command)
        elif isinstance(command, Abort):
            self._abort(command)
        elif isinstance(command, Begin | Stop):
            self._begin = command if isinstance(command, Begin) else self._begin
            for member in self.members:
                member.client.send(command)
        else:
            self._execute(command)

    async def receive(self) -> list[Report]:
        reports = [await self._reports.get()]
        while len(reports) < REPORTS_AT_ONCE and not self._reports.empty():
            reports.append(self._reports.get_nowait())
        return reports

    def on_death(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def end(self) -> str:
        return self._reason

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        self._callback = None
        for task in self._restarts:
            task.cancel()
        for member in self.members:
            member.client.send(Stop())  # all at once, so that they end side by side
        for member in self.members:
            self._close(member)

    def _serve(self, rank: int) -> None:
        """Take the reports of an engine that has started, and notice its end."""
        member = self.members[rank]
        member.up = True
        member.receiver = asyncio.create_task(self._receive(rank, member.client), name=f"engine-{rank}-reports")
        member.client.on_death(lambda: self._lose(rank))

    async def _receive(self, rank: int, client: EngineClient) -> None:
        try:
            while True:
                for report in await client.receive():
                    self._take(rank, report)
                    self._reports.put_nowait(report)
        except Exception as error:
            log.exception("a report of engine %d could not be taken", rank)
            self._lose(rank, f"the client lost track of engine {rank}: {error!r}")

    def _take(self, rank: int, report: Report) -> None:
        """Note what a report says of its engine, and turn it into one of all engines."""
        member = self.members[rank]
        member.stats = report.stats
        member.latest = replace(report)
        self.router.changed(rank, report.cached)
        self.router.loaded(rank, report.stats)
        for key in report.prompts:
            self.router.begun(key)
        for key in report.refused:
            self._forget(key)
        for key, index, *_, finish_reason, _ in report.updates:
            if finish_reason is not None:
                self._forget(key, index)
        report.done = {
            key: answer for key, result in report.done.items() for answer in self._answered(rank, key, result)
        }
        self._merge(rank, report)

    def _merge(self, rank: int, report: Report) -> None:
        latest = [one.latest for one in self.members if one.latest is not None]
        report.engine, report.stats, report.cached = rank, self.stats, []
        report.num_steps = sum(one.num_steps for one in latest)
        report.asleep = frozenset[str]().union(*(one.asleep for one in latest))
        report.sleep_level = max((one.sleep_level for one in latest), default=0)
        if report.expert_load is not None:
            loads = [one.expert_load for one in latest if one.expert_load is not None]
            report.expert_load = {
                layer: [sum(counts) for counts in zip(*(load[layer] for load in loads), strict=True)]
                for layer in report.expert_load
            }

    def _add(self, command: Add) -> None:
        """Send each prompt of a call to its engine."""
        shares: dict[int, dict[int, list[int]]] = {}
        num_samples = command.params.n if isinstance(command.params, SamplingParams) else 1
        for key, token_ids in command.prompts.items():
            route = self.router.choose(key, token_ids, command.cache_salt, num_samples)
            if route is None:
                self._held.append(replace(command, prompts={key: token_ids}))
                continue
            self._open[key] = route.engine, set(range(num_samples))
            shares.setdefault(route.engine, {})[key] = token_ids
        for rank, prompts in shares.items():
            self.members[rank].client.send(replace(command, prompts=prompts))

    def _abort(self, command: Abort) -> None:
        self._held = [add for add in self._held if command.key not in add.prompts]
        if command.key in self._open:
            self.members[self._open[command.key][0]].client.send(command)
            self._forget(command.key, command.index)

    def _forget(self, key: int, index: int | None = None) -> None:
        """Note the end of a sample, or of all samples of a prompt."""
        rank, samples = self._open.get(key, (0, set[int]()))
        ended = samples if index is None else samples & {index}
        if not ended:
            return
        self.router.ended(rank, len(ended))
        samples -= set(ended)
        if not samples:
            self.router.begun(key)
            del self._open[key]

    def _execute(self, verb: Verb) -> None:
        """Send a verb to all engines, or work to one of them. Those that start later get what lasts."""
        if isinstance(verb, Pause | Sleep):
            self._standing.append(verb)
        elif isinstance(verb, Resume | WakeUp):
            kept = Sleep if isinstance(verb, Resume) else Pause
            self._standing = [one for one in self._standing if type(one) is kept]
        up = {rank for rank, member in enumerate(self.members) if member.up}
        if isinstance(verb, Align):
            up = {*sorted(up)[verb.key % max(len(up), 1) :][:1]}
        self._answers[verb.key] = _Answer(set(up), [])
        for rank in up:
            self.members[rank].client.send(verb)
        if not up:
            error = EngineUnavailable("no engine runs at this moment; try again later", "engine_died")
            self._tell(Report(self.stats, 0, done={verb.key: error}))

    def _answered(self, rank: int, key: int, result: Answer) -> Sequence[Answer]:
        """Note an engine's answer to a verb; return the answer of all engines if it was the last one."""
        answer = self._answers.get(key)
        if answer is None:
            return ()
        answer.missing.discard(rank)
        if isinstance(result, PhonographError):
            answer.error = answer.error or result
        elif result is not None:
            answer.results.append(result)
        if answer.missing:
            return ()
        del self._answers[key]
        texts = [result for result in answer.results if isinstance(result, str)]
        return [answer.error or (", ".join(texts) or None if texts == answer.results else answer.results[0])]

    def _lose(self, rank: int, reason: str | None = None) -> None:
        """Fail the prompts of an engine that has ended, and start it again."""
        member = self.members[rank]
        if not member.up:
            return
        reason = f"engine {rank}: {reason or member.client.end()}"
        log.error("%s; it is started again", reason)
        lost = [key for key, (owner, _) in self._open.items() if owner == rank]
        for key in lost:
            del self._open[key]
            self.router.begun(key)
        self.router.remove(rank)
        member.up, member.stats, member.latest = False, member.idle, None
        error = EngineUnavailable(reason, "engine_died")
        done = {key: answer for key in list(self._answers) for answer in self._answered(rank, key, None)}
        self._tell(Report(self.stats, 0, refused=dict.fromkeys(lost, error), done=done))
        task = asyncio.create_task(self._restart(rank), name=f"engine-{rank}-restart")
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    def _tell(self, report: Report) -> None:
        self._merge(0, report)
        self._reports.put_nowait(report)

    async def _restart(self, rank: int) -> None:
        member = self.members[rank]
        self._close(member)
        try:
            member.client = self._start(rank)
            facts = await member.client.ready(no_progress)
        except PhonographError as error:
            self._reason = f"engine {rank} could not be started again: {error}"
            log.error("%s", self._reason)
            others = self._restarts - {asyncio.current_task()}
            if not others and not any(one.up for one in self.members) and self._callback is not None:
                self._callback()
            return
        member.stats = member.idle = facts.stats
        member.num_restarts += 1
        log.info("engine %d runs again", rank)
        for command in (self._begin, *self._standing):
            if command is not None:
                member.client.send(command)
        self.router.add(rank)
        self._serve(rank)
        held, self._held = self._held, []
        for command in held:
            self._add(command)

    @staticmethod
    def _close(member: Member) -> None:
        if member.receiver is not None:
            member.receiver.cancel()
        with suppress(ProcessLookupError):
            member.client.close_now()


def merged_stats(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """Return the sums of the statistics of engines."""
    drafts = [one.drafts for one in stats]
    positions = zip_longest(*(one.accepted_by_position for one in drafts), fillvalue=0)
    choices = sum((Counter(dict(one.choices)) for one in drafts), Counter[str]())
    counts = {
        one.name: sum(getattr(each, one.name) for each in stats)
        for one in fields(SchedulerStats)
        if one.name not in ("drafts", "checkpoints")
    }
    return SchedulerStats(
        **counts,
        drafts=DraftCounts(
            decodes=sum(one.decodes for one in drafts),
            verified=sum(one.verified for one in drafts),
            accepted=sum(one.accepted for one in drafts),
            accepted_by_position=tuple(map(sum, positions)),
            choices=tuple(choices.items()),
        ),
        checkpoints=CheckpointCounts(*map(sum, zip(*(one.checkpoints for one in stats), strict=True))),
    )


def _prefix_block_size(facts: EngineFacts) -> int:
    """Return the tokens of a block of the first full KV group, whose prefixes are compared."""
    sizes = [group.block_size for group in facts.kv_groups if group.window is None]
    return sizes[0] if sizes else facts.block_size
