"""A fleet in simulated time whose engines make many decode steps at once, for fleets of thousands.

Scheduler, cache and router are imitated here: decodes run until one of them ends or a prompt arrives, at the time of a
step in the middle; prompts are computed in chunks beside the decodes; a prompt goes to the engine with the fewest
requests, then with the emptiest cache. Prefixes are not shared, and a request whose prompt has blocks always gets those
of its answer.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from math import ceil
from typing import NamedTuple

from phonograph.engine.offline.simulation.fleet import FleetResult, GraphUse, SimulatedAnswer, check_trace, steps_ahead
from phonograph.engine.offline.simulation.request_traces import TracedRequest
from phonograph.engine.offline.simulation.step_times import StepTimes, StepWork
from phonograph.engine.plan import EnginePlan
from phonograph.errors import ConfigError
from phonograph.graphs.dispatch import Decision, StepShape


class _Run(NamedTuple):
    """Steps of an engine that are equal but for their contexts.

    begins, seconds: time of the first one, and of each
    num_steps: number of steps
    decision: graph of each
    num_tokens: tokens of each, without padding
    ready: requests whose prompts are complete at the end
    """

    begins: float
    seconds: float
    num_steps: int
    decision: Decision
    num_tokens: int
    ready: Sequence[SimulatedAnswer] = ()


class _CoarseEngine:
    """State of one engine.

    decodes: requests that decode, by the step at whose end they have all tokens
    steps: steps that were made
    cached: tokens of the prompts that its cache is taken to have
    keys: tokens of their contexts together
    waiting: requests that wait, or whose prompt is in progress
    computed: computed tokens of the prompt of the first of these
    run: steps in progress
    scheduled: time at which the next step was scheduled, from which on requests do not join it
    version: number of changes of `run`
    """

    __slots__ = (
        "cached",
        "computed",
        "decodes",
        "keys",
        "now",
        "num_open",
        "run",
        "scheduled",
        "steps",
        "version",
        "waiting",
    )

    def __init__(self) -> None:
        self.now = self.scheduled = 0.0
        self.decodes: list[tuple[int, int, SimulatedAnswer]] = []
        self.steps = self.keys = self.cached = self.computed = self.num_open = self.version = 0
        self.waiting: deque[SimulatedAnswer] = deque()
        self.run: _Run | None = None


def simulate_coarsely(
    plan: EnginePlan,
    times: StepTimes,
    trace: Sequence[TracedRequest],
    *,
    num_engines: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FleetResult:
    """Serve a trace as `simulate` does, about.

    Raises:
        ConfigError: a request does not fit the context, or shares prefixes.
    """
    return _CoarseFleet(plan, times, trace, num_engines, progress).serve()


class _CoarseFleet:
    def __init__(
        self,
        plan: EnginePlan,
        times: StepTimes,
        trace: Sequence[TracedRequest],
        num_engines: int,
        progress: Callable[[int, int], None],
    ) -> None:
        shared = next((one for one in trace if one.hash_ids), None)
        if shared is not None:
            problem = "has hash_ids, and --coarse shares no prefixes; leave one of them out"
            raise ConfigError("trace", shared.origin or shared.number, problem)
        self._limits, self._times, self._trace, self._progress = plan.limits, times, trace, progress
        self._capacity = plan.memory.num_tokens
        check_trace(trace, min(plan.limits.max_model_len, self._capacity))
        self._dispatcher = plan.make_dispatcher()
        self._lookahead = steps_ahead(plan)
        self._engines = [_CoarseEngine() for _ in range(num_engines)]
        # Open requests and cached tokens when they were noted.
        self._least = [(0, 0, number) for number in range(num_engines)]
        self._due: list[tuple[float, int, int, int]] = []
        self._order = count()
        self._result = FleetResult([])
        self._num_ended = 0

    def serve(self) -> FleetResult:
        arrivals = iter(self._trace)
        arriving = next(arrivals, None)
        while arriving is not None or self._due:
            if arriving is not None and (not self._due or arriving.arrival <= self._due[0][0]):
                self._arrive(arriving)
                arriving = next(arrivals, None)
                continue
            moment, _, number, version = heapq.heappop(self._due)
            engine = self._engines[number]
            if version == engine.version:
                self._end_run(number, moment)
        self._result.seconds = max(one.ended for one in self._result.answers) - self._trace[0].arrival
        return self._result

    def _arrive(self, request: TracedRequest) -> None:
        """Give a request to the engine with the fewest, and end the decodes there at the next step."""
        if len(self._least) > 4 * len(self._engines):
            self._least = sorted(self._load(number) for number in range(len(self._engines)))
        while (load := self._load(self._least[0][2])) != self._least[0]:
            heapq.heapreplace(self._least, load)
        number = load[2]
        engine = self._engines[number]
        engine.num_open += 1
        engine.cached = min(engine.cached + request.input_len, self._capacity)
        heapq.heapreplace(self._least, self._load(number))
        answer = SimulatedAnswer(request, number)
        self._result.answers.append(answer)
        engine.waiting.append(answer)
        run = engine.run
        if run is None:
            engine.now = engine.scheduled = max(engine.now, request.arrival)
            self._begin_run(number)
        elif run.num_steps > 1:
            num_steps = max(1, ceil((request.arrival - run.begins) / run.seconds)) + self._lookahead
            if num_steps < run.num_steps:
                self._start(number, run._replace(num_steps=num_steps))

    def _load(self, number: int) -> tuple[int, int, int]:
        """Return what an engine is chosen by: open requests, then cached tokens."""
        engine = self._engines[number]
        return engine.num_open, engine.cached, number

    def _begin_run(self, number: int) -> None:
        """Start the next steps of an engine, if it has work."""
        engine = self._engines[number]
        num_decodes = len(engine.decodes)
        budget = self._limits.max_num_batched_tokens - num_decodes
        held, num_reqs, pairs, num_tokens = engine.keys, num_decodes, 0, num_decodes
        ready: list[SimulatedAnswer] = []
        scheduled = engine.scheduled if num_decodes else engine.now
        comes_later = False
        # The prompts that fit the step, the last one in part.
        for answer in engine.waiting:
            if answer.request.arrival > scheduled:
                comes_later = True
                break
            computed = engine.computed if not ready else 0
            input_len = answer.request.input_len
            fits = held + input_len + answer.request.output_len <= self._capacity
            if not budget or num_reqs == self._limits.max_num_seqs or not (fits or computed or not num_reqs):
                break
            chunk = min(budget, input_len - computed)
            pairs += chunk * computed + chunk * (chunk + 1) // 2
            budget, num_tokens, num_reqs, held = budget - chunk, num_tokens + chunk, num_reqs + 1, held + input_len
            if computed + chunk < input_len:
                engine.computed = computed + chunk
                break
            engine.computed = 0
            ready.append(answer)
        if not num_reqs:
            engine.run = None
            return
        is_decode = num_tokens == num_decodes
        shape = StepShape(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            decode_query_len=1 if is_decode or num_tokens == num_reqs else None,
            num_logits=num_reqs,
            makes_drafts=False,
        )
        decision = self._dispatcher.decide(shape)
        num_steps = engine.decodes[0][0] - engine.steps if is_decode and not comes_later else 1
        keys = engine.keys + num_decodes * (num_steps + 1) // 2
        graph = "eager" if decision.key is None else f"{decision.label} {decision.num_tokens}"
        seconds = self._times.seconds(StepWork(graph, decision.num_tokens, num_reqs, keys, pairs))
        host = self._times.host_seconds(num_reqs)
        seconds = seconds + host if not self._lookahead else max(seconds, host)
        self._start(number, _Run(engine.now, seconds, num_steps, decision, num_tokens, ready))

    def _start(self, number: int, run: _Run) -> None:
        engine = self._engines[number]
        engine.run = run
        engine.version += 1
        ends = run.begins + run.num_steps * run.seconds
        heapq.heappush(self._due, (ends, next(self._order), number, engine.version))

    def _end_run(self, number: int, moment: float) -> None:
        """Note the tokens of the steps in progress, and start the next ones."""
        engine = self._engines[number]
        run = engine.run
        assert run is not None, "steps of this version are in progress"
        engine.now = moment
        engine.scheduled = moment - run.seconds if self._lookahead else moment
        engine.steps += run.num_steps
        engine.keys += run.num_steps * len(engine.decodes)
        self._result.note_use(moment, engine.keys / self._capacity, run.num_steps)
        use = self._result.graphs.setdefault((run.decision.label, run.decision.num_tokens), GraphUse())
        use.num_steps += run.num_steps
        use.num_tokens += run.num_steps * run.num_tokens
        use.num_padded += run.num_steps * (run.decision.num_tokens - run.num_tokens)
        use.seconds += run.num_steps * run.seconds
        for answer in run.ready:
            engine.waiting.popleft()
            answer.first_token = moment
            engine.keys += answer.request.input_len
            ends = engine.steps + answer.request.output_len - 1
            heapq.heappush(engine.decodes, (ends, next(self._order), answer))
        while engine.decodes and engine.decodes[0][0] <= engine.steps:
            _, _, answer = heapq.heappop(engine.decodes)
            answer.ended = moment
            engine.keys -= answer.request.input_len + answer.request.output_len - 1
            engine.num_open -= 1
            heapq.heappush(self._least, self._load(number))
            self._num_ended += 1
            self._progress(self._num_ended, len(self._trace))
        self._begin_run(number)
