"""A fleet of engines in simulated time: real schedulers, caches, dispatchers and the router, and steps that only last.

Each engine has a clock of its own. The engine with the earliest clock steps next; requests that arrive until then are
routed before. A step is computed at once, and what its engine says at its end reaches the router at that time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from phonograph.core.request import Request
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.build import make_scheduler
from phonograph.engine.core import EngineCore
from phonograph.engine.metrics.step_record import StepRecord
from phonograph.engine.offline.simulation.request_traces import TracedRequest
from phonograph.engine.offline.simulation.shared_keys import SharedKeys
from phonograph.engine.offline.simulation.simulated_steps import SimulatedClock, SimulatedStepRunner
from phonograph.engine.offline.simulation.step_times import StepTimes
from phonograph.engine.plan import EnginePlan
from phonograph.errors import ConfigError
from phonograph.graphs.dispatch import Dispatcher
from phonograph.scheduling.engine_router import EngineRouter, IndexChange, RouteReason, index_changes
from phonograph.scheduling.scheduler_stats import SchedulerStats

KV_SECONDS = 0.1
"""Length of the intervals for which the use of the KV cache is kept."""


@dataclass(slots=True)
class SimulatedAnswer:
    """Times of one request, in seconds since the start.

    Attributes:
        request: the traced request.
        engine: number of its engine.
        first_token: time of its first token.
        ended: time of its last token.
        num_cached: prompt tokens from the prefix cache.
        num_preemptions: times that it lost its blocks.
    """

    request: TracedRequest
    engine: int
    first_token: float = 0.0
    ended: float = 0.0
    num_cached: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class GraphUse:
    """Steps of one decision: their number, tokens without padding, padding, and seconds."""

    num_steps: int = 0
    num_tokens: int = 0
    num_padded: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class FleetResult:
    """Outcome of a simulation.

    Attributes:
        answers: requests in the order of their arrival.
        graphs: use of each graph by its label and tokens.
        kv_use: used fraction of the KV cache after the steps of each `KV_SECONDS`: sum, number and largest.
        stats: statistics of each engine at the end.
        routed: prompts by engine and reason.
        seconds: from the first arrival to the last token.
    """

    answers: list[SimulatedAnswer]
    graphs: dict[tuple[str, int], GraphUse] = field(default_factory=dict[tuple[str, int], GraphUse])
    kv_use: dict[int, tuple[float, int, float]] = field(default_factory=dict[int, tuple[float, int, float]])
    stats: list[SchedulerStats] = field(default_factory=list[SchedulerStats])
    routed: Counter[tuple[int, RouteReason]] = field(default_factory=Counter[tuple[int, RouteReason]])
    seconds: float = 0.0

    def note_use(self, moment: float, use: float, num_steps: int = 1) -> None:
        """Note the used fraction of an engine's KV cache after steps that end at a time."""
        interval = int(moment / KV_SECONDS)
        total, number, most = self.kv_use.get(interval, (0.0, 0, 0.0))
        self.kv_use[interval] = total + use * num_steps, number + num_steps, max(most, use)


@dataclass(slots=True)
class _News:
    """Report of an engine after a step."""

    engine: int
    stats: SchedulerStats
    changes: list[IndexChange]
    begun: list[int]
    ended: list[int]


class SimulatedEngine:
    """One engine, with its clock. Engines of equal plans share a dispatcher."""

    def __init__(
        self, plan: EnginePlan, dispatcher: Dispatcher, times: StepTimes, on_step: Callable[[StepRecord], None]
    ) -> None:
        self.clock = SimulatedClock()
        runner = SimulatedStepRunner(dispatcher, times, self.clock, steps_ahead(plan), SharedKeys(plan))
        self.core = EngineCore(make_scheduler(plan), runner, clock=self.clock)
        self.core.on_step = on_step


def steps_ahead(plan: EnginePlan) -> int:
    """Return the steps that an engine schedules before it reads the one in flight."""
    return 0 if plan.device.kind == "cpu" or plan.waits else 1


def check_trace(trace: Sequence[TracedRequest], context_len: int) -> None:
    """Check that each request of a trace fits the context.

    Raises:
        ConfigError: one does not.
    """
    for one in trace:
        if one.input_len + one.output_len > context_len:
            where = one.origin or f"request {one.number}"
            problem = f"has {one.input_len} and {one.output_len} tokens, and a request has {context_len} at most"
            raise ConfigError("trace", where, f"{problem}; a larger max_model_len or KV cache, or another trace works")


def simulate(
    plan: EnginePlan,
    times: StepTimes,
    trace: Sequence[TracedRequest],
    *,
    num_engines: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FleetResult:
    """Serve a trace with a fleet of equal engines.

    Args:
        plan: plan of each engine. With several, its configuration has a `data_parallel_size` above 1.
        times: times of steps.
        trace: requests by arrival.
        num_engines: number of engines.
        progress: called with the requests that have ended, and all.

    Raises:
        ConfigError: a request does not fit the context, or the plan speculates.
    """
    if plan.config.speculation is not None:
        problem = "is not simulated, because drafts are kept by what the model says; leave it out"
        raise ConfigError("speculative_config", plan.config.speculative_config, problem)
    return _Fleet(plan, times, trace, num_engines, progress).run()


class _Fleet:
    def __init__(
        self,
        plan: EnginePlan,
        times: StepTimes,
        trace: Sequence[TracedRequest],
        num_engines: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self._result = FleetResult([])
        dispatcher = plan.make_dispatcher()
        self._engines = [SimulatedEngine(plan, dispatcher, times, self._count) for _ in range(num_engines)]
        groups = plan.kv.groups
        self._group = next((index for index, group in enumerate(groups) if group.window is None), 0)
        self._router = EngineRouter(num_engines, groups[self._group].block_size)
        check_trace(trace, self._engines[0].core.scheduler.context_len)
        self._trace = trace
        self._progress = progress
        self._answers: dict[str, SimulatedAnswer] = {}
        self._params: dict[int, SamplingParams] = {}
        self._due: list[tuple[float, int, int]] = []  # clocks of engines with work
        self._news: list[tuple[float, int, _News]] = []
        self._order = count()
        self._num_ended = 0

    def run(self) -> FleetResult:
        arrivals = iter(self._trace)
        arriving = next(arrivals, None)
        while arriving is not None or self._due:
            until = self._due[0][0] if self._due else float("inf")
            if arriving is not None and arriving.arrival <= until:
                self._hear(arriving.arrival)
                self._arrive(arriving)
                arriving = next(arrivals, None)
            else:
                _, _, number = heapq.heappop(self._due)
                self._step(number)
        result = self._result
        result.stats = [engine.core.scheduler.stats for engine in self._engines]
        result.routed = self._router.counts
        result.seconds = max(answer.ended for answer in result.answers) - self._trace[0].arrival
        return result

    def _arrive(self, one: TracedRequest) -> None:
        """Give a request to an engine."""
        token_ids, number = one.token_ids(), 0
        if len(self._engines) > 1:
            route = self._router.choose(one.number, token_ids)
            assert route is not None, "engines do not end here"
            number = route.engine
        params = self._params.get(one.output_len)
        if params is None:
            params = SamplingParams(max_tokens=one.output_len, ignore_eos=True, detokenize=False)
            self._params[one.output_len] = params
        engine, name = self._engines[number], str(one.number)
        request = Request(request_id=name, prompt_token_ids=token_ids, params=params, arrival=one.arrival)
        self._answers[name] = SimulatedAnswer(one, number)
        self._result.answers.append(self._answers[name])
        if not engine.core.has_work:
            engine.clock.now = max(engine.clock.now, one.arrival)
            heapq.heappush(self._due, (engine.clock.now, next(self._order), number))
        engine.core.scheduler.add(request)

    def _step(self, number: int) -> None:
        """Run a step of one engine, and note what it says at the end."""
        engine = self._engines[number]
        scheduler, clock = engine.core.scheduler, engine.clock
        begun: list[int] = []
        ended: list[int] = []
        for request in engine.core.step():
            answer = self._answers[request.request_id]
            if len(request.output_token_ids) == 1:
                answer.first_token = clock.now
                answer.num_cached = request.num_cached_tokens
                begun.append(answer.request.number)
            if request.finished:
                answer.ended = clock.now
                answer.num_preemptions = request.num_preemptions
                ended.append(answer.request.number)
                del self._answers[request.request_id]
                self._num_ended += 1
                self._progress(self._num_ended, len(self._trace))
        engine.core.settle()
        stats = scheduler.stats
        self._result.note_use(clock.now, stats.blocks_used / stats.num_blocks)
        if scheduler.events is not None:
            changes = index_changes(scheduler.events.take(), self._group)
            news = _News(number, stats, changes, begun, ended)
            heapq.heappush(self._news, (clock.now, next(self._order), news))
        if engine.core.has_work:
            heapq.heappush(self._due, (clock.now, next(self._order), number))

    def _hear(self, moment: float) -> None:
        """Tell the router what engines have said until a moment."""
        while self._news and self._news[0][0] <= moment:
            _, _, news = heapq.heappop(self._news)
            self._router.changed(news.engine, news.changes)
            self._router.loaded(news.engine, news.stats)
            for key in news.begun:
                self._router.begun(key)
            self._router.ended(news.engine, len(news.ended))

    def _count(self, record: StepRecord) -> None:
        use = self._result.graphs.setdefault((record.graph, record.graph_tokens), GraphUse())
        use.num_steps += 1
        use.num_tokens += record.num_tokens
        use.num_padded += record.graph_tokens - record.num_tokens
        use.seconds += record.seconds


def several(plan: EnginePlan, num_engines: int) -> EnginePlan:
    """Return a plan whose engines tell a router about their caches."""
    config = plan.config.model_copy(update={"data_parallel_size": min(num_engines, 2)})
    return replace(plan, config=config)
