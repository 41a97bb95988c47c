"""Random request streams through the scheduler and a simulated runner, with one to four KV groups.

A step accepts one to eight tokens of each decode. Each output must be that of the request run alone. Each page that a
step reads must hold what the sequence wrote there.
"""

from __future__ import annotations
import __future__

import inspect
import random
import struct
import textwrap
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from invariants import check_scheduler
from scheduling import full_group, make_scheduler, sliding_group
from simulated_runner import VOCAB, SimulatedRunner, histories_of, marked, next_history, next_token

from phonograph.core.batch import DraftCounts, ScheduledBatch, SlotFailure, StepOutput
from phonograph.core.blocks import pages_for_request
from phonograph.core.kv_group import KVGroup
from phonograph.core.request import Request, RequestState
from phonograph.core.sampling_params import SamplingParams
from phonograph.kv_cache.groups import SlidingGroup
from phonograph.kv_cache.manager import CacheManager
from phonograph.kv_cache.tables import SequenceTable
from phonograph.scheduling import prompt_tails
from phonograph.scheduling import scheduler as scheduler_module
from phonograph.scheduling.prompt_tails import PromptTails
from phonograph.scheduling.request_blocks import RequestBlocks
from phonograph.scheduling.scheduler import Scheduler

EOS = 0


@pytest.fixture(autouse=True)
def waits_for_short_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_tails, "WORTH_A_STEP", 4)


def run_alone(request: Request, context_len: int, windows: Sequence[int | None]) -> tuple[list[int], str, int | None]:
    """Output, finish and stop reason by the rules of SamplingParams, without blocks, batches or slots."""
    params = request.params
    histories = histories_of(request.prompt_token_ids, request.cache_salt)
    output: list[int] = []
    while True:
        token_id = next_token(histories, windows, request.sample_index)
        output.append(token_id)
        histories.append(next_history(histories[-1], token_id))
        if len(output) >= params.min_tokens:
            if token_id in params.stop_token_ids:
                return output, "stop", token_id
            if token_id == EOS and not params.ignore_eos:
                return output, "stop", None
        if len(output) == params.max_tokens or request.prompt_len + len(output) == context_len:
            return output, "length", None


class RandomDepths:
    """Drafts of each decode: none, the most, or a random number, for some steps each."""

    def __init__(self, most: int, seed: int) -> None:
        self.most, self.caches, self.counts, self.waits = most, None, DraftCounts(), False
        self.rng = random.Random(seed)
        self.num_drafts = 0

    def choose(self, decodes: Collection[Request]) -> list[int]:
        low, high = self.rng.choice([(0, 0), (self.most, self.most), (0, self.most), (0, self.most)])
        return [self.rng.randint(low, high) for _ in decodes]


class Engine:
    """Scheduler and runner with up to `depth` steps submitted, and what must hold at every step."""

    def __init__(self, sizes: dict[str, Any], depth: int, *, most_drafts: int = 0, seed: int = 0) -> None:
        self.depth = depth
        self.drafts = RandomDepths(most_drafts, seed) if most_drafts else None
        self.scheduler = make_scheduler(drafts=self.drafts, **sizes)
        self.runner = SimulatedRunner(self.scheduler, seed)
        self.requests: list[Request] = []
        self._live: list[Request] = []
        self.in_flight: deque[tuple[ScheduledBatch, StepOutput]] = deque()

    def add(self, request: Request) -> None:
        self.runner.salts[request.request_id] = request.cache_salt
        self.scheduler.add(request)
        self.requests.append(request)
        self._live.append(request)

    def live(self) -> list[Request]:
        """Return the requests that have not finished, which none does twice."""
        self._live = [request for request in self._live if not request.finished]
        return self._live

    def schedule(self) -> bool:
        running = [request for request in self.live() if request.state is RequestState.RUNNING]
        best = min(running, key=lambda request: request.rank, default=None)
        before = best.min_computed if best else 0
        batch = self.scheduler.schedule()
        if best:
            # What "every request ends" rests on.
            last_in_flight = best.state is RequestState.ENDING and before >= best.max_len - 1
            progress = best.state is RequestState.RUNNING and best.min_computed > before
            assert progress or last_in_flight, "the best-ranked sequence makes no progress"
        if batch.slots:
            if self.drafts is not None:
                self.drafts.num_drafts += batch.num_decode_tokens - batch.num_decodes
            self.in_flight.append((batch, self.runner.run(batch)))
        else:
            assert self.in_flight or not self.live(), "nothing runs although requests wait"
        self.check()
        return bool(batch.slots)

    def update(self) -> None:
        batch, output = self.in_flight.popleft()
        before = [(request, len(request.output_token_ids)) for request in self.requests]
        news = self.scheduler.update(batch, output)
        grown = [request for request, length in before if len(request.output_token_ids) > length]
        failed = [request for request in news if request.failure]
        assert {id(request) for request in news} == {id(request) for request in grown + failed}
        self.check()

    def check(self) -> None:
        check_scheduler(self.scheduler)
        stats, num_live = self.scheduler.stats, len(self.live())
        assert stats.num_running + stats.num_waiting == num_live
        assert self.scheduler.has_unfinished == bool(num_live)
        self.check_bounds()

    def check_bounds(self) -> None:
        """Compare the bounds with the steps in flight, and with the runner, which runs a step when it is scheduled."""
        for slot, request in self.scheduler._decoding.items():
            fewest = most = request.num_tokens - 1
            for batch, requests in self.scheduler._in_flight:
                place = requests.index(request) if request in requests else -1
                if place >= 0 and batch.samples[place]:
                    fewest += 1
                    most += batch.query_lens[place] if place < batch.num_decodes else 1
            bounds = (request.min_computed, request.max_computed)
            assert bounds == (min(fewest, request.max_len - 1), most), "bounds of other steps"
            computed = self.runner.rows[slot].computed
            assert bounds[0] <= computed <= bounds[1], "bounds that do not hold"

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
            output, reason, stop_reason = run_alone(request, self.scheduler.context_len, self.runner.windows)
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
def groups_of(draw: st.DrawFn) -> list[KVGroup]:
    """One to four groups; windows are shorter and longer than blocks, chunks and prompts."""
    size = draw(st.integers(1, 4))
    kinds = draw(st.lists(st.sampled_from([None, 1, 2, 3, 5, 8, 13, 30]), max_size=3))
    factors = st.sampled_from([1, 1, 2, 3])
    first = draw(st.sampled_from([None, None, 4]))
    return [
        sliding_group(window, size * draw(factors)) if window else full_group(size * draw(factors))
        for window in (first, *kinds)
    ]


@st.composite
def sizes_of(draw: st.DrawFn) -> dict[str, Any]:
    """From a pool too small for one context, up to one for two of them: mostly short of blocks."""
    max_num_seqs = draw(st.sampled_from([4, 5, 3, 2, 1]))
    max_model_len = draw(st.sampled_from([30, 40, 20, 60, 7, 2]))
    groups = draw(groups_of())
    longest_chunk = max_num_seqs + draw(st.sampled_from([8, 1, 0, 3, 25, 40]))
    pages = pages_for_request(groups, max_model_len, longest_chunk)
    return dict(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=longest_chunk,
        max_model_len=max_model_len,
        groups=groups,
        num_blocks=max(len(groups), int(draw(st.sampled_from([1.0, 1.3, 2.0, 0.7, 0.1])) * pages)),
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
    salt: str | None


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    seed, shared_len = draw(st.integers(0, 1)), draw(st.sampled_from([8, 4, 13, 20, 30, 0]))
    shared = [(seed + position * position) % VOCAB for position in range(shared_len)]
    return Arrival(
        prompt=shared + draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)),
        params=draw(params_of()),
        priority=draw(st.integers(-1, 1)),
        copies=draw(st.sampled_from([3, 2, 5, 1])),
        late=draw(st.booleans()),
        salt=draw(st.sampled_from([None, None, "a"])),
    )


class Streams(RuleBasedStateMachine):
    @initialize(
        sizes=sizes_of(),
        depth=st.sampled_from([1, 2, 2, 3]),
        most_drafts=st.sampled_from([7, 3, 1, 0]),
        seed=st.integers(0, 999),
        first=st.lists(arrivals(), min_size=2),
    )
    def start(self, sizes: dict[str, Any], depth: int, most_drafts: int, seed: int, first: list[Arrival]) -> None:
        self.engine = Engine(sizes, depth, most_drafts=most_drafts, seed=seed)
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
                    cache_salt=arrival.salt,
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

    @rule(which=st.integers(0, 99))
    def fail(self, which: int) -> None:
        """A step reports a failure of one of its sequences."""
        if not self.engine.in_flight:
            return
        batch, output = self.engine.in_flight[0]
        slot = batch.slots[which % len(batch.slots)]
        output.failures[slot] = SlotFailure("sampling", "a test")
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
            num_drafts = self.engine.drafts.num_drafts if self.engine.drafts else 0
            event(f"preempted: {stats.num_preemptions > 0}, found: {stats.prefix_hits > 0}, drafts: {num_drafts > 0}")
            event(f"copied: {self.engine.runner.num_copied > 0}")


TestStreams = Streams.TestCase
TestStreams.settings = settings(
    max_examples=70, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


ONE = [full_group()]
MIXED = [full_group(), sliding_group(40), sliding_group(3, 8), sliding_group(1, 2)]
SAME_SIZES = [full_group(), sliding_group(5), sliding_group(20)]
SLIDING = [sliding_group(30), sliding_group(50)]


def long_stream(
    groups: list[KVGroup],
    num_blocks: int,
    *,
    depth: int = 2,
    seed: str = "",
    budget: int = 20,
    most_drafts: int = 0,
    most_samples: int = 1,
    **changes: Any,
) -> Engine:
    """Run many requests with few blocks: preemption, eviction and sharing all happen, and no output notices."""
    rng = random.Random(f"{depth} {seed}")
    sizes = dict(
        max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=60, groups=groups, num_blocks=num_blocks, **changes
    )
    engine = Engine(sizes, depth, most_drafts=most_drafts, seed=rng.randrange(1000))
    prefixes = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(3)]
    for number in range(80):
        prompt = rng.choice(prefixes)[: rng.randrange(25)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
        request = Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            params=SamplingParams(
                max_tokens=(max_tokens := rng.randrange(1, 40)),
                min_tokens=max_tokens // 2 if most_drafts and number % 3 == 0 else 0,
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
        for index in range(1, rng.randint(1, most_samples) if most_samples > 1 else 1):
            fresh: dict[str, Any] = {name: [] for name in ("output_token_ids", "logprobs", "prompt_logprobs")}
            engine.add(replace(request, request_id=f"{number} {index}", sample_index=index, **fresh))
        for _ in range(rng.randrange(5)):
            if len(engine.in_flight) == depth:
                engine.update()
            engine.schedule()
        if rng.random() < 0.1 and engine.live():
            assert engine.scheduler.abort(rng.choice(engine.live()).request_id)
    engine.drain()
    engine.check_outputs()
    return engine


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(
    ("groups", "num_blocks"), [(ONE, 36), (MIXED, 52), (SLIDING, 40)], ids=["one", "mixed", "sliding"]
)
def test_long_stream_under_pressure(
    groups: list[KVGroup], num_blocks: int, depth: int, enable_prefix_caching: bool, policy: str
) -> None:
    engine = long_stream(
        groups,
        num_blocks,
        depth=depth,
        seed=f"{enable_prefix_caching} {policy}",
        enable_prefix_caching=enable_prefix_caching,
        policy=policy,
    )
    stats = engine.scheduler.stats
    assert stats.num_preemptions > 0
    assert (stats.prefix_hits > 0) == enable_prefix_caching


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("groups", "num_blocks"), [(ONE, 28), (MIXED, 52), (SLIDING, 40)], ids=["one", "mixed", "sliding"]
)
def test_long_stream_of_steps_with_several_tokens(groups: list[KVGroup], num_blocks: int, depth: int) -> None:
    engine = long_stream(groups, num_blocks, depth=depth, seed="drafts", most_drafts=7)
    assert engine.scheduler.stats.num_preemptions > 0 and engine.scheduler.stats.prefix_hits > 0
    assert engine.drafts is not None and engine.drafts.num_drafts > 500


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("groups", "num_blocks"), [(ONE, 44), (SAME_SIZES, 80), (SLIDING, 50)], ids=["one", "same", "sliding"]
)
def test_long_stream_of_samples(groups: list[KVGroup], num_blocks: int, depth: int) -> None:
    engine = long_stream(groups, num_blocks, depth=depth, seed="samples", most_samples=7)
    assert engine.scheduler.stats.num_preemptions > 0 and engine.runner.num_copied > 20


@pytest.mark.parametrize("ahead", [1, 3, 4, 9])
@pytest.mark.parametrize("num_blocks", [24, 28])
def test_long_stream_with_blocks_ahead(num_blocks: int, ahead: int) -> None:
    """A draft model writes keys behind those of a step, and a request that fits alone fits with them."""
    for depth in (1, 2):
        engine = long_stream(ONE, num_blocks, depth=depth, seed=f"{ahead}", most_drafts=4, lookahead_tokens=ahead)
        assert num_blocks == 28 or engine.scheduler.stats.num_preemptions > 0
        assert engine.drafts is not None and engine.drafts.num_drafts > 100


def window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    first_block = SlidingGroup.first_block
    patch.setattr(SlidingGroup, "first_block", lambda group, computed: first_block(group, computed + 1))


def freed_one_step_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks behind the window of the next step are freed by the schedule of the step that still reads them."""
    publish = RequestBlocks.publish

    def publish_and_free(blocks: RequestBlocks, request: Request) -> SequenceTable:
        table = publish(blocks, request)
        blocks.cache.free_behind(table, request.num_computed)
        return table

    patch.setattr(RequestBlocks, "publish", publish_and_free)


def freed_twice(patch: pytest.MonkeyPatch) -> None:
    free_behind = CacheManager.free_behind

    def free_again(cache: CacheManager, table: SequenceTable, num_computed: int) -> None:
        before = [(one.first, list(one.block_ids)) for one in table.groups]
        free_behind(cache, table, num_computed)
        for one, (first, block_ids) in zip(table.groups, before, strict=True):
            one.first, one.block_ids = first, block_ids

    patch.setattr(CacheManager, "free_behind", free_again)


def groups_share_digests(patch: pytest.MonkeyPatch) -> None:
    keys = SequenceTable.keys
    patch.setattr(SequenceTable, "keys", lambda table, group, start, stop: keys(table, 0, start, stop))


def chunks_are_not_reserved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlidingGroup, "most_blocks", lambda group, num_tokens, first: 0)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (window_off_by_one, "is written while|attended to|two groups write"),
        (freed_one_step_early, "is written while|attended to|two groups write|written by two"),
        (freed_twice, "freed twice|references|are held"),
        (groups_share_digests, "attended to|has a name|twice"),
        (chunks_are_not_reserved, "promised|dictionary is empty"),
    ],
)
def test_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], says: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises((AssertionError, KeyError), match=says):
            for seed in range(20):
                long_stream(SAME_SIZES, 60, seed=str(seed), budget=9)


def copied_before_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    replace_in(patch, PromptTails, "block_ids", ("self._held", "(self._held | self._computed)"))


def copied_from_blocks_that_are_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PromptTails, "drop", lambda tails, request: None)


def copied_from_behind_a_window(patch: pytest.MonkeyPatch) -> None:
    replace_in(patch, PromptTails, "block_ids", ("[] if FREED in found else found", "found"))


def copied_after_other_tokens(patch: pytest.MonkeyPatch) -> None:
    replace_in(patch, SequenceTable, "tail_name", ("len(token_ids), parent", "len(token_ids), self._root"))


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (copied_before_they_are_computed, "attended to|a copied page is written"),
        (copied_from_blocks_that_are_free, r"attended to|out of range|a copied page is written|^'\d"),
        (copied_from_behind_a_window, "attended to"),
        (copied_after_other_tokens, "attended to|out of range"),
    ],
)
def test_planted_fault_of_copies_is_found(plant: Callable[[pytest.MonkeyPatch], None], says: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises((AssertionError, KeyError, IndexError), match=says):
            for seed in range(20):
                long_stream(SAME_SIZES, 90, seed=str(seed), budget=20, most_samples=7)


def replace_in(patch: pytest.MonkeyPatch, owner: Any, name: str, *changes: tuple[str, str]) -> None:
    """Replace pieces of the source of a function."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert old in source, f"{name} has no {old!r}"
        source = source.replace(old, new)
    scope = dict(function.__globals__)
    exec(compile(source, "planted", "exec", flags=__future__.annotations.compiler_flag), scope)
    patch.setattr(owner, name, scope[name])


def published_before_its_tokens_are_accepted(patch: pytest.MonkeyPatch) -> None:
    replace_in(patch, RequestBlocks, "publish", ("request.num_computed", "request.max_computed"))


def published_before_its_last_token_is_scheduled(patch: pytest.MonkeyPatch) -> None:
    replace_in(patch, RequestBlocks, "publish", ("request.num_computed", "request.num_tokens"))


def rejected_drafts_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    replace_in(patch, scheduler_module, "correct_bounds", ("len(run) - 1", "query_len - 1"))


def rejected_drafts_stay_in_the_upper_bound(patch: pytest.MonkeyPatch) -> None:
    replace_in(patch, scheduler_module, "correct_bounds", ("query_len - len(run)", "0"))


def the_last_token_counts_as_computed(patch: pytest.MonkeyPatch) -> None:
    replace_in(patch, scheduler_module, "correct_bounds", ("request.max_len - 1)", "request.max_len)"))


def ended_by_the_upper_bound(patch: pytest.MonkeyPatch) -> None:
    replace_in(patch, Scheduler, "schedule", ("least + 1 ==", "request.max_computed + 1 >="))


def scheduled_although_the_end_is_certain(patch: pytest.MonkeyPatch) -> None:
    replace_in(patch, scheduler_module, "correct_bounds", ("ending.append(request)", "pass"))


def windows_freed_by_the_upper_bound(patch: pytest.MonkeyPatch) -> None:
    for name in ("extend", "free_behind"):
        replace_in(patch, RequestBlocks, name, ("request.min_computed", "request.max_computed"))


def blocks_up_to_the_lower_bound(patch: pytest.MonkeyPatch) -> None:
    replace_in(patch, Scheduler, "schedule", ("request.max_computed + 1, appends", "request.min_computed + 1, appends"))


def blocks_without_those_of_drafts(patch: pytest.MonkeyPatch) -> None:
    replace_in(
        patch, Scheduler, "schedule", ("request.max_computed + 1, appends", "request.max_computed + 1 - depth, appends")
    )


def needs_of_one_token(patch: pytest.MonkeyPatch) -> None:
    replace_in(patch, RequestBlocks, "needs", ("min(last + 1,", "min(request.max_computed + 1,"))


def bounds_apart_by_more_than_a_chunk(patch: pytest.MonkeyPatch) -> None:
    change = ("limits.max_num_batched_tokens - 1 - between", "limits.max_num_batched_tokens")
    replace_in(patch, scheduler_module, "granted_depths", change)


def ordered_by_length(patch: pytest.MonkeyPatch) -> None:
    replace_in(patch, Scheduler, "schedule", ("num_decodes=num_decodes", "num_decodes=query_lens.count(1)"))


def end_tokens_only_at_the_end_of_a_run(patch: pytest.MonkeyPatch) -> None:
    change = ("if token_id in request.end_token_ids", "if token_id is run[-1] and token_id in request.end_token_ids")
    replace_in(patch, scheduler_module, "take_tokens", change)


def min_tokens_counted_after_the_run(patch: pytest.MonkeyPatch) -> None:
    later = "len(tokens) + len(run) - 1 >= request.params.min_tokens"
    replace_in(patch, scheduler_module, "take_tokens", ("request.may_end", later))


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (published_before_its_tokens_are_accepted, "tokens are known|out of range|has a name"),
        (published_before_its_last_token_is_scheduled, "out of range|has a name"),
        (rejected_drafts_count_as_computed, "bounds of other"),
        (rejected_drafts_stay_in_the_upper_bound, "bounds of other"),
        (the_last_token_counts_as_computed, "bounds of other"),
        (ended_by_the_upper_bound, "not in flight|makes no progress"),
        (scheduled_although_the_end_is_certain, "bounds of other|is written while"),
        (windows_freed_by_the_upper_bound, "attended to|is written while|written by two|two groups write"),
        (blocks_up_to_the_lower_bound, "without a block|behind its blocks"),
        (blocks_without_those_of_drafts, "without a block|behind its blocks"),
        (needs_of_one_token, "dictionary is empty|promised"),
        (bounds_apart_by_more_than_a_chunk, "blocks behind a window|makes no progress"),
        (ordered_by_length, "other kind|miscounted"),
        (end_tokens_only_at_the_end_of_a_run, "assert"),
        (min_tokens_counted_after_the_run, "assert"),
    ],
)
def test_planted_fault_of_several_tokens_is_found(plant: Callable[[pytest.MonkeyPatch], None], says: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises((AssertionError, KeyError, IndexError, struct.error), match=says):
            for seed in range(20):
                long_stream(SAME_SIZES, 90, depth=3, seed=str(seed), budget=16 if seed % 2 else 44, most_drafts=7)
