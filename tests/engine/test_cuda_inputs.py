"""Inputs of a GPU, prepared by the kernel, are those of the CPU, over the steps of a scheduler under pressure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scheduling import add, make_scheduler, request
from step_rows import rows_of

from phonograph.core.batch import BlockAppend, NewSequence, ScheduledBatch, StepOutput
from phonograph.core.sampling_params import SamplingParams
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.runner.cpu_inputs import CpuInputs
from phonograph.sampling.failures import SlotFailures

cuda_inputs = pytest.importorskip("phonograph.runner.cuda.cuda_inputs")

SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_tokens": 16, "max_model_len": 64, "block_sizes": (4,)}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COUNTS = ("num_reqs", "num_decodes", "num_tokens", "num_decode_tokens", "max_query_len")


def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(*args, **kwargs)


@pytest.mark.parametrize("most_appends", [2, 4096])
def test_steps_of_a_scheduler(most_appends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads that hold few blocks send the rest ahead."""
    monkeypatch.setattr(cuda_inputs, "_MAX_APPENDS", most_appends)
    rng = np.random.default_rng(most_appends)
    on_cpu, on_gpu = CpuInputs(**SIZES), cuda_inputs.CudaInputs(**SIZES, vocab_size=99, device=DEVICE)
    scheduler = make_scheduler(num_blocks=16)
    for name in "abcde":
        add(scheduler, request(name, int(rng.integers(1, 30)), max_tokens=int(rng.integers(20, 34))))
    preempted = 0
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        preempted = scheduler.stats.num_preemptions
        key = GraphKey(GraphSet.MIXED, 16, 4) if rng.random() < 0.7 else None
        for inputs in (on_cpu, on_gpu):
            inputs.take_over(batch, SlotFailures())
        rows = rows_of(batch)
        (wanted,) = on_cpu.write(rows, key)
        with monkeypatch.context() as patch:
            if DEVICE.type == "cpu":
                patch.setattr(torch, "empty", unpinned)
            # The host's lengths of decodes may be upper bounds, which the device does not read.
            more = np.where(np.arange(batch.num_reqs) < batch.num_decodes, rng.integers(0, 9, batch.num_reqs), 0)
            bounds = replace(rows, context_lens=rows.context_lens + more)
            (common,) = on_gpu.write(bounds, key, sampling=None)
        num_reqs, num_tokens = (key.num_reqs, key.num_tokens) if key else (batch.num_reqs, batch.num_tokens)
        on_gpu.prepare(num_reqs=num_reqs, num_tokens=num_tokens)
        assert {name: getattr(common, name) for name in COUNTS} == {name: getattr(wanted, name) for name in COUNTS}
        for name in ("query_start_loc", "seq_lens", "slot_mapping"):
            assert getattr(common, name).tolist() == getattr(wanted, name).tolist(), name
        assert np.array_equal(common.query_start_loc_cpu, wanted.query_start_loc_cpu)
        assert np.array_equal(common.seq_lens_cpu[: batch.num_reqs] - more, wanted.seq_lens_cpu[: batch.num_reqs])
        assert not common.seq_lens_cpu[batch.num_reqs :].any()
        assert common.max_seq_len == common.seq_lens_cpu.max()
        for name, count in (
            ("input_ids", num_tokens),
            ("positions", num_tokens),
            ("logits_rows", num_reqs),
            ("slots", num_reqs),
        ):
            assert getattr(on_gpu, name)[:count].tolist() == getattr(on_cpu, name)[:count].tolist(), name
        for row, seq_len in enumerate(wanted.seq_lens.tolist()):
            used = -(-seq_len // 4)
            assert common.block_table[row, :used].tolist() == wanted.block_table[row, :used].tolist()
        slots = [slot for slot, samples in zip(batch.slots, batch.samples, strict=True) if samples]
        tokens = rng.integers(100, 1000, len(slots)).tolist()
        on_cpu.append_tokens(slots, [[token] for token in tokens])
        on_gpu.state.last_token[slots] = torch.tensor(tokens, dtype=torch.int32, device=DEVICE)
        seq_lens = dict(zip(batch.slots, wanted.seq_lens.tolist(), strict=False))
        on_gpu.state.num_computed[slots] = torch.tensor([seq_lens[slot] for slot in slots], dtype=torch.int32).to(
            DEVICE
        )
        scheduler.update(batch, StepOutput(slots=slots, token_ids=[[token] for token in tokens]))
    assert preempted, "sequences are loaded again with their output"


@pytest.mark.parametrize("most_appends", [2, 4096])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 8, 2)])
def test_steps_of_several_groups(most_appends: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sliding group's first blocks may be missing: its appends then begin behind them."""
    monkeypatch.setattr(cuda_inputs, "_MAX_APPENDS", most_appends)
    rng = np.random.default_rng(most_appends + len(sizes))
    settings = SIZES | {"block_sizes": sizes}
    on_cpu, on_gpu = CpuInputs(**settings), cuda_inputs.CudaInputs(**settings, vocab_size=99, device=DEVICE)
    for _ in range(12):
        slots = rng.permutation(4)[: rng.integers(1, 5)].tolist()
        query_lens = sorted(rng.integers(1, 5, len(slots)).tolist())
        context_lens = [int(rng.integers(0, 65 - length)) for length in query_lens]
        token_ids = {slot: rng.integers(0, 99, 64).tolist() for slot in slots}
        batch = ScheduledBatch(
            slots=slots,
            query_lens=query_lens,
            context_lens=context_lens,
            samples=[True] * len(slots),
            num_tokens=sum(query_lens),
            new=[new_sequence(slot, token_ids[slot]) for slot in slots],
            appends=[
                BlockAppend(slot=slot, start=start, block_ids=rng.integers(0, 999, end - start).tolist(), group=group)
                for slot, query, context in zip(slots, query_lens, context_lens, strict=True)
                for group, size in enumerate(sizes)
                for start, end in [(max(0, context - 9 * group) // size, -(-(context + query) // size))]
            ],
        )
        rng.shuffle(batch.appends)
        for inputs in (on_cpu, on_gpu):
            inputs.take_over(batch, SlotFailures())
        rows, key = rows_of(batch), GraphKey(GraphSet.MIXED, 16, 4)
        wanted = on_cpu.write(rows, key)
        with monkeypatch.context() as patch:
            if DEVICE.type == "cpu":
                patch.setattr(torch, "empty", unpinned)
            commons = on_gpu.write(rows, key, sampling=None)
        on_gpu.prepare(num_reqs=4, num_tokens=16)
        assert len(commons) == len(sizes)
        for group, size in enumerate(sizes):
            assert commons[group].slot_mapping.tolist() == wanted[group].slot_mapping.tolist()
            for row, seq_len in enumerate(wanted[0].seq_lens.tolist()):
                used = -(-seq_len // size)
                got, expected = commons[group].block_table[row, :used], wanted[group].block_table[row, :used]
                assert got.tolist() == expected.tolist()


def new_sequence(slot: int, token_ids: list[int]) -> NewSequence:
    return NewSequence(
        slot=slot, request_id=str(slot), token_ids=token_ids, prompt_len=64, num_computed=0, params=SamplingParams()
    )
