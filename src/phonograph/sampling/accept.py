"""Acceptance of drafts: a draft is kept if it is the token that sampling chooses there without drafts.

Each row of logits is sampled with the noise of its own draw, so the text is that of decoding without drafts, for every
filter and seed. This is the coupling of Daliri et al. 2024 ("Coupling without Communication and Drafter-Invariant
Speculative Decoding").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from phonograph.core.batch import SlotFailure, TokenLogprobs
from phonograph.sampling.sampler import Sampler


@dataclass(slots=True, kw_only=True)
class Runs:
    """Tokens that a step gives to its sequences.

    Attributes:
        token_ids: of each sequence, at least one; -1 is the last one of a sequence without a token, see `Sampled`.
        logprobs: by slot, one entry a token.
        failures: by slot.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict[int, list[TokenLogprobs]])
    failures: dict[int, SlotFailure] = field(default_factory=dict[int, SlotFailure])


def sample_runs(
    sampler: Sampler,
    logits_LV: torch.Tensor,
    first_rows: np.ndarray,
    num_rows: np.ndarray,
    slots: Sequence[int],
    draws: np.ndarray,
    drafts: np.ndarray,
) -> Runs:
    """Sample the rows of logits of sequences up to the first draft that is wrong.

    Rows are sampled in the order of their positions. So penalties, grammars and other state of a slot have seen the
    tokens before a row, and no rejected draft.

    Args:
        sampler: of the slots.
        logits_LV: any float dtype.
        first_rows: first row of each sequence, int64 [N], ascending.
        num_rows: rows of each sequence, int64 [N].
        slots: slot of each sequence, distinct.
        draws: index of the draw of each first row, int64 [N].
        drafts: draft behind the token of each row, int64 [L]; that of a sequence's last row is not read.
    """
    runs = Runs(token_ids=[[] for _ in slots])
    going, depth = np.arange(len(slots)), 0
    while len(going):
        rows = first_rows[going] + depth
        of = [slots[index] for index in going.tolist()]
        whole = rows[-1] - rows[0] + 1 == len(rows)  # a view needs no copy
        logits = logits_LV[int(rows[0]) : int(rows[-1]) + 1] if whole else logits_LV[torch.from_numpy(rows)]
        sampled = sampler.sample(logits, of, draws[going] + depth)
        for index, token_id in zip(going.tolist(), sampled.token_ids, strict=True):
            runs.token_ids[index].append(token_id)
        for slot, entry in sampled.logprobs.items():
            runs.logprobs.setdefault(slot, []).append(entry)
        runs.failures |= sampled.failures
        depth += 1
        going = going[(num_rows[going] > depth) & (drafts[rows] == sampled.token_ids)]
    return runs
