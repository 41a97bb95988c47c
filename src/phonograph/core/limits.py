"""Sizes of the largest step and the longest request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes that the scheduler keeps to, and that buffers of the runner and of attention backends must hold.

    Attributes:
        max_model_len: tokens of a sequence, prompt and output together.
        max_num_seqs: sequences running at a time, which is the number of request slots R.
        max_num_batched_tokens: tokens T in one step.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
