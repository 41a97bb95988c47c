"""Hit rates of the prefix cache with sliding groups: conversations in turn, edited last turns, pools that are short.

Public engines lost such hits: tails of windows were evicted first, an edit in the last block missed everything, and
the window at the end of a shared prefix was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

import pytest
from invariants import check_scheduler
from scheduling import full_group, make_scheduler, output_of, request, sliding_group

from phonograph.core.blocks import blocks_for
from phonograph.core.kv_group import KVGroup
from phonograph.core.request import Request
from phonograph.kv_cache.manager import CacheManager
from phonograph.kv_cache.tables import SequenceTable
from phonograph.scheduling.scheduler import Scheduler

FULL = [full_group()]
GEMMA = [full_group(), *[sliding_group(16)] * 5]
MIXED = [full_group(4), sliding_group(8, 8), sliding_group(15, 4)]
SLIDING = [sliding_group(16)]


class Conversations:
    """Conversations that begin with the same system prompt.

    Args:
        groups: KV groups.
        share: blocks of the pool, as a share of those of all tokens in all groups.
        turns: turns of each conversation.
        output: tokens of an answer.
    """

    def __init__(
        self, groups: Sequence[KVGroup], share: float, *, turns: int = 5, output: int = 16, system: int = 64
    ) -> None:
        self.count, self.turns, self.output = 8, turns, output
        self.step = lcm(*(group.block_size for group in groups))
        length = system + turns * (32 + output)
        pages = self.count * sum(blocks_for(length, group.block_size) for group in groups)
        self.scheduler: Scheduler = make_scheduler(
            groups=groups, num_blocks=int(share * pages), max_model_len=1024, max_num_batched_tokens=128
        )
        self.histories = [list(range(system)) for _ in range(self.count)]
        self.prompts: list[list[int]] = [[] for _ in range(self.count)]
        self.before: list[list[int]] = [[] for _ in range(self.count)]
        self._number = 0

    def answer(self, prompt: list[int]) -> Request:
        one = request(chr(1000 + self._number), prompt, max_tokens=self.output)
        self._number += 1
        self.scheduler.add(one)
        while not one.finished:
            batch = self.scheduler.schedule()
            self.scheduler.update(batch, output_of(batch))
        check_scheduler(self.scheduler)
        return one

    def talk(self) -> float:
        """Answer all turns, one conversation after another; return the hits as a share of those possible."""
        hits = possible = 0
        for turn in range(self.turns):
            for index, history in enumerate(self.histories):
                self.before[index] = list(history)
                self.prompts[index] = [
                    *history,
                    *range(turn * 1000 + index * 100000, turn * 1000 + index * 100000 + 32),
                ]
                one = self.answer(self.prompts[index])
                hits += one.num_cached_tokens
                possible += (len(history) - 1) // self.step * self.step if turn or index else 0
                self.histories[index] = self.prompts[index] + one.output_token_ids
        return hits / possible


def test_with_enough_blocks_all_groups_hit_what_one_full_group_hits() -> None:
    wanted = Conversations(FULL, 1.0).talk()
    for groups in (GEMMA, SLIDING):
        assert Conversations(groups, 1.0).talk() == wanted
    # Prefixes are multiples of 8 tokens.
    assert Conversations(MIXED, 1.0).talk() > 0.95


def test_conversations_in_turn_with_a_quarter_of_the_blocks() -> None:
    full, gemma = Conversations(FULL, 0.25).talk(), Conversations(GEMMA, 0.25).talk()
    print(f"hits with a quarter of the blocks: one full group {full:.2f}, with five sliding groups {gemma:.2f}")
    assert full < 0.5
    assert gemma > 0.7
    assert Conversations(GEMMA, 0.3).talk() > 0.99
    assert Conversations(SLIDING, 0.25).talk() > 0.99


def test_a_shared_beginning_stays_when_conversations_do_not() -> None:
    """The system prompt is all that a short pool can keep; the window at its end must be kept with it."""
    full, mixed = Conversations(FULL, 0.25).talk(), Conversations(MIXED, 0.25).talk()
    assert mixed > 0.95 * full


def edit_last_block(conversations: Conversations, index: int) -> tuple[list[int], int]:
    prompt, step = list(conversations.prompts[index]), conversations.step
    end = (len(prompt) - 1) // step * step
    prompt[end - 1] = 5
    return prompt, end - step


def replace_last_turn(conversations: Conversations, index: int) -> tuple[list[int], int]:
    history, step = conversations.before[index], conversations.step
    return [*history, *range(50000, 50020)], (len(history) - 1) // step * step


def repeat_last_turn(conversations: Conversations, index: int) -> tuple[list[int], int]:
    prompt, step = conversations.prompts[index], conversations.step
    return prompt, (len(prompt) - 1) // step * step


def continue_it(conversations: Conversations, index: int) -> tuple[list[int], int]:
    history, step = conversations.histories[index], conversations.step
    return [*history, 1, 2, 3], (len(history) - 1) // step * step


@pytest.mark.parametrize("ask", [repeat_last_turn, edit_last_block, replace_last_turn, continue_it])
@pytest.mark.parametrize(("groups", "share"), [(GEMMA, 0.4), (MIXED, 0.9), (SLIDING, 0.4)])
def test_the_last_turn_again(
    groups: list[KVGroup], share: float, ask: Callable[[Conversations, int], tuple[list[int], int]]
) -> None:
    # The answers are longer than the windows, so that the end of the prompt is behind them.
    conversations = Conversations(groups, share, output=40)
    conversations.talk()
    for index in range(conversations.count):
        prompt, wanted = ask(conversations, index)
        conversations.output = 1
        assert conversations.answer(prompt).num_cached_tokens >= wanted


def test_the_window_at_a_branch_is_kept_once_it_was_missed() -> None:
    scheduler = make_scheduler(
        groups=[full_group(), sliding_group(8)], num_blocks=44, max_model_len=1024, max_num_batched_tokens=16
    )
    system = list(range(40))

    def answer(name: str, prompt: list[int]) -> int:
        one = request(name, prompt, max_tokens=1)
        scheduler.add(one)
        while not one.finished:
            batch = scheduler.schedule()
            scheduler.update(batch, output_of(batch))
        return one.num_cached_tokens

    def talk(name: str) -> int:
        return answer(name, system + [1000 * ord(name) + position for position in range(40)])

    def fill(name: str) -> None:
        """Take the blocks that are evicted first; full blocks of the prompts stay."""
        assert answer(name, [1000 * ord(name) + position for position in range(20)]) == 0

    assert talk("a") == 0
    fill("b")
    fill("c")
    # The full group has all of the system prompt, and the window at its end is lost.
    assert talk("d") == 0
    fill("e")
    assert talk("f") == 40


def test_the_end_of_a_prompt_is_evicted_after_all_other_blocks() -> None:
    cache = CacheManager([sliding_group(8)], num_blocks=40, max_num_batched_tokens=16, enable_prefix_caching=True)

    def compute(tokens: list[int], prompt_len: int) -> SequenceTable:
        table = cache.make_table(lambda start, stop: tokens[start:stop], prompt_len, None)
        assert cache.admit(table, prompt_len, reserve=0, reuse=True) == 0
        for computed in range(len(tokens)):
            cache.free_behind(table, computed)
            cache.extend(table, computed + 1)
            cache.publish(table, computed + 1)
        return table

    first = compute(list(range(60)), 15)
    cache.free(compute(list(range(1000, 1060)), 60))
    cache.free(first)
    while cache.pool.num_free > 3:
        cache.pool.allocate()
    again = cache.make_table(lambda start, stop: list(range(start, stop)), 15, None)
    assert cache.admit(again, 15, reserve=0, reuse=True) == 12
