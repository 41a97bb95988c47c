"""A runner without a model, for tests of the scheduler. It believes nothing but the batches.

Its rows and block tables come from ScheduledBatch alone. Its keys and values are, as real ones are, a function of all
the tokens up to their position; what it samples is a function of the keys and values it read in all KV groups. A page
that a group writes loses what another group wrote. So whatever is wrongly shared, overwritten, freed, forgotten or
computed in the wrong place shows, at the latest in the output.

A decode continues from the state of its row, as on a device: its context in the batch is an upper bound only. Of its
1 + d tokens a random number is accepted, at least one. The keys and values of the others belong to no sequence.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from phonograph.core.batch import BlockAppend, NewSequence, ScheduledBatch, StepOutput, TokenLogprobs
from phonograph.core.sampling_params import SamplingParams
from phonograph.scheduling.scheduler import Scheduler

VOCAB = 7
REJECTED = -1
"""Key and value of a token that was not accepted."""
BEYOND = VOCAB + 1
"""Token sampled after the end of its request."""


def next_history(history: int, token_id: int) -> int:
    return hash((history, token_id))


def next_token(histories: list[int], windows: Sequence[int | None], sample_index: int) -> int:
    """Depends on all that is attended to and on the request's own sample index."""
    seen = tuple(tuple(histories[-(window or len(histories)) :]) for window in windows)
    return (hash((seen, sample_index)) >> 11) % VOCAB


def histories_of(token_ids: list[int], salt: str | None = None) -> list[int]:
    # Of integers only, whose hashes are the same in each run.
    histories = [hash((1, *(salt or "").encode()))]
    for token_id in token_ids:
        histories.append(next_history(histories[-1], token_id))
    return histories[1:]


def marked(token_id: int, position: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids=[token_id], logprobs=[-0.5], ranks=[position])


@dataclass
class Row:
    """One sequence.

    num_loaded: tokens with which it started; it is a prefill until they are computed
    max_len: tokens at which it ends; it writes nothing at and after position `max_len` - 1
    lengths: entries of the block table of each group that the sequence has filled
    """

    token_ids: list[int]
    histories: list[int]
    prompt_len: int
    num_loaded: int
    max_len: int
    computed: int
    params: SamplingParams
    sample_index: int
    lengths: list[int]


class SimulatedRunner:
    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        self.limits = scheduler.limits
        self.context_len = scheduler.context_len
        self.rng = random.Random(seed)
        self.groups = scheduler.groups
        self.num_blocks = scheduler.num_blocks
        self.windows = [group.window for group in self.groups]
        self.rows: dict[int, Row] = {}
        # Entries stay when a sequence ends and when a block is freed, as on a device; each is a page at all times.
        most = [-(-self.limits.max_model_len // group.block_size) for group in self.groups]
        self.tables = [[[0] * count for _ in range(self.limits.max_num_seqs)] for count in most]
        self.kv: list[dict[tuple[int, int], int]] = [{} for _ in range(self.num_blocks)]
        self.salts: dict[str, str | None] = {}
        self.num_copied = 0

    def run(self, batch: ScheduledBatch) -> StepOutput:
        for slot in batch.freed:
            del self.rows[slot]
        for sequence in batch.new:
            self.load(sequence)
        new_slots = {sequence.slot for sequence in batch.new}
        self.append(batch.appends, new_slots)
        self.check_shape(batch)
        self.copy(batch.copies)
        written: set[tuple[int, int, int]] = set()
        # The accepted tokens of each decode, and the end of the keys and values that are right after this step.
        runs: dict[int, list[int]] = {}
        ends: dict[int, int] = {}
        for index, (slot, query_len, context) in enumerate(
            zip(batch.slots, batch.query_lens, batch.context_lens, strict=True)
        ):
            row = self.rows[slot]
            assert (index < batch.num_decodes) == (row.computed >= row.num_loaded), "a sequence of the other kind"
            start, stop = row.computed, row.computed + query_len
            if index < batch.num_decodes:
                assert context >= start, "the context of a decode is no upper bound"
                runs[slot] = self.accept(row, query_len)
                stop = max(start, min(stop, row.max_len - 1))
            else:
                assert context == start, "the batch and the runner disagree on what is computed"
            ends[slot] = len(row.token_ids) - 1 if slot in runs else stop
            for group in range(len(self.groups)):
                self.write(slot, group, range(start, stop), ends[slot], written)
        pages = {(page, group) for page, group, _ in written}
        assert len({page for page, _ in pages}) == len(pages), "two groups write a page in one step"
        self.check_unread(batch, {page for page, _ in pages} | {target for _, target in batch.copies}, new_slots)
        output = StepOutput()
        for slot, samples in zip(batch.slots, batch.samples, strict=True):
            row = self.rows[slot]
            start, row.computed = row.computed, ends[slot]
            self.attend(slot, start, ends[slot])
            self.answer(output, slot, start, samples, runs.get(slot))
        return output

    def accept(self, row: Row, query_len: int) -> list[int]:
        """Append the tokens that a decode gets in this step, and return them."""
        run: list[int] = []
        for _ in range(self.rng.choice([1, query_len, self.rng.randint(1, query_len)])):
            if len(row.token_ids) == row.max_len:
                run.append(BEYOND)
                continue
            run.append(next_token(row.histories, self.windows, row.sample_index))
            row.token_ids.append(run[-1])
            row.histories.append(next_history(row.histories[-1], run[-1]))
        return run

    def load(self, sequence: NewSequence) -> None:
        assert sequence.slot not in self.rows and 0 <= sequence.slot < self.limits.max_num_seqs
        self.rows[sequence.slot] = Row(
            token_ids=list(sequence.token_ids),
            histories=histories_of(sequence.token_ids, self.salts.get(sequence.request_id)),
            prompt_len=sequence.prompt_len,
            num_loaded=len(sequence.token_ids),
            max_len=min(sequence.prompt_len + (sequence.params.max_tokens or self.context_len), self.context_len),
            computed=sequence.num_computed,
            params=sequence.params,
            sample_index=sequence.sample_index,
            lengths=[0] * len(self.groups),
        )

    def append(self, appends: list[BlockAppend], new_slots: set[int]) -> None:
        targets = [(append.slot, append.group) for append in appends]
        assert len(set(targets)) == len(targets), "a table gets two appends in one step"
        assert all((slot, group) in targets for slot in new_slots for group in range(len(self.groups)))
        for append in appends:
            row = self.rows[append.slot]
            if append.slot not in new_slots:
                assert append.start == row.lengths[append.group] and append.block_ids
            assert all(0 <= block_id < self.num_blocks for block_id in append.block_ids)
            end = append.start + len(append.block_ids)
            self.tables[append.group][append.slot][append.start : end] = append.block_ids
            row.lengths[append.group] = end

    def copy(self, copies: list[tuple[int, int]]) -> None:
        sources, targets = zip(*copies, strict=True) if copies else ((), ())
        assert len({*targets}) == len(targets) and {*targets}.isdisjoint(sources), "a copied page is written"
        for source, target in copies:
            self.kv[target] = dict(self.kv[source])
        self.num_copied += len(copies)

    def first_key(self, group: int, position: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def place(self, slot: int, group: int, position: int) -> tuple[int, int]:
        size = self.groups[group].block_size
        assert position // size < self.rows[slot].lengths[group], "a token without a block"
        return self.tables[group][slot][position // size], position % size

    def write(self, slot: int, group: int, positions: range, end: int, written: set[tuple[int, int, int]]) -> None:
        """Write keys and values; those at and after `end` are of rejected tokens."""
        for position in positions:
            page, offset = self.place(slot, group, position)
            assert (page, group, offset) not in written, "written by two sequences in one step"
            written.add((page, group, offset))
            if any(owner != group for owner, _ in self.kv[page]):
                self.kv[page] = {}
            self.kv[page][group, offset] = self.rows[slot].histories[position] if position < end else REJECTED

    def check_shape(self, batch: ScheduledBatch) -> None:
        assert batch.slots and len(set(batch.slots)) == batch.num_reqs <= self.limits.max_num_seqs
        assert sum(batch.query_lens) == batch.num_tokens <= self.limits.max_num_batched_tokens
        num_decode_tokens = sum(batch.query_lens[: batch.num_decodes])
        assert num_decode_tokens == batch.num_decode_tokens, "tokens of decodes are miscounted"
        assert all(query_len >= 1 for query_len in batch.query_lens) and all(batch.samples[: batch.num_decodes])
        are_long = [query_len > 1 for query_len in batch.query_lens[batch.num_decodes :]]
        assert are_long == sorted(are_long), "a prefill of one token comes after a longer one"

    def check_unread(self, batch: ScheduledBatch, pages: set[int], new_slots: set[int]) -> None:
        """Check that no page that sequences read keys of, computed before, is written.

        A new sequence may have found blocks that another computes in this step.
        """
        for slot, row in self.rows.items():
            if slot in new_slots:
                continue
            for group, kv_group in enumerate(self.groups):
                full = range(
                    self.first_key(group, row.computed) // kv_group.block_size, row.computed // kv_group.block_size
                )
                for entry in full:
                    page = self.tables[group][slot][entry]
                    assert page not in pages, f"page {page} is written while slot {slot} reads it"

    def attend(self, slot: int, start: int, end: int) -> None:
        """Check the keys and values that the accepted tokens from `start` to `end` read."""
        row = self.rows[slot]
        for group in range(len(self.groups)):
            for position in range(self.first_key(group, start), end):
                page, offset = self.place(slot, group, position)
                seen = self.kv[page].get((group, offset))
                assert seen == row.histories[position], "attended to keys and values of something else"

    def answer(self, output: StepOutput, slot: int, start: int, samples: bool, run: list[int] | None) -> None:
        """Add the results of a sequence; `run` has the tokens of a decode."""
        row, end = self.rows[slot], self.rows[slot].computed
        if run is None:
            assert samples == (end == len(row.token_ids))
        if row.params.prompt_logprobs is not None and start < row.prompt_len - 1:
            positions = range(start + 1, min(end + 1, row.prompt_len))
            output.prompt_logprobs[slot] = [marked(row.token_ids[position], position) for position in positions]
        if not samples:
            return
        if run is None:
            run = [next_token(row.histories, self.windows, row.sample_index)]
            row.token_ids += run
            row.histories.append(next_history(row.histories[-1], run[0]))
        output.slots.append(slot)
        output.token_ids.append(run)
        if row.params.logprobs is not None:
            first = row.num_loaded if start < row.num_loaded else start + 1
            output.logprobs[slot] = [marked(token_id, first + place) for place, token_id in enumerate(run)]
