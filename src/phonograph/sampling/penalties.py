"""Token counts by slot for repetition, presence and frequency penalties.

Dense tensors [slots, V] on the device, so that one operation serves a batch. The first request with penalties allocates
them, because few servers need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from phonograph.core.sampling_params import SamplingParams
from phonograph.kernels.torch.sampling import penalize


class Penalties:
    """Token counts and penalty factors of slots with penalties. Each must be loaded before its first use."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device

    @staticmethod
    def nbytes(*, max_num_seqs: int, vocab_size: int) -> int:
        """Return the memory of counts and factors, once a request has penalties."""
        return max_num_seqs * (vocab_size * (1 + 4) + 3 * 4)

    def load(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        in_prompt, counts, factors = self._tensors
        in_prompt[slot] = False
        in_prompt[slot, torch.tensor(prompt_token_ids, dtype=torch.int64, device=self._device)] = True
        output = torch.tensor(output_token_ids, dtype=torch.int64, device=self._device)
        counts[slot] = torch.bincount(output, minlength=self._shape[1])
        factors[slot] = torch.tensor((params.repetition_penalty, params.presence_penalty, params.frequency_penalty))

    def apply(self, logits_NV: torch.Tensor, slots_N: torch.Tensor) -> torch.Tensor:
        """Return a penalized copy of the logits, float32 [N, V], of these slots (int64 [N])."""
        in_prompt, counts, factors = self._tensors
        return penalize(logits_NV, in_prompt[slots_N], counts[slots_N], *factors[slots_N].unbind(dim=-1))

    def record(self, slots_N: torch.Tensor, token_ids_N: torch.Tensor) -> None:
        """Count a sampled token of each slot; slots must be distinct."""
        _, counts, _ = self._tensors
        counts[slots_N, token_ids_N] += 1

    @cached_property
    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Presence in the prompt, counts in the output, and penalty factors; allocated at the first use."""
        in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        output_counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        factors = torch.zeros((self._shape[0], 3), dtype=torch.float32, device=self._device)
        return in_prompt, output_counts, factors
