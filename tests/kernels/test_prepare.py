"""The prepare kernel against the host's way of filling a step's inputs, over several steps of random batches."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
import torch
from step_rows import draws_of_logits, rows_of

from phonograph.core.batch import BlockAppend, ScheduledBatch
from phonograph.core.blocks import blocks_for
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.kernels.torch.sampling import draw_keys
from phonograph.kernels.triton.step.prepare import apply_appends, prepare
from phonograph.kernels.triton.step.step_layout import START_WORDS, SlotState, StepLayout
from phonograph.runner.cpu_inputs import CpuInputs
from phonograph.sampling.failures import SlotFailures

POISON = -77


class Sequences:
    """The host's slot table, and the same state as a device has it, grown by random batches."""

    def __init__(
        self,
        *,
        slots: int,
        max_tokens: int,
        max_len: int,
        sizes: tuple[int, ...],
        device: torch.device,
        drafts: int = 0,
        encoder_lens: tuple[int, ...] = (),
        ragged: bool = False,
    ) -> None:
        self.encoder_lens, self.ragged, self.keeps_tokens = encoder_lens or (0,) * len(sizes), ragged, drafts % 2 > 0
        self.rng = np.random.default_rng(slots * max_len + sum(sizes))
        self.sizes, self.groups, self.drafts = sizes, range(len(sizes)), drafts
        self.inputs = CpuInputs(
            max_num_seqs=slots,
            max_num_tokens=max_tokens,
            max_model_len=max_len,
            block_sizes=sizes,
            max_num_logits=slots * (1 + drafts),
            encoder_lens=encoder_lens,
        )
        self.inputs.token_ids[:] = self.rng.integers(0, 1000, self.inputs.token_ids.shape)
        self.max_len = max_len
        self.computed = np.zeros(slots, np.int64)
        self.num_blocks = np.zeros((len(sizes), slots), np.int64)
        self.next_block = 1
        max_appends = slots * sum(blocks_for(max(max_len, *self.encoder_lens), size) for size in sizes)
        self.layout = StepLayout(
            slots, max_tokens, max_appends=max_appends, num_groups=len(sizes), max_num_logits=slots * (1 + drafts)
        )
        self.device = device
        shapes = (slots,), (slots,), (slots, START_WORDS), (slots, drafts), self.inputs.slot_blocks.shape
        self.state = SlotState(*(torch.full(shape, POISON, dtype=torch.int32, device=device) for shape in shapes))
        # By slot: what a sequence began with.
        self.parameters = self.rng.uniform(0, 1, (slots, 3)).astype(np.float32)
        self.top_k, self.prompt_lens = self.rng.integers(0, 9, slots), self.rng.integers(0, max_len, slots)
        self.stream_keys = self.rng.integers(-(2**63), 2**63, slots)
        self.started: set[int] = set()
        if ragged:
            self.inputs.slot_encoder_lens[:] = self.rng.integers(1, max(encoder_lens) + 1, slots)

    def encoded(self, group: int, slot: int) -> int:
        """Return the keys of cross attention of a sequence in a group, or 0."""
        return int(self.inputs.slot_encoder_lens[slot]) if self.encoder_lens[group] else 0

    def draw(
        self, query_lens: list[int], *, ahead: int = 0, slots: list[int] | None = None
    ) -> tuple[ScheduledBatch, dict[int, int]]:
        """Draw a batch of sequences in the slots, or random ones, with the blocks that it needs and `ahead` more."""
        slots = slots or self.rng.permutation(len(self.computed))[: len(query_lens)].tolist()
        appends: list[BlockAppend] = []
        for slot, query_len in zip(slots, query_lens, strict=True):
            if self.computed[slot] + query_len > self.max_len:  # a new sequence in this slot
                self.computed[slot] = self.num_blocks[:, slot] = 0
                self.started.discard(slot)
                if self.ragged:
                    self.inputs.slot_encoder_lens[slot] = self.rng.integers(1, max(self.encoder_lens) + 1)
            for group, size in enumerate(self.sizes):
                needed = blocks_for(self.encoded(group, slot) or int(self.computed[slot]) + query_len, size)
                needed += 0 if self.encoder_lens[group] else ahead
                needed = min(needed, self.inputs.slot_blocks.shape[2])
                start = int(self.num_blocks[group, slot])
                if needed > start:
                    ids = list(range(self.next_block, self.next_block + needed - start))
                    appends.append(BlockAppend(slot=slot, start=start, block_ids=ids, group=group))
                    self.next_block += len(ids)
                    self.num_blocks[group, slot] = needed
        num_decodes = len([*takewhile(lambda length: length <= 1 + self.drafts, query_lens)])
        batch = ScheduledBatch(
            slots=slots,
            query_lens=query_lens,
            context_lens=self.computed[slots].tolist(),
            samples=[True] * len(slots),
            num_decodes=num_decodes,
            num_decode_tokens=sum(query_lens[:num_decodes]),
            num_tokens=sum(query_lens),
            appends=appends,
        )
        # A decode's token is the slot's last one, or, as of a prompt's last chunk, given.
        kept = {slot: int(self.rng.integers(0, 2)) for slot in slots}
        self.computed[slots] += query_lens
        return batch, kept

    def upload(self, batch: ScheduledBatch, kept: dict[int, int]) -> torch.Tensor:
        staging = np.full(self.layout.num_words, POISON, np.int32)
        views = self.layout.host_views(staging)
        rows = batch.num_reqs
        views.header[:5] = rows, batch.num_tokens, batch.num_decodes, batch.num_logits, 1
        views.slots[:rows], views.samples[:rows] = batch.slots, batch.samples
        views.query_starts[: rows + 1] = np.cumsum([0, *batch.query_lens])
        views.block_sizes[:] = self.sizes[: len(views.block_sizes)]
        appends = {(append.group, append.slot): append for append in batch.appends}
        views.start_at[:rows] = -1
        num_tokens = num_appends = num_starts = 0
        for row, (slot, context, length) in enumerate(
            zip(batch.slots, batch.context_lens, batch.query_lens, strict=True)
        ):
            tokens = self.inputs.token_ids[slot, context : context + length]
            if row < batch.num_decodes and kept[slot] and slot in self.started:
                views.token_starts[row] = -1
                self.state.last_token[slot], self.state.num_computed[slot] = int(tokens[0]), context
                self.state.drafts[slot] = -1
                self.state.drafts[slot, : length - 1] = torch.from_numpy(tokens[1:])
            else:
                views.context_lens[row] = context
                if slot not in self.started:
                    self.started.add(slot)
                    views.start_at[row] = num_starts
                    self.start(views.starts[num_starts], slot)
                    num_starts += 1
                views.token_starts[row] = num_tokens
                views.tokens[num_tokens : num_tokens + length] = tokens
                num_tokens += length
        for group in self.groups:
            for row, slot in enumerate(batch.slots):
                views.append_starts[group, row] = num_appends
                if (group, slot) in appends:
                    ids = appends[group, slot].block_ids
                    views.append_at[group, row] = appends[group, slot].start
                    views.appends[num_appends : num_appends + len(ids)] = ids
                    num_appends += len(ids)
            views.append_starts[group, rows] = num_appends
        used = self.layout.used_words(num_appends=num_appends, num_tokens=num_tokens)
        assert (staging[used:] == POISON).all()
        staging[used:] = 0
        return torch.from_numpy(staging).to(self.device)

    def start(self, words: np.ndarray, slot: int) -> None:
        words.view(np.float32)[[0, 2, 3]] = self.parameters[slot]
        words[[1, 6, 7]] = self.top_k[slot], self.prompt_lens[slot], self.max_len + 1
        words[[8, 9]] = slot % 2, self.prompt_lens[slot] + slot % 5
        words.view(np.int64)[2] = self.stream_keys[slot]

    def check_sampling(self, staging: torch.Tensor, batch: ScheduledBatch) -> None:
        """Each row has what its sequence began with, and the key of its draw."""
        rows, found = rows_of(batch), self.layout.sampling_views(staging.cpu())
        slots = rows.slots[rows.owners]
        for name, column in (("temperature", 0), ("top_p", 1), ("min_p", 2)):
            assert getattr(found, name)[: len(slots)].tolist() == self.parameters[slots, column].tolist(), name
        assert found.top_k[: len(slots)].tolist() == self.top_k[slots].tolist()
        lengths = draws_of_logits(rows)
        assert found.row_slots[: len(slots)].tolist() == slots.tolist()
        assert found.lengths[: len(slots)].tolist() == lengths.tolist()
        draws = lengths - self.prompt_lens[slots]
        must_not_end = draws < slots % 5
        assert found.edits[: len(slots)].tolist() == (slots % 2 * (1 + must_not_end)).tolist()
        wanted = draw_keys(torch.from_numpy(self.stream_keys[slots]), torch.from_numpy(draws))
        assert torch.equal(found.draw_keys[: len(slots)], wanted)

    def check(
        self,
        query_lens: list[int],
        *,
        num_reqs: int,
        num_tokens: int,
        ahead: int = 0,
        slots: list[int] | None = None,
    ) -> None:
        batch, kept = self.draw(query_lens, ahead=ahead, slots=slots)
        self.inputs.take_over(batch, SlotFailures())
        key = GraphKey(GraphSet.MIXED, num_tokens, num_reqs)
        for array in (self.inputs.input_ids_np, self.inputs.positions_np, self.inputs.slot_mappings_np):
            array[:] = POISON
        for array in (
            self.inputs.query_start_loc_np,
            self.inputs.seq_lens_np,
            self.inputs.slots_np,
            self.inputs.logits_rows_np,
            self.inputs.encoder_lens_np,
        ):
            array[:] = POISON
        self.inputs.write(rows_of(batch), key)
        staging = self.upload(batch, kept)
        names = ("input_ids", "positions", "query_start_loc", "seq_lens", "slots", "logits_rows")
        expected = {name: getattr(self.inputs, name) for name in names}
        for name in ("slot_mappings", "block_tables"):
            expected[name] = torch.stack(getattr(self.inputs, name))
        if any(self.encoder_lens):
            names = (*names, "encoder_lens")
            expected["encoder_lens"] = self.inputs.encoder_lens
            for mapping, length in zip(expected["slot_mappings"], self.encoder_lens, strict=True):
                mapping[:num_tokens] = torch.where(torch.tensor(length > 0), -1, mapping[:num_tokens])
        got = {name: torch.full_like(tensor, POISON).to(self.device) for name, tensor in expected.items()}
        # Wider than needed, as rows of it are apart.
        history = torch.full((len(self.computed), self.max_len + 3), POISON, dtype=torch.int32, device=self.device)
        prepare(
            staging,
            self.layout,
            self.state,
            block_sizes=self.sizes,
            num_reqs_padded=num_reqs,
            num_tokens_padded=num_tokens,
            input_ids_T=got["input_ids"],
            positions_T=got["positions"],
            slot_mappings_GT=got["slot_mappings"],
            query_start_loc=got["query_start_loc"],
            seq_lens_R=got["seq_lens"],
            slots_R=got["slots"],
            block_tables_GRN=got["block_tables"],
            logits_rows_L=got["logits_rows"],
            encoder_lens=self.encoder_lens,
            encoder_lens_R=got.get("encoder_lens"),
            slot_encoder_lens_R=torch.tensor(self.inputs.slot_encoder_lens, device=self.device)
            if self.ragged
            else None,
            history_RM=history if self.keeps_tokens else None,
        )
        wanted_history = torch.full_like(history, POISON, device="cpu")
        for row in range(batch.num_decodes, batch.num_reqs if self.keeps_tokens else 0):
            places = slice(batch.context_lens[row], batch.context_lens[row] + batch.query_lens[row])
            slot = batch.slots[row]
            wanted_history[slot, places] = torch.from_numpy(self.inputs.token_ids[slot, places])
        assert torch.equal(history.cpu(), wanted_history)
        if self.drafts:
            expected["logits_rows"][batch.num_logits :] = 0
        for name in (*names, "slot_mappings"):
            assert torch.equal(got[name].cpu(), expected[name]), name
        blocks = got["block_tables"].cpu()
        state = self.state.block_tables.cpu()
        self.check_sampling(staging, batch)
        for group, size in enumerate(self.sizes):
            for row, slot in enumerate(batch.slots):
                num_tokens = batch.context_lens[row] + batch.query_lens[row]
                used = blocks_for(self.encoded(group, slot) or num_tokens, size)
                assert torch.equal(blocks[group, row, :used], expected["block_tables"][group, row, :used])
                # With drafts also those of keys that the passes of a draft model write behind the step.
                used = blocks_for(self.encoded(group, slot) or num_tokens + self.drafts, size)
                assert torch.equal(blocks[group, row, :used], state[group, slot, :used])
                assert (blocks[group, row, used:] == POISON).all()
                held = int(self.num_blocks[group, slot])
                assert state[group, slot, :held].tolist() == self.inputs.slot_blocks[group, slot, :held].tolist()
        assert (blocks[:, batch.num_reqs :] == POISON).all()
        sampled = self.layout.sampling_views(staging).sample_slots.cpu().tolist()
        wanted = np.array(batch.slots)[rows_of(batch).owners].tolist()
        padded = len(sampled) if self.drafts else num_reqs
        assert sampled[:padded] == wanted + [-1] * (padded - len(wanted))
        assert sampled[padded:] == [0] * (len(sampled) - padded)


@pytest.mark.parametrize("sizes", [(4,), (4, 4), (4, 8, 2)])
def test_steps_of_mixed_batches(device: torch.device, sizes: tuple[int, ...]) -> None:
    """Tables of several KV groups, of equal or unlike blocks, come from one launch."""
    sequences = Sequences(slots=6, max_tokens=64, max_len=80, sizes=sizes, device=device)
    sequences.check([1], num_reqs=1, num_tokens=1)
    sequences.check([1, 1, 1, 30], num_reqs=6, num_tokens=40)
    sequences.check([64], num_reqs=6, num_tokens=64)
    sequences.check([1, 1, 1, 1, 1, 1], num_reqs=6, num_tokens=6, ahead=3)
    sequences.check([1, 2, 9, 17], num_reqs=4, num_tokens=29)
    sequences.check([1, 1, 1], num_reqs=5, num_tokens=5)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("sizes", "encoder_lens"), [((4, 4), (0, 90)), ((8, 4), (3, 0)), ((2, 1), (0, 700))])
def test_a_group_of_cross_attention(
    device: torch.device, sizes: tuple[int, ...], encoder_lens: tuple[int, ...], ragged: bool
) -> None:
    """Each sequence has the keys of its encoder, all or some, a padding row none, and no token writes a key."""
    of_encoder = {"encoder_lens": encoder_lens, "ragged": ragged}
    sequences = Sequences(slots=6, max_tokens=64, max_len=80, sizes=sizes, device=device, **of_encoder)
    sequences.check([1], num_reqs=1, num_tokens=1)
    sequences.check([1, 1, 30], num_reqs=6, num_tokens=40, ahead=1)
    sequences.check([64], num_reqs=3, num_tokens=64)
    sequences.check([1, 1, 1, 1, 1], num_reqs=6, num_tokens=6)
    sequences.check([20, 30], num_reqs=2, num_tokens=50)


@pytest.mark.parametrize("sizes", [(4,), (4, 8)])
@pytest.mark.parametrize("drafts", [1, 3, 6])
def test_steps_with_drafts(device: torch.device, sizes: tuple[int, ...], drafts: int) -> None:
    """Each token of a decode has a row of logits with the key of its own draw, and of a prefill the last."""
    sequences = Sequences(slots=6, max_tokens=64, max_len=80, sizes=sizes, device=device, drafts=drafts)
    most = 1 + drafts
    sequences.check([most] * 6, num_reqs=6, num_tokens=6 * most)
    sequences.check([1, most, 2, 1], num_reqs=6, num_tokens=4 * most, ahead=1)
    for _ in range(3):
        sequences.check([1, most, 9, 30], num_reqs=6, num_tokens=64)
        sequences.check([2, 1, most, 1, 1, 2], num_reqs=6, num_tokens=6 * most)
    sequences.check([20], num_reqs=6, num_tokens=20)


def test_drafts_beyond_the_end_of_a_sequence(device: torch.device) -> None:
    """They write no keys, and their positions have a rotation. A draft that there is not is token 0."""
    sequences = Sequences(slots=2, max_tokens=16, max_len=40, sizes=(4,), device=device, drafts=3)
    sequences.check([4, 9], num_reqs=2, num_tokens=13, slots=[0, 1])
    sequences.state.parameters[1, 7] = 12
    sequences.state.num_computed[1], sequences.state.last_token[1] = 9, 77
    sequences.state.drafts[1] = torch.tensor([5, -1, -1])
    batch = ScheduledBatch(
        slots=[1], query_lens=[4], context_lens=[9], samples=[True], num_decodes=1, num_decode_tokens=4, num_tokens=4
    )
    staging = sequences.upload(batch, {1: 1})
    sequences.state.num_computed[1], sequences.state.last_token[1] = 9, 77
    sequences.state.drafts[1] = torch.tensor([5, -1, -1])
    ints, longs = (torch.full((16,), POISON, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64))
    positions, mappings = longs.clone(), longs[None].clone()
    prepare(
        staging,
        sequences.layout,
        sequences.state,
        block_sizes=(4,),
        num_reqs_padded=1,
        num_tokens_padded=6,
        input_ids_T=ints,
        positions_T=positions,
        slot_mappings_GT=mappings,
        query_start_loc=ints.clone(),
        seq_lens_R=(lens := ints.clone()),
        slots_R=ints.clone(),
        block_tables_GRN=ints[None].clone()[..., None].repeat(1, 1, 12),
        logits_rows_L=longs[:8],
    )
    table = sequences.state.block_tables[0, 1].tolist()
    assert ints[:6].tolist() == [77, 5, 0, 0, 0, 0] and lens[0] == 13
    assert positions[:6].tolist() == [9, 10, 11, 11, 0, 0]
    assert mappings[0, :6].tolist() == [table[2] * 4 + 1, table[2] * 4 + 2, -1, -1, -1, -1]
    views = sequences.layout.sampling_views(staging)
    assert views.lengths[:4].tolist() == [10, 11, 12, 13] and views.sample_slots[:8].tolist() == [1] * 4 + [-1] * 4


@pytest.mark.parametrize("sizes", [(1,), (1, 3)])
def test_long_query_and_table(device: torch.device, sizes: tuple[int, ...]) -> None:
    """Several programs share the tokens of one request and its block table."""
    sequences = Sequences(slots=2, max_tokens=1500, max_len=1600, sizes=sizes, device=device)
    sequences.check([1, 1300], num_reqs=2, num_tokens=1500)
    sequences.check([600], num_reqs=1, num_tokens=700)
    sequences.check([1, 1], num_reqs=2, num_tokens=2, ahead=300)


def test_programs_take_several_parts_of_a_long_table(device: torch.device) -> None:
    """With many requests a row has one program, which takes its table 256 blocks at a time."""
    sequences = Sequences(slots=520, max_tokens=64, max_len=700, sizes=(1,), device=device)
    sequences.check([5, 1], num_reqs=520, num_tokens=6, ahead=600, slots=[3, 7])
    sequences.computed[[3, 7]] = 590
    sequences.check([40, 1], num_reqs=520, num_tokens=41, slots=[7, 3])


def test_a_long_query_with_a_short_table(device: torch.device) -> None:
    """As many programs as the tokens need."""
    sequences = Sequences(slots=2, max_tokens=1500, max_len=1600, sizes=(64,), device=device)
    sequences.check([1, 1300], num_reqs=2, num_tokens=1500)


def test_new_blocks_in_further_chunks_of_a_table_are_kept(device: torch.device) -> None:
    """A request of a batch padded to 300 has three programs, each for 256 entries at a time of its table."""
    sequences = Sequences(slots=300, max_tokens=300, max_len=1600, sizes=(1,), device=device)
    sequences.check([1, 1], num_reqs=300, num_tokens=300, ahead=900)


def test_layout_views_share_memory_and_are_aligned() -> None:
    layout = StepLayout(max_num_seqs=5, max_num_tokens=7, max_appends=3, num_groups=2)
    words = np.zeros(layout.num_words, np.int32)
    for number, view in enumerate(layout.host_views(words), start=1):
        assert not view.any()  # no field overlaps those before it
        view[...] = number
    staging = torch.from_numpy(words)
    views = layout.sampling_views(staging)
    host = layout.host_views(words)
    host.header[:5] = 5, 7, 3, 6, 1
    assert layout.num_logits(staging).tolist() == [6]
    for name in (
        "row_slots",
        "sample_slots",
        "lengths",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "edits",
        "draw_keys",
    ):
        assert not getattr(views, name).any() and getattr(views, name).shape == (5,), "no field of the host's"
    assert host.starts.shape == (5, START_WORDS) and host.append_starts.shape == (2, 6)
    assert views.draw_keys.dtype == torch.int64
    assert all(where.start % 4 == 0 for _, where in layout.fields.values())
    assert layout.used_words(num_appends=0, num_tokens=7) <= layout.num_words
    assert layout.used_words(num_appends=2, num_tokens=0) == layout.fields["appends"][1].start + 2


def test_appends_ahead(device: torch.device) -> None:
    table = torch.full((3, 9), POISON, dtype=torch.int32, device=device)
    appends = torch.tensor([[2, 0, 2], [0, 8, 3], [11, 12, 13]], dtype=torch.int32, device=device)
    apply_appends(appends, table)
    expected = torch.full((3, 9), POISON, dtype=torch.int32)
    expected[2, 0], expected[0, 8], expected[2, 3] = 11, 12, 13
    assert torch.equal(table.cpu(), expected)
    apply_appends(appends[:, :0], table)
    assert torch.equal(table.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
def test_large_steps(device: torch.device, block_size: int) -> None:
    sequences = Sequences(slots=300, max_tokens=8192, max_len=20000, sizes=(block_size,), device=device)
    sequences.check([8192], num_reqs=300, num_tokens=8192)
    sequences.check([1] * 256, num_reqs=256, num_tokens=256)
    sequences.check([1] * 100 + [5000, 3000], num_reqs=300, num_tokens=8192)
    sequences.check([1] * 299 + [4001], num_reqs=300, num_tokens=4608, ahead=7)
    sequences.check([1] * 255, num_reqs=256, num_tokens=256)
