"""Inputs of a step on the CPU, padding and stale values included."""

from __future__ import annotations

from typing import Any

import numpy as np
from step_rows import rows_of

from phonograph.attention.metadata import CommonMetadata
from phonograph.core.batch import BlockAppend, NewSequence, ScheduledBatch
from phonograph.core.blocks import most_step_tokens
from phonograph.core.kv_group import KVGroup
from phonograph.core.sampling_params import SamplingParams
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.runner.cpu_inputs import CpuInputs
from phonograph.sampling.failures import SlotFailures


def new(slot: int, token_ids: list[int], num_computed: int = 0) -> NewSequence:
    return NewSequence(
        slot=slot,
        request_id=str(slot),
        token_ids=token_ids,
        prompt_len=len(token_ids),
        num_computed=num_computed,
        params=SamplingParams(),
        end_token_ids=(),
        sample_index=0,
        grammar=None,
    )


def test_a_step_behind_a_longer_one_padded_to_its_graph() -> None:
    inputs = CpuInputs(max_num_seqs=4, max_num_tokens=16, max_model_len=32, block_sizes=(4,))

    def write(batch: ScheduledBatch, key: GraphKey | None) -> CommonMetadata:
        (common,) = inputs.write(rows_of(batch), key)
        return common

    first = ScheduledBatch(
        slots=[0, 1, 2],
        query_lens=[9, 4, 3],
        context_lens=[0, 20, 0],
        samples=[True] * 3,
        num_tokens=16,
        new=[new(0, list(range(10, 19))), new(1, list(range(24))), new(2, [5, 6, 7])],
        appends=[
            BlockAppend(slot=0, start=0, block_ids=[3, 4, 5]),
            BlockAppend(slot=1, start=0, block_ids=[6] * 6),
            BlockAppend(slot=2, start=0, block_ids=[7]),
        ],
    )
    inputs.take_over(first, SlotFailures())
    write(first, GraphKey(GraphSet.MIXED, 16, 4))
    inputs.append_tokens([0, 2], [[91], [92]])
    second = ScheduledBatch(
        slots=[0, 2], query_lens=[1, 3], context_lens=[9, 1], samples=[True] * 2, num_decodes=1, num_tokens=4
    )
    key = GraphKey(GraphSet.MIXED, 8, 4)
    common = write(second, key)
    assert (common.num_reqs, common.num_decodes, common.num_tokens) == (2, 1, 4)
    assert (common.num_decode_tokens, common.max_query_len, common.max_seq_len) == (1, 3, 10)
    assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist() == [0, 1, 4, 4, 4]
    assert common.seq_lens.tolist() == common.seq_lens_cpu.tolist() == [10, 4, 0, 0]
    assert common.slot_mapping.tolist() == [5 * 4 + 1, 7 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, -1, -1, -1, -1]
    assert inputs.input_ids_np[:8].tolist() == [91, 6, 7, 92, 0, 0, 0, 0]
    assert inputs.positions_np[:8].tolist() == [9, 1, 2, 3, 0, 0, 0, 0]
    assert inputs.logits_rows_np.tolist() == [0, 3, 0, 0]
    assert common.block_table[0, :3].tolist() == [3, 4, 5]
    # An eager step of one looks at no row behind its own.
    alone = ScheduledBatch(slots=[2], query_lens=[1], context_lens=[3], samples=[True], num_decodes=1, num_tokens=1)
    inputs.seq_lens_np[1:] = 31
    assert write(alone, None).max_seq_len == 4
    third = ScheduledBatch(
        slots=[2, 0], query_lens=[1, 1], context_lens=[3, 9], samples=[True] * 2, num_decodes=2, num_tokens=2
    )
    common = write(third, GraphKey(GraphSet.DECODE, 4, 4, 1))
    assert common.seq_lens.tolist() == [4, 10, 0, 0] and np.array_equal(common.seq_lens_cpu, [4, 10, 0, 0])


def test_a_context_is_not_longer_than_the_model() -> None:
    sizes: dict[str, Any] = {"groups": [KVGroup(layers=(0,), block_size=16)], "max_model_len": 40, "max_num_seqs": 9}
    assert most_step_tokens(num_blocks=2, **sizes) == 32
    assert most_step_tokens(num_blocks=3, **sizes) == 40
    assert most_step_tokens(num_blocks=5, **sizes) == 40 + 32


def test_tokens_behind_the_context_are_left_out() -> None:
    """The column behind it is that of the next token in the entry of a draft head."""
    inputs = CpuInputs(max_num_seqs=1, max_num_tokens=8, max_model_len=8, block_sizes=(4,))
    batch = ScheduledBatch(
        slots=[0], query_lens=[6], context_lens=[0], samples=[True], num_tokens=6, new=[new(0, [9] * 6)]
    )
    inputs.take_over(batch, SlotFailures())
    inputs.write_drafts(0, np.array([5, 6, 7]))
    assert inputs.token_ids[0].tolist() == [9, 9, 9, 9, 9, 9, 5, 6, 0]
    for run in ([1, 2, 3], [4], [4]):
        inputs.append_tokens([0], [run])
        inputs.write_drafts(0, np.array([5, 6, 7]))
        assert inputs.tokens_of(0).tolist() == [9, 9, 9, 9, 9, 9, 1, 2]
        assert inputs.token_ids[0, 8] == 0
