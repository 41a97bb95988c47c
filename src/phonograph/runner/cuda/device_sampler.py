"""Sampling on the device, as the last part of a step and behind it."""

from __future__ import annotations

import torch

from phonograph.kernels.triton.sampling.bitmask import mask_logits
from phonograph.kernels.triton.sampling.sample import sample
from phonograph.runner.cuda.cuda_inputs import CudaInputs


class DeviceSampler:
    """Samples rows of logits into the step's tokens and the slots' last ones.

    logits_RV: static, where steps leave their logits
    """

    def __init__(self, inputs: CudaInputs, logits_RV: torch.Tensor, *, batch_invariant: bool = False) -> None:
        self._inputs = inputs
        self._logits_RV = logits_RV
        self._batch_invariant = batch_invariant

    def sample(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return the tokens int32 [N] of the step's rows of logits."""
        inputs, rows, num_logits = self._inputs, self._inputs.sampling, len(logits_NV)
        tokens_N = inputs.tokens[:num_logits]
        sample(
            logits_NV,
            rows.sample_slots[:num_logits],
            rows.temperature[:num_logits],
            rows.top_k[:num_logits],
            rows.top_p[:num_logits],
            rows.min_p[:num_logits],
            rows.draw_keys[:num_logits],
            inputs.sample_scratch,
            tokens_N,
            inputs.last_token,
            batch_invariant=self._batch_invariant,
        )
        return tokens_N

    def sample_masked(self, rows_G: torch.Tensor, bitmask_GW: torch.Tensor) -> None:
        """Mask the logits of these rows of the last step in place, and choose their tokens; rows below 0 are none."""
        inputs, rows = self._inputs, self._inputs.sampling
        mask_logits(self._logits_RV, rows_G, bitmask_GW)
        sample(
            self._logits_RV,
            rows.slots,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.draw_keys,
            inputs.sample_scratch,
            inputs.tokens,
            inputs.last_token,
            rows_G=rows_G,
            batch_invariant=self._batch_invariant,
        )
