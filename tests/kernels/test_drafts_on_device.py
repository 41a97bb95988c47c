"""Acceptance and prompt lookup on the device, against what the host does with the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from step_rows import draws_of_logits

from phonograph.core.batch import ScheduledBatch
from phonograph.kernels.triton.step.accept_drafts import DRAFTS_SHIFT, accept
from phonograph.kernels.triton.step.prompt_lookup import propose_ngrams
from phonograph.kernels.triton.step.step_layout import SlotState, StepLayout
from phonograph.runner.step_inputs import StepRows, rows_of
from phonograph.speculation.ngram import NgramProposer

POISON = -77
SLOTS, TOKENS = 9, 120


def accepted_runs(token_ids: list[int], owners: np.ndarray, drafts: np.ndarray) -> list[list[int]]:
    """Return the tokens that each sequence gets: of its first row, and of each row behind a draft that was right."""
    runs: list[list[int]] = []
    before, accepts = -1, False
    for owner, token_id, draft in zip(owners.tolist(), token_ids, drafts.tolist(), strict=True):
        if owner != before:
            runs.append([token_id])
        elif accepts:
            runs[-1].append(token_id)
        accepts = token_id == draft and (accepts or owner != before)
        before = owner
    return runs


class Device:
    """The device's memory behind the sampling of a step. Everything that a kernel writes is poisoned."""

    def __init__(self, drafts: int, longest: int, device: torch.device) -> None:
        self.drafts, self.device = drafts, device
        rows = SLOTS * (1 + drafts)
        self.layout = StepLayout(SLOTS, TOKENS, max_appends=8, max_num_logits=rows)
        self.state = SlotState.make(num_groups=1, max_num_seqs=SLOTS, max_blocks=3, device=device, most_drafts=drafts)
        for tensor in self.state:
            tensor.fill_(POISON)
        self.history = torch.full((SLOTS, longest), POISON, dtype=torch.int32, device=device)
        self.counts = torch.full((SLOTS,), POISON, dtype=torch.int32, device=device)
        self.tokens = torch.full((rows,), POISON, dtype=torch.int32, device=device)
        self.input_ids = torch.full((TOKENS,), POISON, dtype=torch.int32, device=device)

    def stage(self, rows: StepRows) -> torch.Tensor:
        batch, words = rows.batch, np.full(self.layout.num_words, POISON, np.int32)
        views = self.layout.host_views(words)
        views.header[:5] = batch.num_reqs, batch.num_tokens, batch.num_decodes, 0, batch.num_logits
        views.slots[: batch.num_reqs] = batch.slots
        views.query_starts[: batch.num_reqs + 1] = np.cumsum([0, *batch.query_lens])
        start = self.layout.fields["lengths"][1].start
        words[start : start + batch.num_logits] = draws_of_logits(rows)
        return torch.from_numpy(words).to(self.device)


def drawn(rng: np.random.Generator, drafts: int, longest: int) -> StepRows:
    """Draw decodes with any number of drafts, and prefills, some shorter than a decode can be."""
    num_decodes, num_prefills = int(rng.integers(0, 6)), int(rng.integers(0, 4))
    num_decodes += not num_decodes + num_prefills
    lens = [*rng.integers(1, 2 + drafts, num_decodes), *rng.integers(1, 12, num_prefills)]
    batch = ScheduledBatch(
        slots=rng.permutation(SLOTS)[: len(lens)].tolist(),
        query_lens=[int(length) for length in lens],
        context_lens=rng.integers(0, longest - 14, len(lens)).tolist(),
        samples=[True] * len(lens),
        num_decodes=num_decodes,
        num_decode_tokens=int(sum(lens[:num_decodes])),
        num_tokens=int(sum(lens)),
    )
    return rows_of(batch, np.zeros(SLOTS, np.int64))


@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_runs_and_state_are_those_of_the_host(device: torch.device, drafts: int) -> None:
    rng = np.random.default_rng(drafts)
    for _ in range(20):
        made, rows = Device(drafts, 40, device), drawn(rng, drafts, 40)
        batch, last = rows.batch, sum(rows.logits_spans()) - 1
        # Few tokens, so that drafts are often right; some rows have none, and other samplers take some.
        tokens = rng.integers(-1, 2, rows.num_logits)
        apart = rng.random(batch.num_reqs) < 0.2
        tokens[apart[rows.owners]] = -2
        input_ids = rng.integers(0, 2, batch.num_tokens)
        made.tokens[: len(tokens)] = torch.from_numpy(tokens)
        made.input_ids[: len(input_ids)] = torch.from_numpy(input_ids)
        history = torch.from_numpy(rng.integers(0, 9, made.history.shape).astype(np.int32))
        made.history.copy_(history)
        own = torch.from_numpy(rng.integers(-1, 2, (SLOTS, drafts)).astype(np.int32))
        made.state.drafts.copy_(own)
        staging, edits = made.stage(rows), rng.integers(0, 3, batch.num_reqs)
        made.layout.sampling_views(staging).edits[: rows.num_logits] = torch.from_numpy(edits[rows.owners])
        words = torch.from_numpy(rng.integers(0, 1 << 30, (SLOTS, 2)).astype(np.int32)).to(device)
        counted = words.cpu().numpy().copy()
        accept(
            staging,
            made.layout,
            made.state,
            num_reqs_padded=min(SLOTS, batch.num_reqs + 2),
            tokens_L=made.tokens,
            input_ids_T=made.input_ids,
            counts_R=made.counts,
            history_RM=made.history,
            words_RV=words,
        )
        behind = np.append(input_ids, 0)[1 : rows.num_logits + 1]
        # Only drafts of decodes are read: the rows of prefills are last rows.
        runs = accepted_runs(tokens.tolist(), rows.owners, np.where(np.isin(np.arange(len(behind)), last), -9, behind))
        counts, state = made.counts.cpu(), SlotState(*(tensor.cpu() for tensor in made.state))
        for row, (slot, run) in enumerate(zip(batch.slots, runs, strict=True)):
            length = int(draws_of_logits(rows)[rows.owners == row][0])
            if apart[row]:
                assert counts[row] == 1
                assert state.last_token[slot] == state.num_computed[slot] == POISON
                assert torch.equal(state.drafts[slot], own[slot])
            else:
                depth = batch.query_lens[row] - 1 if row < batch.num_decodes else 0
                assert counts[row] == len(run) + (int((own[slot, :depth] >= 0).sum()) << DRAFTS_SHIFT)
                assert state.last_token[slot] == max(run[-1], 0)
                assert state.num_computed[slot] == length - 1 + len(run)
                history[slot, length : length + len(run)] = torch.tensor(run).clamp(min=0)
                if edits[row]:
                    counted[slot] += np.bincount([token for token in run if token >= 0], minlength=2)
                assert (state.drafts[slot] == -1).all()
        assert torch.equal(made.history.cpu(), history) and (words.cpu().numpy() == counted).all()
        unused = [slot for slot in range(SLOTS) if slot not in batch.slots]
        assert torch.equal(state.drafts[unused], own[unused]) and (counts[batch.num_reqs :] == POISON).all()


@pytest.mark.parametrize("shares", [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.8, 0.5, 0.2], [1.0, 1.0, 1.0]])
def test_synthetic_shares_are_kept(device: torch.device, shares: list[float]) -> None:
    """A share of the sequences with all drafts keeps the first, a smaller one the first two; samples do not matter."""
    rng, numbers = np.random.default_rng(3), np.zeros(5)
    for _ in range(60):
        made = Device(3, 40, device)
        batch = ScheduledBatch(
            slots=rng.permutation(SLOTS).tolist(), query_lens=[4] * (SLOTS - 1) + [9], context_lens=[5] * SLOTS,
            samples=[True] * SLOTS, num_decodes=SLOTS - 1, num_decode_tokens=4 * (SLOTS - 1), num_tokens=4 * SLOTS + 5,
        )  # fmt: skip
        rows = rows_of(batch, np.zeros(SLOTS, np.int64))
        made.tokens.copy_(torch.from_numpy(rng.integers(0, 99, len(made.tokens))))
        staging = made.stage(rows)
        made.layout.sampling_views(staging).draw_keys.copy_(torch.from_numpy(rng.integers(0, 1 << 62, SLOTS * 4)))
        accept(
            staging,
            made.layout,
            made.state,
            num_reqs_padded=SLOTS,
            tokens_L=made.tokens,
            input_ids_T=made.input_ids,
            counts_R=made.counts,
            history_RM=made.history,
            synthetic_K=torch.tensor(shares, device=device),
        )
        lengths = made.counts.cpu().numpy() & (1 << DRAFTS_SHIFT) - 1
        assert lengths[-1] == 1 and (made.counts.cpu()[:-1] >> DRAFTS_SHIFT == 3).all()
        numbers += np.bincount(lengths[:-1], minlength=5)
        last = made.state.last_token.cpu()[batch.slots[:-1]].numpy()
        assert (last == made.tokens.cpu().numpy()[4 * np.arange(SLOTS - 1) + lengths[:-1] - 1]).all()
    found = 1 - np.cumsum(numbers)[1:4] / numbers.sum()
    assert np.abs(found - shares).max() < (0.08 if 0.8 in shares else 1e-9)


def test_a_history_ends_with_the_context(device: torch.device) -> None:
    """Tokens behind the longest sequence are dropped, not written into the next slot."""
    made = Device(3, 10, device)
    batch = ScheduledBatch(
        slots=[2], query_lens=[4], context_lens=[8], samples=[True], num_decodes=1, num_decode_tokens=4, num_tokens=4
    )
    made.tokens[:4] = torch.tensor([5, 6, 7, 8])
    made.input_ids[:4] = torch.tensor([4, 5, 6, 7])
    made.state.drafts.fill_(-1)
    accept(
        made.stage(rows_of(batch, np.zeros(SLOTS, np.int64))),
        made.layout,
        made.state,
        num_reqs_padded=1,
        tokens_L=made.tokens,
        input_ids_T=made.input_ids,
        counts_R=made.counts,
        history_RM=made.history,
    )
    assert made.counts[0] == 4 and made.state.num_computed[2] == 12 and made.state.last_token[2] == 8
    assert made.history[2].tolist() == [POISON] * 9 + [5] and (made.history[3] == POISON).all()


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (3, 5), (2, 200)])
@pytest.mark.parametrize("vocabulary", [1, 2, 5])
def test_lookups_are_those_of_the_host(device: torch.device, shortest: int, longest: int, vocabulary: int) -> None:
    """Histories within one block of places and beyond it; with one token every place matches."""
    rng, drafts = np.random.default_rng(vocabulary * longest), 3
    proposer = NgramProposer(shortest=shortest, longest=longest)
    found = 0
    for width in (40, 9000):
        made, rows = Device(drafts, width, device), drawn(rng, drafts, 40)
        history = rng.integers(0, vocabulary, (SLOTS, width)).astype(np.int32)
        made.history.copy_(torch.from_numpy(history))
        computed = rng.integers(0, min(width - 1, 5000 if vocabulary > 1 else 300), SLOTS)
        computed[rows.batch.slots[0]] = 0
        made.state.num_computed.copy_(torch.from_numpy(computed))
        apart = rng.random(rows.batch.num_reqs) < 0.3
        made.tokens[: rows.num_logits] = torch.from_numpy(np.where(apart[rows.owners], -2, 1))
        propose_ngrams(
            made.stage(rows),
            made.layout,
            made.state,
            num_reqs_padded=rows.batch.num_reqs,
            tokens_L=made.tokens,
            history_RM=made.history,
            shortest=shortest,
            longest=longest,
        )
        for row, slot in enumerate(rows.batch.slots):
            wanted = proposer.propose(history[slot, : computed[slot] + 1], drafts).tolist()
            found += len(wanted)
            if apart[row] or not wanted:
                assert (made.state.drafts[slot] == POISON).all()
            else:
                assert made.state.drafts[slot].tolist() == wanted + [-1] * (drafts - len(wanted))
    assert found or longest == 200 or vocabulary == 5
