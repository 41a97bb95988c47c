"""Steps that return several tokens for a request: a request takes those up to its end."""

from __future__ import annotations

import pytest
from invariants import check_scheduler
from scheduling import EOS, FixedDepths, add, make_scheduler, output_of, request, sliding_group, step

from phonograph.core.batch import TokenLogprobs
from phonograph.core.request import Request, RequestState
from phonograph.scheduling.scheduler import Scheduler


def entries(*token_ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_ids=[token_id], logprobs=[-1.0], ranks=[1]) for token_id in token_ids]


def take(scheduler: Scheduler, *token_ids: int) -> list[Request]:
    """Run a step whose first request gets these tokens, with log-probabilities."""
    batch = scheduler.schedule()
    output = output_of(batch)
    output.token_ids[0] = [*token_ids]
    output.logprobs[batch.slots[0]] = entries(*token_ids)
    news = scheduler.update(batch, output)
    check_scheduler(scheduler)
    return news


@pytest.mark.parametrize(
    ("params", "kept", "reason", "stop_reason"),
    [
        ({}, [7, 8, EOS], "stop", None),
        ({"ignore_eos": True}, [7, 8, EOS, 9, EOS, 3], None, None),
        ({"stop_token_ids": (8,)}, [7, 8], "stop", 8),
        ({"stop_token_ids": (9, EOS)}, [7, 8, EOS], "stop", EOS),
        ({"min_tokens": 4}, [7, 8, EOS], "stop", None),
        ({"min_tokens": 5}, [7, 8, EOS, 9, EOS], "stop", None),
        ({"min_tokens": 6}, [7, 8, EOS, 9, EOS], "stop", None),
        ({"min_tokens": 7}, [7, 8, EOS, 9, EOS, 3], None, None),
        ({"max_tokens": 7}, [7, 8, EOS], "stop", None),
        ({"max_tokens": 7, "ignore_eos": True}, [7, 8, EOS, 9, EOS, 3], "length", None),
    ],
)
def test_a_run_is_cut_at_the_first_end(
    params: dict[str, object], kept: list[int], reason: str | None, stop_reason: int | None
) -> None:
    """One token came with the prompt, and six come in one step."""
    scheduler = make_scheduler(drafts=FixedDepths(5))
    add(scheduler, one := request("a", logprobs=0, **params), other := request("b"))
    assert take(scheduler, 5) == [one, other]
    assert take(scheduler, 7, 8, EOS, 9, EOS, 3) == [one, other]
    assert one.output_token_ids == [5, *kept] and one.logprobs == entries(5, *kept)
    assert (one.finish_reason, one.stop_reason) == (reason, stop_reason)
    assert other.output_token_ids == [7, 7], "the other request has its own tokens"


@pytest.mark.parametrize(("last", "reason"), [(6, "length"), (EOS, "stop")])
@pytest.mark.parametrize("changes", [{"max_tokens": 6}, {"max_model_len": 11}])
def test_a_run_is_cut_at_the_longest_output(changes: dict[str, int], last: int, reason: str) -> None:
    """When the second step is scheduled, the first may have accepted only one token."""
    max_tokens, max_model_len = changes.get("max_tokens"), changes.get("max_model_len", 64)
    scheduler = make_scheduler(max_model_len=max_model_len, drafts=FixedDepths(5))
    add(scheduler, one := request("a", logprobs=0, max_tokens=max_tokens))
    take(scheduler, 1)
    first, second = scheduler.schedule(), scheduler.schedule()
    # At most five and four tokens are missing.
    assert (first.query_lens, second.query_lens) == ([5], [4])
    # The context of the second step is at most 5 + 5. Position 10 needs no block.
    assert (first.context_lens, second.context_lens) == ([5], [10])
    assert scheduler.stats.blocks_used == 3
    for batch, run in ((first, [2, 3, 4, 5]), (second, [last, 7, 8, 9])):
        output = output_of(batch)
        output.token_ids, output.logprobs = [run], {0: entries(*run)}
        assert scheduler.update(batch, output) == [one]
        check_scheduler(scheduler)
    assert one.output_token_ids == [1, 2, 3, 4, 5, last] and one.finish_reason == reason
    assert one.logprobs == entries(1, 2, 3, 4, 5, last) and scheduler.stats.blocks_used == 0


def test_a_request_gives_its_blocks_back_once_the_steps_in_flight_end_it_for_certain() -> None:
    scheduler = make_scheduler(max_num_seqs=1, drafts=FixedDepths(3))
    add(scheduler, one := request("a", max_tokens=7))
    step(scheduler)
    first, second = scheduler.schedule(), scheduler.schedule()
    check_scheduler(scheduler)
    assert one.max_computed == 5 + 4 + 4 and one.min_computed == 5 + 2
    assert one.state is RequestState.RUNNING, "each may accept one token of six"
    output = output_of(first)
    output.token_ids = [[1, 2, 3, 4]]
    scheduler.update(first, output)
    assert (one.min_computed, one.max_computed) == (5 + 5, 5 + 8)
    # Six of the seven tokens are certain, and the third step brings the last one.
    third = scheduler.schedule()
    assert (third.query_lens, one.state) == ([1], RequestState.RUNNING)
    assert scheduler.schedule().slots == []
    assert one.state is RequestState.ENDING and scheduler.stats.blocks_used == 0
    output = output_of(second)
    output.token_ids = [[5, 6, 7]]
    assert scheduler.update(second, output) == [one]
    assert one.finish_reason == "length" and one.output_token_ids == [7, 1, 2, 3, 4, 5, 6]
    assert scheduler.update(third, output_of(third)) == []


def test_a_known_run_can_make_the_end_certain() -> None:
    """After the first of two steps, the second one brings the last token, so that no third one is scheduled."""
    scheduler = make_scheduler(max_num_seqs=1, drafts=FixedDepths(3))
    add(scheduler, one := request("a", max_tokens=6))
    step(scheduler)
    first, second = scheduler.schedule(), scheduler.schedule()
    output = output_of(first)
    output.token_ids = [[1, 2, 3, 4]]
    scheduler.update(first, output)
    check_scheduler(scheduler)
    assert scheduler.schedule().slots == [] and one.state is RequestState.ENDING
    assert scheduler.update(second, output_of(second)) == [one]
    assert one.output_token_ids == [7, 1, 2, 3, 4, 7] and one.finish_reason == "length"


def test_a_run_for_a_request_that_has_ended_is_dropped() -> None:
    scheduler = make_scheduler(drafts=FixedDepths(3))
    add(scheduler, one := request("a"), other := request("b"))
    step(scheduler)
    batch = scheduler.schedule()
    scheduler.abort("a")
    output = output_of(batch)
    output.token_ids[0] = [1, 2, 3]
    assert scheduler.update(batch, output) == [other]
    assert one.output_token_ids == [7] and one.finish_reason == "abort"


def test_a_step_that_accepts_more_than_it_had_is_our_bug() -> None:
    scheduler = make_scheduler(drafts=FixedDepths(2))
    add(scheduler, request("a"))
    step(scheduler)
    with pytest.raises(AssertionError, match="more tokens than it had"):
        take(scheduler, 1, 2, 3, 4)


def test_drafts_share_what_the_budget_leaves_to_other_sequences() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=9, drafts=FixedDepths(4))
    add(scheduler, request("a", 2), request("b", 2))
    step(scheduler)
    add(scheduler, request("c", 6))
    batch = scheduler.schedule()
    assert (batch.query_lens, batch.num_decodes, batch.num_decode_tokens) == ([5, 3, 1], 2, 8)
    assert batch.num_tokens == 9


def test_short_blocks_leave_drafts_out_before_a_request_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=32, drafts=FixedDepths(5))
    add(scheduler, request("a", 5), request("b", 5))
    batches = [step(scheduler) for _ in range(12)]
    assert [batch.context_lens for batch in batches[1:]] == [[length] * 2 for length in range(5, 16)]
    # Tokens 11 to 16 would need a fifth block each.
    assert [batch.query_lens for batch in batches[1:]] == [[6, 6]] * 6 + [[1, 1]] * 5
    assert scheduler.stats.num_preemptions == 0
    # Token 16 needs one.
    assert step(scheduler).query_lens == [1] and scheduler.stats.num_preemptions == 1
    scheduler.abort("b")
    assert step(scheduler).query_lens == [6]


def test_blocks_of_rejected_drafts_stay_for_the_tokens_to_come() -> None:
    scheduler = make_scheduler(block_size=2, drafts=FixedDepths(3))
    add(scheduler, request("a", 4))
    step(scheduler)
    batches = [step(scheduler) for _ in range(4)]
    # Tokens 4 to 7, then 5 to 8 and so on: one token is accepted each time.
    assert [batch.context_lens for batch in batches] == [[4], [5], [6], [7]]
    appends = [[(one.start, len(one.block_ids)) for one in batch.appends] for batch in batches]
    assert appends == [[(2, 2)], [(4, 1)], [], [(5, 1)]]


def test_a_block_is_found_when_all_its_tokens_are_accepted() -> None:
    scheduler = make_scheduler(drafts=FixedDepths(3))
    add(scheduler, one := request("a", range(3)))
    step(scheduler)
    batch = scheduler.schedule()
    assert batch.query_lens == [4]
    found: list[int] = []
    for name in "bc":
        add(scheduler, other := request(name, [*range(3), 7, 1, 2], max_tokens=1))
        if name == "b":
            later = scheduler.schedule()
            found.append(other.num_cached_tokens)
            output = output_of(batch)
            output.token_ids = [[1]]
            scheduler.update(batch, output)
            scheduler.update(later, output_of(later))
        else:
            scheduler.schedule()
            found.append(other.num_cached_tokens)
        check_scheduler(scheduler)
    # Token 3 is written by the step in flight, with whatever follows.
    assert found == [4, 4] and one.output_token_ids[:2] == [7, 1]


def test_windows_are_freed_by_the_fewest_tokens() -> None:
    scheduler = make_scheduler(groups=[sliding_group(4, 2)], max_num_batched_tokens=32, drafts=FixedDepths(3))
    add(scheduler, request("a", 8))
    step(scheduler)
    table = scheduler._blocks.tables["a"].groups[0]
    first = scheduler.schedule()
    # Token 8 reads from token 5 on, in block 2.
    assert (table.first, len(table.block_ids)) == (2, 6)
    second = scheduler.schedule()
    check_scheduler(scheduler)
    # It begins at token 9 at the earliest, which reads from token 6 on, and ends at token 15 at the latest.
    assert (table.first, len(table.block_ids)) == (3, 8)
    for batch in (first, second):
        scheduler.update(batch, output_of(batch))
        check_scheduler(scheduler)
