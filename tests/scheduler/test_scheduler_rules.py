"""Each rule of the scheduler by itself, in batches small enough to write down."""

from __future__ import annotations

import sys

import pytest
from invariants import check_scheduler
from scheduling import EOS, add, make_scheduler, output_of, request, sliding_group, step

from phonograph.core.batch import BlockAppend, ScheduledBatch, StepOutput, TokenLogprobs
from phonograph.core.request import RequestState
from phonograph.errors import RequestError
from phonograph.scheduling.scheduler import Scheduler

# Batches and budgets


def test_long_prompt_is_cut_into_chunks_and_sampled_at_its_end_only() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    add(scheduler, one := request("a", 14))
    batches = [step(scheduler) for _ in range(4)]
    assert [batch.query_lens for batch in batches] == [[6], [6], [2], [1]]
    assert [batch.context_lens for batch in batches] == [[0], [6], [12], [14]]
    assert [batch.samples for batch in batches] == [[False], [False], [True], [True]]
    assert [batch.num_decodes for batch in batches] == [0, 0, 0, 1]
    assert [len(batch.new) for batch in batches] == [1, 0, 0, 0]
    assert batches[0].new[0].token_ids == one.prompt_token_ids and batches[0].new[0].prompt_len == 14
    assert batches[0].new[0].end_token_ids == (EOS,)
    assert one.output_token_ids == [7, 7]


def test_blocks_of_all_known_tokens_come_at_admission_and_then_one_at_each_border() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6, num_blocks=8)
    add(scheduler, request("a", 7))
    appends = [step(scheduler).appends for _ in range(8)]
    assert appends[0] == [BlockAppend(slot=0, start=0, block_ids=[0, 1])]
    assert appends[1:3] == [[], []]
    assert appends[3] == [BlockAppend(slot=0, start=2, block_ids=[2])]
    assert appends[4:7] == [[], [], []]
    assert appends[7] == [BlockAppend(slot=0, start=3, block_ids=[3])]


def placed(scheduler: Scheduler, prompts: dict[str, int | list[int]]) -> str:
    """Return the names of decodes in the order of their batch, after prompts that came one by one."""
    for number, (name, prompt) in enumerate(prompts.items()):
        tokens = prompt if isinstance(prompt, int) else [*prompt, 50 + number]
        add(scheduler, request(name, tokens, arrival=number))
        step(scheduler)
    return "".join([*prompts][slot] for slot in step(scheduler).slots)


def test_decodes_with_leading_blocks_in_common_are_neighbours() -> None:
    """Prompts x share two blocks, of which y shares the first; the others share nothing."""
    scheduler = make_scheduler(max_num_seqs=7, max_num_batched_tokens=64)
    x, y = list(range(8)), [*range(4), *range(100, 104)]
    prompts = {"a": x, "b": 9, "c": y, "d": 7, "e": x, "f": x, "g": y}
    assert placed(scheduler, prompts) == "aefcgbd"


def test_neighbours_by_the_blocks_in_their_windows() -> None:
    """Without full attention. Sequences free the blocks before their windows at unlike times."""
    scheduler = make_scheduler(max_num_seqs=7, max_num_batched_tokens=64, groups=[sliding_group(13)])
    x, y = list(range(20)), [*range(16), *range(100, 104)]
    prompts = {"a": [*x, 1, 2, 3], "b": 21, "c": y, "d": 9, "e": x, "f": [*x, 4], "g": y}
    assert placed(scheduler, prompts) == "aefcgbd"


def test_a_preempted_sequence_returns_to_those_that_share_its_blocks() -> None:
    """The first one computed the blocks of all, and is admitted again after them."""
    scheduler = make_scheduler(max_num_batched_tokens=64)
    requests = [request(name, [*range(8), 50 + number], arrival=number) for number, name in enumerate("abcd")]
    requests[2].prompt_token_ids[:4] = range(100, 104)
    add(scheduler, *requests)
    step(scheduler)
    step(scheduler)
    scheduler._preempt(requests[0])
    step(scheduler)
    step(scheduler)
    order = [one.request_id for one in scheduler._decoding.values()]
    assert order == ["b", "d", "a", "c"]


def test_decodes_come_first_then_running_prompts_then_waiting_ones() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, request("a", 3))
    step(scheduler)
    add(scheduler, request("b", 12), request("c", 2), request("d", 3))
    batch = scheduler.schedule()
    assert (batch.slots, batch.query_lens, batch.num_decodes) == ([0, 1], [1, 9], 1)
    scheduler.update(batch, output_of(batch))
    batch = scheduler.schedule()
    assert (batch.slots, batch.query_lens) == ([0, 1, 2, 3], [1, 3, 2, 3])
    assert batch.context_lens == [4, 9, 0, 0]
    assert batch.num_tokens == 9


def test_chunk_of_one_token_is_a_prefill_before_the_longer_ones() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    add(scheduler, request("a", 5), request("b", 4), request("c", 1))
    batch = step(scheduler)
    # The budget leaves one token of b: its shape is a decode's, but it is a part of a prompt.
    assert (batch.slots, batch.query_lens, batch.num_decodes) == ([1, 0], [1, 5], 0)
    assert batch.samples == [False, True]
    batch = step(scheduler)
    assert (batch.slots, batch.query_lens, batch.num_decodes) == ([0, 2, 1], [1, 1, 3], 1)
    assert batch.samples == [True, True, True]


def test_no_more_sequences_than_slots() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, *(request(name, 2, max_tokens=2) for name in "abc"))
    assert step(scheduler).num_reqs == 2
    assert (scheduler.stats.num_running, scheduler.stats.num_waiting) == (2, 1)
    assert step(scheduler).num_reqs == 2
    batch = step(scheduler)
    assert [new.request_id for new in batch.new] == ["c"]
    # The slot is cleared and loaded in one step.
    assert sorted(batch.freed) == [0, 1] and batch.new[0].slot in batch.freed


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "cab"), ("priority", "bca")])
def test_order_of_admission(policy: str, order: str) -> None:
    scheduler = make_scheduler(policy=policy)
    add(scheduler, request("a", arrival=2, priority=1), request("b", arrival=3, priority=-1))
    add(scheduler, request("c", arrival=1, priority=1))
    assert [new.request_id for new in step(scheduler).new] == list(order)


def test_empty_batch_keeps_the_freed_slots_for_the_next_one() -> None:
    scheduler = make_scheduler()
    add(scheduler, request("a", max_tokens=1))
    step(scheduler)
    assert scheduler.schedule() == ScheduledBatch()
    add(scheduler, request("b"))
    assert step(scheduler).freed == [0]


# Ends


@pytest.mark.parametrize(
    ("params", "token_id", "length", "reason", "stop_reason"),
    [
        ({}, EOS, 1, "stop", None),
        ({"ignore_eos": True, "max_tokens": 3}, EOS, 3, "length", None),
        ({"stop_token_ids": (5, 7)}, 7, 1, "stop", 7),
        ({"stop_token_ids": (EOS,)}, EOS, 1, "stop", EOS),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, EOS, 1, "stop", EOS),
        ({"min_tokens": 3}, EOS, 3, "stop", None),
        ({"min_tokens": 3, "stop_token_ids": (7,)}, 7, 3, "stop", 7),
        ({"max_tokens": 4}, 7, 4, "length", None),
        ({"max_tokens": 1}, EOS, 1, "stop", None),
        ({"max_tokens": 1000}, 7, 15, "length", None),
        ({}, 7, 15, "length", None),
    ],
)
def test_ends(params: dict[str, object], token_id: int, length: int, reason: str, stop_reason: int | None) -> None:
    scheduler = make_scheduler(max_model_len=20)
    add(scheduler, one := request("a", 5, **params))
    while scheduler.has_unfinished:
        step(scheduler, token_id)
    assert (one.output_token_ids, one.finish_reason, one.stop_reason) == ([token_id] * length, reason, stop_reason)
    assert one.state is RequestState.FINISHED and scheduler.stats.blocks_used == 0


def test_the_blocks_bound_the_context_and_their_last_place_is_used() -> None:
    scheduler = make_scheduler(num_blocks=3)
    add(scheduler, one := request("a", 5))
    while scheduler.has_unfinished:
        step(scheduler)
    # 12 tokens in 3 blocks, and one more that is sampled but needs no place.
    assert one.num_tokens == 13 and one.finish_reason == "length" and scheduler.stats.num_preemptions == 0


def test_stop_string_ends_by_finish() -> None:
    scheduler = make_scheduler()
    add(scheduler, one := request("a"))
    step(scheduler)
    assert scheduler.finish("a", "stop", "END")
    assert (one.finish_reason, one.stop_reason, scheduler.has_unfinished) == ("stop", "END", False)
    assert not scheduler.finish("a", "stop", "END")


def test_abort_wherever_a_request_stands() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    add(scheduler, request("decoding", 2), request("prefilling", 12), request("waiting"))
    step(scheduler)
    for name in ("waiting", "prefilling", "decoding"):
        assert scheduler.abort(name)
        check_scheduler(scheduler)
        assert not scheduler.abort(name)
    assert not scheduler.has_unfinished and scheduler.stats.blocks_used == 0


@pytest.mark.parametrize("end", ["length", "stop", "abort", "failure"])
def test_a_request_that_has_ended_is_not_kept(end: str) -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    requests = [request(name, max_tokens=2) for name in "abcdef"]
    before = [sys.getrefcount(one) for one in requests]
    add(scheduler, *requests)
    while scheduler.has_unfinished:
        step(scheduler, EOS if end == "stop" else 7)
        if end in ("abort", "failure"):
            (scheduler.abort if end == "abort" else scheduler.fail)(next(iter(scheduler._requests)))
    scheduler.schedule()
    assert [sys.getrefcount(one) for one in requests] == before


def test_tokens_in_flight_of_an_aborted_request_are_dropped_also_when_its_id_is_used_again() -> None:
    scheduler = make_scheduler()
    add(scheduler, old := request("a"), other := request("b"))
    batch = scheduler.schedule()
    scheduler.abort("a")
    add(scheduler, again := request("a"))
    assert scheduler.update(batch, output_of(batch)) == [other]
    assert old.output_token_ids == [] and again.output_token_ids == [] and old.finish_reason == "abort"
    batch = step(scheduler)
    assert batch.freed == [0] and batch.new[0].slot == 0
    assert again.output_token_ids == [7]


# Blocks run out


def test_worst_rank_is_preempted_and_resumes_with_its_output() -> None:
    scheduler = make_scheduler(num_blocks=9, max_num_batched_tokens=32, enable_prefix_caching=False)
    add(scheduler, a := request("a", 8, max_tokens=12), b := request("b", 8, max_tokens=12))
    while b.state is not RequestState.PREEMPTED:
        step(scheduler)
    # Both grew to the pool's 9 blocks; a needed the next one.
    assert a.state is RequestState.RUNNING and scheduler.stats.num_preemptions == 1
    kept = list(b.output_token_ids)
    assert len(kept) >= 8 and b.slot == -1
    while not a.finished:
        assert not step(scheduler).new
    batch = step(scheduler)
    assert batch.new[0].token_ids == b.prompt_token_ids + kept and batch.new[0].prompt_len == 8
    assert batch.new[0].num_computed == 0 and batch.query_lens == [8 + len(kept)]
    assert b.output_token_ids == [*kept, 7]


def test_no_more_are_preempted_than_must_be() -> None:
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, *(request(name, 3) for name in "abc"))
    while not scheduler.stats.num_preemptions:
        step(scheduler)
    # All three needed a third block at once; the two that c gave back are enough for the others.
    assert (scheduler.stats.num_running, scheduler.stats.num_waiting, scheduler.stats.num_preemptions) == (2, 1, 1)
    assert scheduler.stats.blocks_used == 6


def test_the_lowest_priority_is_preempted_and_resumes_before_later_requests() -> None:
    scheduler = make_scheduler(num_blocks=9, policy="priority", max_num_seqs=2)
    add(scheduler, a := request("a", 8, priority=1, max_tokens=12), b := request("b", 8, priority=0, max_tokens=12))
    step(scheduler)
    add(scheduler, request("c", 8, priority=2, max_tokens=12))
    while a.state is not RequestState.PREEMPTED:
        step(scheduler)
    assert b.state is RequestState.RUNNING
    resumed: list[str] = []
    while scheduler.has_unfinished:
        resumed += [new.request_id for new in step(scheduler).new]
    assert resumed == ["a", "c"]


def test_preempted_request_finds_its_blocks_in_the_prefix_cache() -> None:
    scheduler = make_scheduler(num_blocks=10)
    add(scheduler, a := request("a", 8, max_tokens=17), b := request("b", 8, max_tokens=17))
    while b.state is not RequestState.PREEMPTED:
        step(scheduler)
    scheduler.abort(a.request_id)
    batch = step(scheduler)
    # Of its five full blocks the last was evicted first, to make the room it was preempted for.
    assert batch.new[0].num_computed == 16 and b.num_tokens == 22
    # Reports count what was found at first.
    assert b.num_cached_tokens == 0 and scheduler.stats.prefix_hits == 0


def test_admission_leaves_every_sequence_a_block_to_grow_into() -> None:
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, request("a", 8), request("b", 9))
    # b needs 3 of the 4 blocks left, which would leave 1 for two sequences.
    assert [new.request_id for new in step(scheduler).new] == ["a"]
    scheduler = make_scheduler(num_blocks=7)
    add(scheduler, request("a", 8), request("b", 8))
    assert len(step(scheduler).new) == 2
    for _ in range(4):
        step(scheduler)
    assert scheduler.stats.num_preemptions == 0


# Prefix cache


def test_prompt_seen_before_computes_only_its_last_block() -> None:
    scheduler = make_scheduler()
    add(scheduler, request("a", range(12), max_tokens=1))
    step(scheduler)
    add(scheduler, again := request("b", range(12), max_tokens=1))
    batch = step(scheduler)
    # Not even a whole match is taken whole: the last token is computed for its logits.
    assert (batch.context_lens, batch.query_lens, again.num_cached_tokens) == ([8], [4], 8)
    assert batch.new[0].num_computed == 8
    add(scheduler, request("c", range(13), max_tokens=1))
    batch = step(scheduler)
    assert (batch.context_lens, batch.query_lens, batch.num_decodes) == ([12], [1], 0)
    assert (scheduler.stats.prefix_queries, scheduler.stats.prefix_hits) == (37, 20)


def test_samples_of_one_prompt_share_it_in_the_step_that_computes_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20)
    add(scheduler, *(request(name, range(13)) for name in "abc"))
    batch = scheduler.schedule()
    assert (batch.slots, batch.query_lens, batch.context_lens) == ([1, 2, 0], [1, 1, 13], [12, 12, 0])
    tables = {append.slot: append.block_ids for append in batch.appends}
    assert tables[0][:3] == tables[1][:3] == tables[2][:3]
    assert len({tables[slot][3] for slot in range(3)}) == 3


def test_chunk_not_yet_scheduled_is_not_shared() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, request("a", range(30)))
    step(scheduler)
    add(scheduler, b := request("b", range(30)))
    assert step(scheduler).slots == [0]
    scheduler.abort("a")
    step(scheduler)
    assert b.num_cached_tokens == 20


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    scheduler = make_scheduler()
    add(scheduler, request("a", range(6), max_tokens=7))
    while scheduler.has_unfinished:
        step(scheduler)
    add(scheduler, b := request("b", [*range(6), *[7] * 7, 1, 2]))
    step(scheduler)
    assert b.num_cached_tokens == 12


def test_same_block_after_another_prefix_is_not_the_same() -> None:
    scheduler = make_scheduler()
    add(scheduler, request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1))
    step(scheduler)
    add(scheduler, b := request("b", [5, 6, 7, 8, 5, 6, 7, 8, 9]), c := request("c", [1, 2, 3, 4, 5, 6, 7, 9, 9]))
    step(scheduler)
    assert (b.num_cached_tokens, c.num_cached_tokens) == (0, 4)


def test_prompt_logprobs_and_the_setting_keep_out_of_the_cache() -> None:
    for enabled, prompt_logprobs in ((False, None), (True, 0)):
        scheduler = make_scheduler(enable_prefix_caching=enabled)
        add(scheduler, request("a", range(12), max_tokens=1))
        step(scheduler)
        add(scheduler, b := request("b", range(12), prompt_logprobs=prompt_logprobs))
        assert step(scheduler).query_lens == [12] and b.num_cached_tokens == 0


def test_reset_forgets_also_blocks_of_running_sequences() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, request("a", range(24)))
    step(scheduler)
    scheduler.reset_prefix_cache()
    step(scheduler)
    add(scheduler, b := request("b", range(12), max_tokens=1))
    while not b.finished:
        step(scheduler)
    assert b.num_cached_tokens == 0
    # b computed its blocks after the reset.
    add(scheduler, c := request("c", range(12)))
    step(scheduler)
    assert c.num_cached_tokens == 8


def test_all_may_be_preempted_between_steps() -> None:
    """Also the prompt in progress; tokens, order and admission counts stay, and a reset leaves no prefix."""
    scheduler = make_scheduler(max_num_batched_tokens=10)
    requests = [request("a", range(6), max_tokens=4), request("b", range(20, 42), max_tokens=2), request("c", 3)]
    add(scheduler, *requests)
    for _ in range(2):
        step(scheduler)
    assert [len(one.output_token_ids) for one in requests] == [2, 0, 0] and scheduler.stats.num_running == 2
    for _ in range(2):
        scheduler.preempt_all()
        scheduler.reset_prefix_cache()
        stats = scheduler.stats
        assert (stats.num_running, stats.num_waiting, stats.blocks_used, stats.num_preemptions) == (0, 3, 0, 2)
        check_scheduler(scheduler)
    batch = step(scheduler)
    assert batch.query_lens == [8, 2] and batch.context_lens == [0, 0] and batch.freed == [0, 1]
    while scheduler.has_unfinished:
        step(scheduler)
        check_scheduler(scheduler)
    assert [len(one.output_token_ids) for one in requests[:2]] == [4, 2]


# Logprobs


def test_logprobs_reach_their_request() -> None:
    scheduler = make_scheduler()
    add(scheduler, a := request("a", logprobs=0), b := request("b"))
    batch = scheduler.schedule()
    output = output_of(batch)
    output.logprobs[0] = [TokenLogprobs(token_ids=[7], logprobs=[-1.5], ranks=[2])]
    scheduler.update(batch, output)
    assert a.logprobs == output.logprobs[0] and b.logprobs == []


def test_prompt_logprobs_cut_short_by_a_preemption_are_collected_anew() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=2)
    add(scheduler, request("a", 1, max_tokens=30))
    step(scheduler)
    add(scheduler, b := request("b", range(17), prompt_logprobs=0, max_tokens=5))
    cut_at = 0
    while not b.finished:
        batch = scheduler.schedule()
        if b.state is RequestState.PREEMPTED and not cut_at:
            cut_at = len(b.prompt_logprobs)
        output = output_of(batch)
        for slot, query_len, context in zip(batch.slots, batch.query_lens, batch.context_lens, strict=True):
            if slot == b.slot and context < 16:
                targets = range(context + 1, min(context + query_len, 16) + 1)
                output.prompt_logprobs[slot] = [
                    TokenLogprobs(token_ids=[i], logprobs=[-1.0], ranks=[1]) for i in targets
                ]
        scheduler.update(batch, output)
    assert 0 < cut_at < 16
    assert [entry.token_ids for entry in b.prompt_logprobs] == [[i] for i in range(1, 17)]


# Overlap


def test_next_step_is_scheduled_before_the_tokens_of_the_last_are_known() -> None:
    scheduler = make_scheduler()
    add(scheduler, a := request("a", 6, max_tokens=3))
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert [batch.context_lens for batch in (first, second, third)] == [[0], [6], [7]]
    assert [batch.query_lens for batch in (first, second, third)] == [[6], [1], [1]]
    # Its last token is on its way.
    assert scheduler.schedule() == ScheduledBatch()
    for token_id, batch in enumerate((first, second, third)):
        assert scheduler.update(batch, output_of(batch, token_id)) == [a]
    assert a.output_token_ids == [0, 1, 2] and a.finish_reason == "length"


def test_a_step_scheduled_past_a_stop_has_no_effect() -> None:
    scheduler = make_scheduler()
    add(scheduler, a := request("a", 6))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.update(first, output_of(first, EOS)) == [a]
    assert scheduler.update(second, output_of(second)) == []
    assert a.output_token_ids == [EOS] and scheduler.stats.blocks_used == 0


def test_preempted_request_waits_for_its_tokens_in_flight() -> None:
    scheduler = make_scheduler(num_blocks=9, max_num_batched_tokens=32)
    add(scheduler, a := request("a", 8), b := request("b", 8))
    before = scheduler.schedule()
    while (batch := scheduler.schedule()) and b.state is RequestState.RUNNING:
        scheduler.update(before, output_of(before))
        before = batch
    known = b.num_tokens
    scheduler.abort(a.request_id)
    assert scheduler.schedule() == ScheduledBatch()
    assert scheduler.update(before, output_of(before, 8)) == [b]
    new = scheduler.schedule().new
    assert [one.token_ids for one in new] == [[*b.prompt_token_ids, *b.output_token_ids]]
    assert len(new[0].token_ids) == known + 1 and b.output_token_ids[-1] == 8


def test_updates_out_of_order_or_of_another_batch_are_our_bugs() -> None:
    scheduler = make_scheduler()
    add(scheduler, request("a", 6))
    _, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(AssertionError, match="order"):
        scheduler.update(second, output_of(second))
    with pytest.raises(AssertionError, match="output"):
        scheduler.update(second, StepOutput(slots=[3], token_ids=[[7]]))


# Refusals


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        (0, {}, "prompt=.*empty"),
        (64, {}, "prompt length=64.*max_model_len.*maximum is 63"),
        (12, {"num_blocks": 2}, "prompt length=12.*KV cache.*holds 8"),
    ],
)
def test_refused_prompts(prompt: int, changes: dict[str, object], message: str) -> None:
    scheduler = make_scheduler(**changes)
    with pytest.raises(RequestError, match=message):
        scheduler.add(request("a", prompt))
    assert not scheduler.has_unfinished


def test_longest_prompts_that_fit_are_served() -> None:
    for prompt, changes in ((63, {}), (8, {"num_blocks": 2})):
        scheduler = make_scheduler(**changes)
        add(scheduler, one := request("a", prompt))
        while scheduler.has_unfinished:
            step(scheduler)
        assert len(one.output_token_ids) == 1


def test_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    add(scheduler, request("a"))
    with pytest.raises(RequestError, match="request_id='a'.*in use"):
        scheduler.add(request("a"))
