"""Rows of a draft model's passes, against what the host says about each sequence, over many steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phonograph.kernels.torch.sampling import draw_keys
from phonograph.kernels.triton.step.draft_rows import DraftRows, first_pass, listed_pass, next_pass
from phonograph.kernels.triton.step.step_layout import SlotState, StepLayout

POISON, NOT_SAMPLED = -77, -2
SLOTS, TOKENS, SIZE, LONGEST, K = 5, 400, 4, 500, 3


class Sequence:
    """A sequence on the host: its tokens, how many the target has computed, and how many the draft model holds."""

    def __init__(self, rng: np.random.Generator, longest: int) -> None:
        self.tokens = rng.integers(0, 1000, longest + 40)
        self.prompt_len, self.longest = int(rng.integers(1, longest - 20)), longest
        self.computed = self.held = 0
        self.key = int(rng.integers(0, 1 << 62))
        self.parameters = rng.uniform(0, 1, 3).astype(np.float32)
        self.top_k = int(rng.integers(0, 9))


class Device:
    def __init__(self, device: torch.device, *, shifts: bool) -> None:
        self.device, self.shifts = device, shifts
        self.layout = StepLayout(SLOTS, TOKENS, max_appends=8, max_num_logits=SLOTS * (1 + K))
        self.state = SlotState.make(num_groups=1, max_num_seqs=SLOTS, max_blocks=1, device=device, most_drafts=K)
        self.rows = DraftRows.make(max_num_seqs=SLOTS, max_num_tokens=TOKENS, device=device)
        for tensor in (*self.state, *self.rows):
            tensor.fill_(POISON)
        self.table = torch.randint(0, 999, (SLOTS, LONGEST // SIZE + 20), dtype=torch.int32)

    def step(self, rng: np.random.Generator, batch: list[tuple[int, Sequence, int, int | None]], decodes: int) -> None:
        """Run both kernels behind a step, and compare.

        Args:
            rng: draws what is not read.
            batch: slot, sequence, tokens of the step, and how many tokens the step gave it; None if another sampler
                takes it, or if its prompt goes on.
            decodes: leading sequences that are decodes.
        """
        words, views = np.full(self.layout.num_words, POISON, np.int32), None
        views = self.layout.host_views(words)
        lens = [query_len for _, _, query_len, _ in batch]
        views.header[:3] = len(batch), sum(lens), decodes
        views.slots[: len(batch)] = [slot for slot, *_ in batch]
        views.query_starts[: len(batch) + 1] = starts = np.cumsum([0, *lens])
        views.start_at[: len(batch)] = [0 if one.computed == 0 else -1 for _, one, *_ in batch]
        state, input_ids = self.state, rng.integers(0, 1000, TOKENS)
        tokens, seq_lens = np.full(SLOTS * (1 + K), 5), np.zeros(SLOTS)
        history, self.reaching = np.full((SLOTS, LONGEST + 1), POISON), dict[int, bool]()
        expected: list[dict[str, np.ndarray]] = []
        for row, (slot, one, query_len, given) in enumerate(batch):
            start = starts[row]
            first_row = start if row < decodes else starts[decodes] + row - decodes
            seq_lens[row] = one.computed + query_len
            kept = query_len if row >= decodes else given or query_len
            input_ids[start : start + kept] = one.tokens[one.computed : one.computed + kept]
            if one.computed == 0:
                one.held = 0
                state.parameters[slot, :8] = torch.from_numpy(
                    np.array([0, one.top_k, 0, 0, 0, 0, one.prompt_len, one.longest], np.int32)
                )
                floats = state.parameters[slot].view(torch.float32)
                floats[[0, 2, 3]] = torch.from_numpy(one.parameters).to(self.device)
                state.parameters[slot, 4:6].view(torch.int64)[:] = one.key
            if given is None:
                tokens[first_row] = NOT_SAMPLED
                one.computed += query_len if row >= decodes else 1 + (query_len - 1) // 2
                state.num_computed[slot] = state.last_token[slot] = POISON
            else:
                one.computed += query_len - 1 + given if row >= decodes else given
                state.num_computed[slot] = one.computed
                state.last_token[slot] = int(one.tokens[one.computed])
            known = one.computed + (given is not None)
            if self.shifts:
                # A head has an entry for each computed token, of the token behind it.
                one.held = int(seq_lens[row]) - query_len
                known = one.computed
            position = one.held + np.arange(query_len)
            block = self.table[row].numpy()[np.minimum(position // SIZE, self.table.shape[1] - 1)]
            expected.append(
                {
                    "ids": np.where(position < known, one.tokens[position + self.shifts], -1),
                    "positions": np.minimum(position, one.longest - 1),
                    "slots": np.where(position < one.longest - 1, block * SIZE + position % SIZE, -1),
                }
            )
            one.held = min(one.held + query_len, known)
            self.reaching[slot] = given is not None if self.shifts else one.held > one.computed
            history[slot, : LONGEST + 1] = np.resize(one.tokens, LONGEST + 1)
        padded, num_tokens = min(SLOTS, len(batch) + 1), sum(lens)
        staging = torch.from_numpy(words).to(self.device)
        step_lens = torch.from_numpy(seq_lens).int().to(self.device)
        first_pass(
            staging, self.layout, state, self.rows, block_size=SIZE,
            num_reqs_padded=padded, num_tokens_padded=num_tokens + 3,
            tokens_L=torch.from_numpy(tokens).int().to(self.device),
            input_ids_T=torch.from_numpy(input_ids).int().to(self.device),
            seq_lens_R=step_lens, block_table_RN=self.table.to(self.device),
            history_RM=torch.from_numpy(history).int().to(self.device) if self.shifts else None,
        )  # fmt: skip
        found = DraftRows(*(tensor.cpu() for tensor in self.rows))
        for row, (slot, one, _, _) in enumerate(batch):
            wanted, span = expected[row], slice(starts[row], starts[row + 1])
            valid = wanted["ids"] >= 0
            assert (found.input_ids[span].numpy()[valid] == wanted["ids"][valid]).all()
            assert (found.positions[span].numpy() == wanted["positions"]).all()
            assert (found.slot_mapping[span].numpy() == wanted["slots"]).all()
            reaches = self.reaching[slot]
            assert found.sample_slots[row] == (slot if reaches else -1)
            assert self.shifts or found.ahead[slot] == reaches
            if reaches:
                last = starts[row] + int(np.flatnonzero(valid)[-1])
                assert found.last_rows[row] == last and found.input_ids[last] == one.tokens[one.computed]
                self.check_draw(found, row, one, one.computed + 1)
        assert (found.input_ids[num_tokens : num_tokens + 3] == 0).all()
        assert (found.slot_mapping[num_tokens : num_tokens + 3] == -1).all()
        assert found.query_start_loc[: padded + 1].tolist() == [min(row, len(batch)) for row in range(padded + 1)]
        assert (found.seq_lens[len(batch) : padded] == 0).all()
        for index in range(K):
            self.next(rng, batch, index, padded, self.table)
        numbers = [row for row, (_, _, _, given) in enumerate(batch[:decodes]) if given is None]
        self.listed(rng, batch, numbers, staging, step_lens, starts)

    def listed(
        self,
        rng: np.random.Generator,
        batch: list[tuple[int, Sequence, int, int | None]],
        numbers: list[int],
        staging: torch.Tensor,
        step_lens: torch.Tensor,
        starts: np.ndarray,
    ) -> None:
        """Run the passes of decodes that another sampler took, after it has, and compare."""
        size = len(numbers) + 1
        listed = torch.tensor([*numbers, -1], dtype=torch.int32, device=self.device)
        table = torch.zeros((size, self.table.shape[1]), dtype=torch.int32, device=self.device)
        for row in numbers:
            slot, one, *_ = batch[row]
            self.state.num_computed[slot], self.state.last_token[slot] = one.computed, int(one.tokens[one.computed])
            self.reaching[slot] = True
        listed_pass(
            staging, self.layout, self.state, self.rows, block_size=SIZE, listed_G=listed, seq_lens_R=step_lens,
            block_table_RN=self.table.to(self.device), listed_table_GN=table, shifts=self.shifts,
        )  # fmt: skip
        found, table = DraftRows(*(tensor.cpu() for tensor in self.rows)), table.cpu()
        for place, row in enumerate(numbers):
            slot, one, query_len, _ = batch[row]
            position = one.computed - self.shifts
            assert found.input_ids[place] == one.tokens[one.computed] and found.positions[place] == position
            block = int(self.table[row, position // SIZE])
            behind = position >= one.longest - 1
            assert found.slot_mapping[place] == (-1 if behind else block * SIZE + position % SIZE)
            assert found.seq_lens[place] == position + 1 and found.sample_slots[place] == slot
            context = int(step_lens[row]) - query_len
            assert found.last_rows[place] == starts[row] + one.computed - 1 - context
            used = min(position + K, one.longest - 1) // SIZE + 1
            assert torch.equal(table[place, :used], self.table[row, :used]) and not table[place, used:].any()
            self.check_draw(found, place, one, one.computed + 1)
        assert found.query_start_loc[: size + 1].tolist() == [*range(size), size - 1]
        assert [found.seq_lens[size - 1], found.sample_slots[size - 1], found.slot_mapping[size - 1]] == [0, -1, -1]
        for index in range(K):
            self.next(rng, [batch[row] for row in numbers], index, size, table)
        for row in numbers:
            self.state.num_computed[batch[row][0]] = self.state.last_token[batch[row][0]] = POISON

    def check_draw(self, found: DraftRows, row: int, one: Sequence, length: int) -> None:
        key = draw_keys(torch.tensor([one.key]), torch.tensor([length - one.prompt_len]))
        assert found.draw_keys[row] == key[0] and found.top_k[row] == one.top_k
        numbers = [found.temperature[row], found.top_p[row], found.min_p[row]]
        assert torch.equal(torch.stack(numbers), torch.from_numpy(one.parameters))

    def next(
        self,
        rng: np.random.Generator,
        batch: list[tuple[int, Sequence, int, int | None]],
        index: int,
        padded: int,
        table: torch.Tensor,
    ) -> None:
        tokens = torch.from_numpy(rng.integers(-1, 1000, SLOTS)).int()
        self.rows.tokens.copy_(tokens)
        before = self.state.drafts.cpu().clone()
        next_pass(
            self.state, self.rows, index=index, block_size=SIZE, num_reqs_padded=padded, shifts=self.shifts,
            block_table_RN=table.to(self.device),
        )  # fmt: skip
        found, drafts = DraftRows(*(tensor.cpu() for tensor in self.rows)), self.state.drafts.cpu()
        for row, (slot, one, _, _) in enumerate(batch):
            if not self.reaching[slot]:
                assert torch.equal(drafts[slot], before[slot])
                assert found.slot_mapping[row] == -1 and found.seq_lens[row] == 1
                continue
            assert drafts[slot, index] == tokens[row] and found.input_ids[row] == max(int(tokens[row]), 0)
            position = one.computed + 1 + index - self.shifts
            behind = position >= one.longest - 1
            assert found.positions[row] == min(position, one.longest - 1)
            assert found.seq_lens[row] == min(position, one.longest - 1) + 1
            place = int(table[row, position // SIZE]) * SIZE + position % SIZE
            assert found.slot_mapping[row] == (-1 if behind else place)
            self.check_draw(found, row, one, one.computed + 2 + index)
        assert (found.seq_lens[len(batch) : padded] == 0).all()


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("longest", [40, LONGEST])
def test_rows_of_all_passes(device: torch.device, longest: int, shifts: bool) -> None:
    """Prompts come in chunks; decodes have any number of tokens, and some are sampled elsewhere."""
    rng, made = np.random.default_rng(longest), Device(device, shifts=shifts)
    sequences: dict[int, Sequence] = {}
    reached = 0
    for _ in range(60):
        decodes: list[tuple[int, Sequence, int, int | None]] = []
        prefills: list[tuple[int, Sequence, int, int | None]] = []
        for slot in rng.permutation(SLOTS)[: int(rng.integers(1, SLOTS + 1))].tolist():
            one = sequences.get(slot)
            if one is None or one.computed + K + 2 > one.longest:
                one = sequences[slot] = Sequence(rng, longest)
            rest = one.prompt_len - one.computed
            if rest > 0:
                chunk = min(rest, int(rng.integers(1, 60 if longest < 100 else 350)), TOKENS // SLOTS * 2)
                whole = chunk == rest and rng.random() < 0.9
                prefills.append((slot, one, chunk, 1 if whole else None))
            elif rng.random() < 0.2:
                decodes.append((slot, one, int(rng.integers(1, 2 + K)), None))
            else:
                query_len = int(rng.integers(1, 2 + K))
                decodes.append((slot, one, query_len, int(rng.integers(1, query_len + 1))))
        while sum(one[2] for one in (*decodes, *prefills)) > TOKENS - 3:
            prefills.pop()
        if decodes or prefills:
            made.step(rng, [*decodes, *prefills], len(decodes))
            reached += sum(made.reaching[slot] for slot, *_ in decodes)
    assert reached > 10
