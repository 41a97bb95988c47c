"""Random request streams through the scheduler and a simulated runner that believes nothing but the batches.

The runner keeps its rows from ScheduledBatch alone. Its keys and values are, as real ones are, a function of all the
tokens up to their position; what it samples is a function of the keys and values it read. So whatever is wrongly
shared, overwritten, forgotten or computed in the wrong place shows, at the latest in the output, which must be that of
the request run alone.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from invariants import check_scheduler
from scheduling import make_scheduler

from phonograph.core.batch import NewSequence, ScheduledBatch, StepOutput, TokenLogprobs
from phonograph.core.request import Request, RequestState
from phonograph.core.sampling_params import SamplingParams
from phonograph.scheduling.scheduler import Scheduler

VOCAB = 7
EOS = 0


def next_history(history: int, token_id: int) -> int:
    return hash((history, token_id))


def next_token(histories: list[int], sample_index: int) -> int:
    """Depends on all that is attended to and on the request's own sample index."""
    return (hash((tuple(histories), sample_index)) >> 11) % VOCAB


def histories_of(token_ids: list[int]) -> list[int]:
    histories: list[int] = []
    for token_id in token_ids:
        histories.append(next_history(histories[-1] if histories else 1, token_id))
    return histories


def run_alone(request: Request, context_len: int) -> tuple[list[int], str, int | None]:
    """Output, finish and stop reason by the rules of SamplingParams, without blocks, batches or slots."""
    params = request.params
    histories = histories_of(request.prompt_token_ids)
    output: list[int] = []
    while True:
        token_id = next_token(histories, request.sample_index)
        output.append(token_id)
        histories.append(next_history(histories[-1], token_id))
        if len(output) >= params.min_tokens:
            if token_id in params.stop_token_ids:
                return output, "stop", token_id
            if token_id == EOS and not params.ignore_eos:
                return output, "stop", None
        if len(output) == params.max_tokens or request.prompt_len + len(output) == context_len:
            return output, "length", None


@dataclass
class Row:
    token_ids: list[int]
    histories: list[int]
    prompt_len: int
    computed: int
    params: SamplingParams
    sample_index: int
    blocks: list[int] = field(default_factory=list)


class SimulatedRunner:
    def __init__(self, scheduler: Scheduler) -> None:
        self.limits = scheduler.limits
        self.block_size = scheduler.block_size
        self.num_blocks = scheduler.num_blocks
        self.rows: dict[int, Row] = {}
        self.kv: dict[tuple[int, int], int] = {}

    def run(self, batch: ScheduledBatch) -> StepOutput:
        for slot in batch.freed:
            del self.rows[slot]
        for sequence in batch.new:
            self.load(sequence)
        for append in batch.appends:
            row = self.rows[append.slot]
            assert append.start == len(row.blocks)
            assert all(0 <= block_id < self.num_blocks for block_id in append.block_ids)
            row.blocks.extend(append.block_ids)
        self.check_shape(batch)
        new_slots = {sequence.slot for sequence in batch.new}
        written: set[tuple[int, int]] = set()
        for slot, query_len, context in zip(batch.slots, batch.query_lens, batch.context_lens, strict=True):
            row = self.rows[slot]
            assert context == row.computed, "the batch and the runner disagree on what is computed"
            for position in range(context, context + query_len):
                place = self.place(row, position)
                assert place not in written, "written by two sequences in one step"
                written.add(place)
                self.check_unread(slot, place, new_slots)
                self.kv[place] = row.histories[position]
            row.computed += query_len
        output = StepOutput()
        for slot, query_len, context, samples in zip(
            batch.slots, batch.query_lens, batch.context_lens, batch.samples, strict=True
        ):
            self.attend(output, slot, context, query_len, samples)
        return output

    def load(self, sequence: NewSequence) -> None:
        assert sequence.slot not in self.rows and 0 <= sequence.slot < self.limits.max_num_seqs
        self.rows[sequence.slot] = Row(
            token_ids=list(sequence.token_ids),
            histories=histories_of(sequence.token_ids),
            prompt_len=sequence.prompt_len,
            computed=sequence.num_computed,
            params=sequence.params,
            sample_index=sequence.sample_index,
        )

    def place(self, row: Row, position: int) -> tuple[int, int]:
        return row.blocks[position // self.block_size], position % self.block_size

    def check_shape(self, batch: ScheduledBatch) -> None:
        assert batch.slots and len(set(batch.slots)) == batch.num_reqs <= self.limits.max_num_seqs
        assert sum(batch.query_lens) == batch.num_tokens <= self.limits.max_num_batched_tokens
        assert all(query_len == 1 for query_len in batch.query_lens[: batch.num_decodes])
        assert all(query_len > 1 for query_len in batch.query_lens[batch.num_decodes :])

    def check_unread(self, writer: int, place: tuple[int, int], new_slots: set[int]) -> None:
        """Check that no other sequence has computed `place`; a new one may have found it in the cache."""
        block_id, offset = place
        for slot, row in self.rows.items():
            if slot != writer and slot not in new_slots and block_id in row.blocks:
                position = row.blocks.index(block_id) * self.block_size + offset
                assert position >= row.computed, f"slot {writer} writes what slot {slot} reads"

    def attend(self, output: StepOutput, slot: int, context: int, query_len: int, samples: bool) -> None:
        row = self.rows[slot]
        end = context + query_len
        seen = [self.kv[self.place(row, position)] for position in range(end)]
        assert seen == row.histories[:end], "attended to keys and values of something else"
        assert samples == (end == len(row.token_ids))
        if row.params.prompt_logprobs is not None and context < row.prompt_len - 1:
            positions = range(context + 1, min(end + 1, row.prompt_len))
            output.prompt_logprobs[slot] = [marked(row.token_ids[position], position) for position in positions]
        if samples:
            token_id = next_token(seen, row.sample_index)
            output.slots.append(slot)
            output.token_ids.append(token_id)
            if row.params.logprobs is not None:
                output.logprobs[slot] = marked(token_id, len(row.token_ids))
            row.token_ids.append(token_id)
            row.histories.append(next_history(row.histories[-1], token_id))


def marked(token_id: int, position: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids=[token_id], logprobs=[-0.5], ranks=[position])


class Engine:
    """Scheduler and runner with up to `depth` steps in flight, and what must hold at every step."""

    def __init__(self, sizes: dict[str, Any], depth: int) -> None:
        self.depth = depth
        self.scheduler = make_scheduler(**sizes)
        self.runner = SimulatedRunner(self.scheduler)
        self.requests: list[Request] = []
        self.in_flight: deque[tuple[ScheduledBatch, StepOutput]] = deque()

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests.append(request)

    def live(self) -> list[Request]:
        return [request for request in self.requests if not request.finished]

    def schedule(self) -> bool:
        running = [request for request in self.requests if request.state is RequestState.RUNNING]
        best = min(running, key=lambda request: request.rank, default=None)
        before = best.num_computed if best else 0
        batch = self.scheduler.schedule()
        if best:
            # What "every request ends" rests on.
            last_in_flight = best.state is RequestState.ENDING and before == best.max_len - 1
            progress = best.state is RequestState.RUNNING and best.num_computed > before
            assert progress or last_in_flight, "the best-ranked sequence makes no progress"
        if batch.slots:
            self.in_flight.append((batch, self.runner.run(batch)))
        else:
            assert self.in_flight or not self.live(), "nothing runs although requests wait"
        self.check()
        return bool(batch.slots)

    def update(self) -> None:
        batch, output = self.in_flight.popleft()
        before = {id(request): len(request.output_token_ids) for request in self.requests}
        news = self.scheduler.update(batch, output)
        grown = [request for request in self.requests if len(request.output_token_ids) > before[id(request)]]
        assert {id(request) for request in news} == {id(request) for request in grown}
        self.check()

    def check(self) -> None:
        check_scheduler(self.scheduler)
        stats = self.scheduler.stats
        assert stats.num_running + stats.num_waiting == len(self.live())
        assert self.scheduler.has_unfinished == bool(self.live())

    def drain(self) -> None:
        steps_allowed = 10 + (1 + len(self.live())) * sum(request.max_len for request in self.live())
        while self.live() or self.in_flight:
            if len(self.in_flight) == self.depth or not self.schedule():
                self.update()
            steps_allowed -= 1
            assert steps_allowed, "requests do not end"
        assert self.scheduler.stats.blocks_used == 0

    def check_outputs(self) -> None:
        for request in self.requests:
            output, reason, stop_reason = run_alone(request, self.scheduler.context_len)
            if request.finish_reason == "abort" or request.stop_reason == "stop string":
                assert request.output_token_ids == output[: len(request.output_token_ids)]
            else:
                got = (request.output_token_ids, request.finish_reason, request.stop_reason)
                assert got == (output, reason, stop_reason)
                if request.params.prompt_logprobs is not None:
                    expected = [marked(request.prompt_token_ids[p], p) for p in range(1, request.prompt_len)]
                    assert request.prompt_logprobs == expected
            if request.params.logprobs is not None:
                start = request.prompt_len
                assert request.logprobs == [marked(t, start + i) for i, t in enumerate(request.output_token_ids)]


@st.composite
def sizes_of(draw: st.DrawFn) -> dict[str, Any]:
    """From a pool too small for one context, up to one for two of them: mostly short of blocks."""
    max_num_seqs = draw(st.sampled_from([4, 5, 3, 2, 1]))
    max_model_len = draw(st.sampled_from([30, 40, 20, 7, 2]))
    block_size = draw(st.integers(1, 4))
    return dict(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 25)),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=max(1, int(draw(st.sampled_from([1.0, 1.3, 2.0, 0.5, 0.1])) * max_model_len / block_size)),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
    )


@st.composite
def params_of(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.sampled_from([None, 20, 11, 4, 1]))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(max_tokens or 4, 4))),
        ignore_eos=draw(st.sampled_from([True, True, False])),
        stop_token_ids=draw(st.sampled_from([(), (), (EOS,), (3, VOCAB)])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        logprobs=draw(st.sampled_from([None, 0])),
    )


@dataclass
class Arrival:
    """Some samples of one prompt; `late` ones arrived before those that were added just before them."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    copies: int
    late: bool


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    seed, shared_len = draw(st.integers(0, 1)), draw(st.sampled_from([8, 4, 13, 20, 0]))
    shared = [(seed + position * position) % VOCAB for position in range(shared_len)]
    return Arrival(
        prompt=shared + draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)),
        params=draw(params_of()),
        priority=draw(st.integers(-1, 1)),
        copies=draw(st.sampled_from([3, 2, 5, 1])),
        late=draw(st.booleans()),
    )


class Streams(RuleBasedStateMachine):
    @initialize(sizes=sizes_of(), depth=st.sampled_from([1, 2, 2, 3]), first=st.lists(arrivals(), min_size=2))
    def start(self, sizes: dict[str, Any], depth: int, first: list[Arrival]) -> None:
        self.engine = Engine(sizes, depth)
        for arrival in first:
            self.add(arrival)

    @rule(arrival=arrivals())
    def arrive(self, arrival: Arrival) -> None:
        self.add(arrival)

    def add(self, arrival: Arrival) -> None:
        prompt = arrival.prompt[: self.engine.scheduler.context_len - 1] or [1]
        for index in range(arrival.copies):
            number = len(self.engine.requests)
            self.engine.add(
                Request(
                    request_id=f"r{number}",
                    prompt_token_ids=list(prompt),
                    params=arrival.params,
                    priority=arrival.priority,
                    arrival=number - 2.5 if arrival.late else number,
                    eos_token_ids=(EOS,),
                    sample_index=index,
                )
            )

    @rule(times=st.sampled_from([9, 5, 2, 1]))
    def schedule(self, times: int) -> None:
        for _ in range(times):
            if len(self.engine.in_flight) == self.engine.depth:
                self.engine.update()
            self.engine.schedule()

    @rule(reset_prefix_cache=st.sampled_from([True, False, False, False]))
    def update(self, reset_prefix_cache: bool) -> None:
        if reset_prefix_cache:
            self.engine.scheduler.reset_prefix_cache()
        if self.engine.in_flight:
            self.engine.update()

    @rule(which=st.integers(0, 99), by_stop_string=st.booleans())
    def end(self, which: int, by_stop_string: bool) -> None:
        live = self.engine.live()
        if not live:
            return
        request = live[which % len(live)]
        if by_stop_string:
            assert self.engine.scheduler.finish(request.request_id, "stop", "stop string")
        else:
            assert self.engine.scheduler.abort(request.request_id)
        assert request.finished and not self.engine.scheduler.abort(request.request_id)

    @invariant()
    def holds(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()
            self.engine.check_outputs()
            stats = self.engine.scheduler.stats
            event(f"preempted: {stats.num_preemptions > 0}, prefix hits: {stats.prefix_hits > 0}")


TestStreams = Streams.TestCase
TestStreams.settings = settings(
    max_examples=120, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_long_stream_under_pressure(depth: int, enable_prefix_caching: bool, policy: str) -> None:
    """Many requests, few blocks: preemption, eviction and sharing all happen, and no output notices."""
    rng = random.Random(f"{depth} {enable_prefix_caching} {policy}")
    sizes = dict(
        max_num_seqs=8,
        max_num_batched_tokens=20,
        max_model_len=60,
        block_size=4,
        num_blocks=36,
        enable_prefix_caching=enable_prefix_caching,
        policy=policy,
    )
    engine = Engine(sizes, depth)
    prefixes = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(3)]
    for number in range(80):
        prompt = rng.choice(prefixes)[: rng.randrange(25)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
        request = Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            params=SamplingParams(
                max_tokens=rng.randrange(1, 40),
                ignore_eos=rng.random() < 0.7,
                prompt_logprobs=rng.choice([None, None, 0]),
                logprobs=0,
            ),
            priority=rng.randrange(3),
            arrival=number,
            eos_token_ids=[EOS],
            sample_index=number % 2,
        )
        engine.add(request)
        for _ in range(rng.randrange(5)):
            if len(engine.in_flight) == depth:
                engine.update()
            engine.schedule()
        if rng.random() < 0.1:
            assert engine.scheduler.abort(rng.choice(engine.live()).request_id)
    engine.drain()
    engine.check_outputs()
    stats = engine.scheduler.stats
    assert stats.num_preemptions > 0
    assert (stats.prefix_hits > 0) == enable_prefix_caching
