"""Ragged batches for kernels of mixers with a state: slots, checkpoints, and places that no sequence reads."""

from __future__ import annotations

import torch

SLOTS, PLACES = 6, 9
BATCHES: dict[str, tuple[list[int], list[int], int]] = {
    # Query lengths, contexts, and tokens of padding.
    "decodes": ([1, 1, 1, 1], [5, 0, 80, 1], 2),
    # Kernels that take single tokens only.
    "single": ([1, 1, 1, 1, 1], [3, 0, 1, 80, 2], 2),
    "drafts": ([3, 1, 16, 2], [4, 0, 9, 1], 0),
    "mixed": ([1, 17, 64, 2], [30, 0, 3, 0], 3),
    "chunks": ([65, 130], [0, 7], 1),
    "long": ([300, 1, 20], [70, 3, 0], 2),
}


def step_rows(batch: str, generator: torch.Generator) -> tuple[list[torch.Tensor], list[int]]:
    """Return starts, lengths, slots and checkpoints of a batch, and the places of states that no sequence reads."""
    queries, contexts, _ = BATCHES[batch]
    # A row without a sequence is at the end, and the last of several sequences writes no state.
    num_slots = max(2, len(queries) - 1)
    slots = torch.randperm(SLOTS, generator=generator)[:num_slots].tolist() + [-1] * (len(queries) + 1 - num_slots)
    checkpoints = torch.full((3, len(slots)), -1, dtype=torch.int32)
    checkpoints[0, 0] = SLOTS
    for row, (query, context) in enumerate(zip(queries[:2], contexts, strict=False)):
        checkpoints[1:, row] = torch.tensor([SLOTS + 1 + row, context + (query + 1) // 2])
    starts = torch.tensor([0, *queries, 0]).cumsum(0)
    lens = [context + query for context, query in zip(contexts, queries, strict=True)]
    numbers = (torch.tensor([*one], dtype=torch.int32) for one in (starts, [*lens, 0], slots))
    read = {slot for slot, context in zip(slots[1:], contexts[1:], strict=False) if context}
    read |= {SLOTS} if contexts[0] else set()
    return [*numbers, checkpoints], [*{*range(PLACES)} - read]


def assert_near(got: torch.Tensor, wanted: torch.Tensor, most: float) -> None:
    """Compare by the relative error of the whole, and places of NaN one by one."""
    assert torch.equal(got.cpu().isnan(), wanted.isnan())
    error = (got.cpu().double() - wanted.double()).nan_to_num()
    assert error.norm() <= most * wanted.double().nan_to_num().norm()
