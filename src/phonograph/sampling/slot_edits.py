"""Logit bias, min_tokens and penalties of slots, in the form in which a device's sampling kernels read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from phonograph.core.sampling_params import SamplingParams
from phonograph.kernels.host_arrays import send
from phonograph.kernels.logit_edits import BIAS_BIT, BIAS_ENTRIES, END_BIT, NUM_FACTORS, PROMPT_BIT
from phonograph.kernels.torch.sampling import penalize


class SlotEdits:
    """Static tensors by slot; see `LogitEdits`. Kernels count the tokens of the output."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.words = torch.zeros((max_num_seqs, vocab_size), dtype=torch.int32, device=device)
        self.biases = torch.zeros((max_num_seqs, BIAS_ENTRIES), dtype=torch.float32, device=device)
        self.factors = torch.zeros((max_num_seqs, NUM_FACTORS), dtype=torch.float32, device=device)

    @staticmethod
    def nbytes(*, max_num_seqs: int, vocab_size: int) -> int:
        """Return the memory of the tensors."""
        return max_num_seqs * 4 * (vocab_size + BIAS_ENTRIES + NUM_FACTORS)

    def load(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        end_token_ids: Collection[int],
    ) -> bool:
        """Load the edits of a request behind the steps in flight. Return False if it has none; nothing is written then.

        Args:
            slot: the slot.
            params: sampling parameters, checked by `SamplingParams.check_vocabulary`.
            prompt_token_ids: tokens of the prompt.
            output_token_ids: tokens generated before a preemption.
            end_token_ids: tokens masked before min_tokens are generated.
        """
        must_not_end = params.min_tokens > 0 and len(end_token_ids) > 0
        if not (params.has_penalties or params.logit_bias or must_not_end):
            return False
        words = np.bincount(np.array(output_token_ids, np.int64), minlength=self.words.shape[1]).astype(np.uint32)
        words[np.array(prompt_token_ids, np.int64)] |= np.uint32(1 << PROMPT_BIT)
        if must_not_end:
            words[[*end_token_ids]] |= np.uint32(1 << END_BIT)
        if params.logit_bias:
            biases, places = np.unique(np.array([*params.logit_bias.values()], np.float32), return_inverse=True)
            words[[*params.logit_bias]] |= (places + 1).astype(np.uint32) << np.uint32(BIAS_BIT)
            send(biases, self.biases[slot, 1 : 1 + len(biases)])
        factors = params.repetition_penalty, params.presence_penalty, params.frequency_penalty, 0.0
        send(np.array(factors, np.float32), self.factors[slot])
        send(words.view(np.int32), self.words[slot])
        return True

    def apply(
        self, logits_NV: torch.Tensor, slots_N: torch.Tensor, kinds_N: torch.Tensor, counted_NK: torch.Tensor
    ) -> torch.Tensor:
        """Return edited logits, float32, as the kernels read them, without waiting for a device.

        Args:
            logits_NV: float32.
            slots_N: int64, slot of each row.
            kinds_N: int32, as `LogitEdits.edits`.
            counted_NK: int64, tokens that the words count and that do not come before the row; below 0 for none.
        """
        words_NV = self.words[slots_N]
        counts_NV = words_NV & ((1 << PROMPT_BIT) - 1)
        counts_NV.scatter_add_(-1, counted_NK.clamp(min=0), -(counted_NK >= 0).to(torch.int32))
        places_NV = ((words_NV >> BIAS_BIT) & (BIAS_ENTRIES - 1)).to(torch.int64)
        edited_NV = logits_NV + self.biases[slots_N].gather(-1, places_NV)
        ends_NV = ((words_NV >> END_BIT) & 1).to(torch.bool) & (kinds_N > 1)[:, None]
        edited_NV.masked_fill_(ends_NV, -torch.inf)
        in_prompt_NV = ((words_NV >> PROMPT_BIT) & 1).to(torch.bool)
        edited_NV = penalize(edited_NV, in_prompt_NV, counts_NV, *self.factors[slots_N, :3].unbind(dim=-1))
        return torch.where((kinds_N > 0)[:, None], edited_NV, logits_NV)
